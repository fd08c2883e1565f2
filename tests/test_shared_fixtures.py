"""Files that share an installation are found by what their tests ask for; a file that is deep, by its mark."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.shared_fixtures import ROOT, SharedFixtures, is_deep, shared_fixture_of


@pytest.mark.parametrize(
    ("text", "want"),
    [
        pytest.param("def test_a(kelvin: Installation) -> None:", "kelvin: Installation", id="by a test"),
        pytest.param("def test_a(tmp_path: Path, house: Installation)", "house: Installation", id="not first"),
        pytest.param("def test_a(\n    buckets: Buckets, bucket: str\n)", "buckets: Buckets", id="over lines"),
        pytest.param('@pytest.fixture()\ndef two(kelvin: Installation)', "kelvin: Installation", id="a fixture"),
        pytest.param("def _ask(kelvin: Installation) -> None:", None, id="not by what tests call"),
        pytest.param("def test_a(kelvin: str) -> None:", None, id="not by another's name"),
    ],
)  # fmt: skip
def test_shared_fixtures_are_found_by_text(tmp_path: Path, text: str, want: str | None) -> None:
    """By the file's text: who gives out the work has imported none of it."""
    path = tmp_path / "test_x.py"
    path.write_text(f"import pytest\n\n\n{text}\n")
    assert shared_fixture_of(path) == want


@pytest.mark.parametrize(
    ("text", "want"),
    [
        pytest.param("pytestmark = pytest.mark.deep\n", True, id="all of it"),
        pytest.param("pytestmark = [pytest.mark.deep, pytest.mark.timeout(9)]\n", True, id="with others"),
        pytest.param("@pytest.mark.deep\ndef test_a() -> None:\n    ...\n", False, id="one test of it"),
        pytest.param("pytestmark = pytest.mark.gpu\n", False, id="something else"),
    ],
)
def test_deep_files_are_found_by_text(tmp_path: Path, text: str, want: bool) -> None:
    """Then a run without such tests does not import it."""
    path = tmp_path / "test_x.py"
    path.write_text(text)
    assert is_deep(path) == want


def test_several_files_share_each_installation() -> None:
    """Of the suite itself: more than one file asks for each of them."""
    found = [shared_fixture_of(path) for path in (ROOT / "tests").rglob("test_*.py")]
    for name in ("kelvin: Installation", "watched: Installation", "house: Installation"):
        assert found.count(name) > 1, name


def test_shared_fixture_is_made_once_and_closed() -> None:
    """For all who ask for it by that name; the next after its end has another."""
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
