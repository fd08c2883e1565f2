"""Judge what guards an installation: files of secrets, keys, certificates, backups. Pure: no secret comes in here."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kelvin.policy.findings import Finding, Level

DAY_S: Final = 86_400
STATED_RPO_S: Final = 300
# Of 32 random bytes 30 are different on average; fewer than 16 are to be seen once in 10^10 keys.
LEAST_DIFFERENT: Final = 16
RANDOM_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class SecretFile:
    """`mode` are the permission bits; `different` how many different bytes the secret has, None where it is no key."""

    name: str
    mode: int
    owned: bool  # by whom the data directory belongs to
    is_key_text: bool = True
    different: int | None = None


@dataclass(frozen=True, slots=True)
class BackupFacts:
    """`age_s` of the newest, None where there is none."""

    place: str | None
    age_s: float | None
    every_s: float
    same_disk: bool
    inside: bool  # the data directory
    running: bool


def judge_files(files: Sequence[SecretFile], data_mode: int | None) -> list[Finding]:
    """`data_mode` of the data directory; None where there is none yet."""
    if data_mode is None:
        return [Finding("secrets", Level.OK, "no data directory yet: nothing to guard")]
    findings = []
    if data_mode & 0o077:
        cost = "others of this machine see names and sizes, and may reach what has a weak mode"
        findings.append(
            Finding("secrets", Level.WARN, f"the data directory has mode {data_mode:04o}", cost, "chmod 0700 DATA")
        )
    for file in files:
        if file.mode & 0o077:
            cost = "others of this machine can read it: whoever has it is you"
            mend = f"chmod 0600 DATA/{file.name}, then make it anew (`kelvin keys rotate`), as it may have been read"
            findings.append(Finding("secrets", Level.FAIL, f"{file.name} has mode {file.mode:04o}", cost, mend))
        if not file.owned:
            cost = "its owner can read and change it"
            findings.append(
                Finding("secrets", Level.WARN, f"{file.name} is another user's", cost, f"chown DATA/{file.name}")
            )
        if not file.is_key_text:
            cost = "the command line can't authenticate, and the control plane does not start"
            mend = "bring it back from a backup"
            findings.append(Finding("keys", Level.FAIL, f"{file.name} holds no key", cost, mend))
        elif file.different is not None and file.different < LEAST_DIFFERENT:
            seen = f"the secret in {file.name} has {file.different} different bytes of {RANDOM_BYTES}"
            mend = f"`kelvin keys rotate ID --output DATA/{file.name}`"
            findings.append(Finding("keys", Level.FAIL, seen, "it was not made at random, and can be guessed", mend))
    return findings or [Finding("secrets", Level.OK, f"{len(files)} files, for their owner alone; keys look random")]


def judge_certificate(name: str, left_s: float | None, mend: str, begins_in_s: float = 0.0) -> Finding:
    """`left_s` until it expires; None where it can't be read. `begins_in_s` above 0: it is not valid before that."""
    check = f"certificate {name}"
    if left_s is None:
        return Finding(check, Level.FAIL, "it can't be read", "no caller can connect", mend)
    if begins_in_s > 0:
        seen = f"not valid before {_span(begins_in_s)} from now: it was made by a clock ahead of this one"
        return Finding(
            check,
            Level.FAIL,
            seen,
            "every caller refuses it",
            "set the clock right: the activator makes it again within a minute",
        )
    days = left_s / DAY_S
    if left_s <= 0:
        return Finding(check, Level.FAIL, f"expired {-days:.0f} days ago", "every caller refuses it", mend)
    level = Level.WARN if days < 30 else Level.OK
    seen = f"good for {days:.0f} days"
    return Finding(check, level, seen, "then every caller refuses it" if days < 30 else "", mend if days < 30 else "")


def _span(seconds: float) -> str:
    return f"{seconds / DAY_S:.0f} days" if seconds >= 2 * DAY_S else f"{seconds / 3600:.1f} hours"


OF_POSTGRESQL: Final = Finding(
    "backups",
    Level.NOTE,
    "KELVIN_DATABASE is set: nothing of it is backed up here",
    "what is lost with it is what its own backups leave",
    "pg_dump, or its archive; and a copy of the secrets in DATA",
)


def judge_backups(facts: BackupFacts) -> list[Finding]:
    """Whether what the documentation states of losses holds here."""
    if facts.place is None:
        cost = "a lost disk takes registry, keys and bills with it"
        mend = "KELVIN_BACKUP=/another/disk, or `kelvin backup FILE` by a timer"
        return [Finding("backups", Level.WARN, "KELVIN_BACKUP is not set", cost, mend)]
    findings = []
    if facts.inside or facts.same_disk:
        where = "inside the data directory" if facts.inside else "on the data directory's disk"
        cost = "they help against a broken database, not against a broken disk"
        findings.append(Finding("backups", Level.WARN, f"they lie {where}", cost, "KELVIN_BACKUP on another disk"))
    if facts.every_s > STATED_RPO_S * 0.8:
        cost = (
            f"up to {facts.every_s:.0f} s of changes to models, keys and tenants may be lost, and the time of a backup"
        )
        findings.append(Finding("backups", Level.NOTE, f"one each {facts.every_s:.0f} s", cost, "KELVIN_BACKUP_S=240"))
    if facts.age_s is None:
        level = Level.FAIL if facts.running else Level.NOTE
        findings.append(
            Finding("backups", level, "none was made yet", "nothing can be restored", "`kelvin logs controlplane`")
        )
    elif facts.running and facts.age_s > 3 * facts.every_s + 60:
        seen = f"the newest is {facts.age_s:.0f} s old, with one each {facts.every_s:.0f} s"
        cost = "changes to models, keys and tenants since then may be lost"
        findings.append(Finding("backups", Level.FAIL, seen, cost, "`kelvin logs controlplane` says why"))
    return findings or [Finding("backups", Level.OK, f"the newest is {facts.age_s or 0:.0f} s old")]
