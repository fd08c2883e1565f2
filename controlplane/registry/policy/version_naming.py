"""Find a version by a prefix of its digest, and decide whether an alias or a split may name it."""

from collections.abc import Sequence
from typing import Final

from controlplane.registry.policy.domain import Model, Version
from controlplane.registry.policy.version_lifecycle import VersionState
from kelvin.contracts.errors import Conflict, InvalidRequest, NotFound, Refused
from kelvin.contracts.names import DIGEST_HEX, is_digest

MIN_PREFIX: Final = 12


def check_digest(version: str) -> None:
    """Check for a full digest. Raises Refused(InvalidRequest)."""
    if not is_digest(version):
        raise Refused(InvalidRequest("version", repr(version[:80]), f"must be {DIGEST_HEX} hex digits"))


def find_version(model: Model, prefix: str) -> Version:
    """Return the model's version. Raises Refused: NotFound; InvalidRequest if the prefix is too short or fits two."""
    if len(prefix) < MIN_PREFIX:
        raise Refused(InvalidRequest("version", repr(prefix), f"must have {MIN_PREFIX} or more hex digits"))
    fitting = [each for each in model.versions if each.registration.version.startswith(prefix)]
    if not fitting:
        raise Refused(NotFound("version", f"{model.model}@{prefix[:DIGEST_HEX]}"))
    if len(fitting) > 1:
        raise Refused(InvalidRequest("version", repr(prefix), f"fits {len(fitting)} versions; give more digits"))
    return fitting[0]


def find_servable(model: Model, prefix: str) -> Version:
    """Return a version that may be named. Raises Refused: as `find_version`, Conflict if it is faulty or deleted."""
    version = find_version(model, prefix)
    what = f"version {version.registration.version[:12]}"
    if version.is_deleted:
        raise Refused(Conflict(what, "it was deleted: push it again"))
    if version.state is VersionState.FAULTY:
        rule = f"its last restore failed ({version.fault}): `kelvin fsck` says what is damaged, or deploy another one"
        raise Refused(Conflict(what, rule))
    return version


def check_unnamed(model: Model, version: Version) -> None:
    """Check that no alias and no split names the version. Raises Refused(Conflict)."""
    digest = version.registration.version
    what = f"version {digest[:12]}"
    if aliases := model.aliases_of(digest):
        raise Refused(Conflict(what, f"the alias '{aliases[0]}' names it: deploy another version first"))
    if digest in model.split:
        rule = f"requests are split to it: `kelvin models split {model.model}` ends that"
        raise Refused(Conflict(what, rule))


def check_split(versions: Sequence[Version]) -> None:
    """Check a split: no version, which ends it, or several of one kind. Raises Refused: InvalidRequest, Conflict."""
    digests = [version.registration.version for version in versions]
    for digest in digests:
        if digests.count(digest) > 1:
            raise Refused(InvalidRequest("weights", digest[:12], "must name each version once"))
        if len(digests) == 1:
            raise Refused(InvalidRequest("weights", digest[:12], "must name two versions or more: deploy a single one"))
    kinds = {version.registration.kind for version in versions}
    if len(kinds) > 1:
        raise Refused(Conflict("the split", f"its versions are of several kinds: {', '.join(sorted(kinds))}"))
