"""`pytest -m quick`: every directory of tests takes part in it, with files that exist."""

from tests.helpers.paths import ROOT
from tests.helpers.quick import QUICK, is_quick

TESTS = ROOT / "tests"


def test_every_directory_of_tests_has_quick_ones():
    directories = {file.parent.name for file in TESTS.rglob("test_*.py")}
    assert directories == set(QUICK), "name the cheapest files of each directory in tests/helpers/quick.py"


def test_every_quick_file_exists():
    for directory, names in QUICK.items():
        folder = TESTS if directory == "tests" else TESTS / directory
        assert not [name for name in names if not (folder / f"{name}.py").is_file()]


def test_only_the_tests_in_these_files_are_quick(request):
    for item in request.session.items:
        assert bool(item.get_closest_marker("quick")) == (is_quick(item.path) and not item.get_closest_marker("slow"))
