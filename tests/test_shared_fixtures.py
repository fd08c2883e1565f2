"""Files that share an installation are found by the fixtures in their text, and deep files by their marker."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.shared_fixtures import ROOT, SharedFixtures, is_deep, shared_fixture_of


@pytest.mark.parametrize(
    ("text", "want"),
    [
        pytest.param("def test_a(kelvin: Installation) -> None:", "kelvin: Installation", id="a test's parameter"),
        pytest.param("def test_a(a: int, installation: Installation)", "installation: Installation", id="a later one"),
        pytest.param("def test_a(\n    buckets: Buckets, bucket: str\n)", "buckets: Buckets", id="several lines"),
        pytest.param('@pytest.fixture()\ndef two(kelvin: Installation)', "kelvin: Installation", id="by a fixture"),
        pytest.param("def _ask(kelvin: Installation) -> None:", None, id="a helper's parameter does not count"),
        pytest.param("def test_a(kelvin: str) -> None:", None, id="another type does not count"),
    ],
)  # fmt: skip
def test_shared_fixtures_are_found_by_text(tmp_path: Path, text: str, want: str | None) -> None:
    """The group is found from the text, because the process that schedules has imported no test file."""
    path = tmp_path / "test_x.py"
    path.write_text(f"import pytest\n\n\n{text}\n")
    assert shared_fixture_of(path) == want


@pytest.mark.parametrize(
    ("text", "want"),
    [
        pytest.param("pytestmark = pytest.mark.deep\n", True, id="a deep file"),
        pytest.param("pytestmark = [pytest.mark.deep, pytest.mark.timeout(9)]\n", True, id="deep and another marker"),
        pytest.param("@pytest.mark.deep\ndef test_a() -> None:\n    ...\n", False, id="one deep test"),
        pytest.param("pytestmark = pytest.mark.gpu\n", False, id="another marker"),
    ],
)
def test_deep_files_are_found_by_text(tmp_path: Path, text: str, want: bool) -> None:
    """Deep files are known before the import, so that a normal run can skip them."""
    path = tmp_path / "test_x.py"
    path.write_text(text)
    assert is_deep(path) == want


def test_several_files_share_each_installation() -> None:
    """The suite itself has more than one file for each installation fixture."""
    found = [shared_fixture_of(path) for path in (ROOT / "tests").rglob("test_*.py")]
    for name in ("kelvin: Installation", "watched: Installation", "installation: Installation"):
        assert found.count(name) > 1, name


def test_shared_fixture_is_made_once_and_closed() -> None:
    """A shared fixture is made on first use, shared by name, closed once, and made again afterwards."""
    kept, seen = SharedFixtures(), list[str]()

    @contextmanager
    def thing(name: str) -> Iterator[str]:
        seen.append(f"{name} begins")
        yield name
        seen.append(f"{name} ends")

    for _ in range(2):
        assert kept.get("a", lambda: thing("a")) == "a"
    assert kept.get("b", lambda: thing("b")) == "b"
    assert seen == ["a begins", "b begins"]
    kept.close()
    assert seen[2:] == ["b ends", "a ends"]
    kept.close()
    assert kept.get("a", lambda: thing("another")) == "another"
