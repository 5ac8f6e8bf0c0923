"""Whatever a file holds, whoever reads it: what it says or an error of ours, within a budget of CPU and memory."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.hostile.fuzzing import in_silence, trouble, troubles
from tests.hostile.targets import TARGETS
from tests.hostile.worst import WORST

MANY = pytest.param(range(50, 480_000), marks=[pytest.mark.soak, pytest.mark.timeout(7200)])
"""The same ten thousand times: ten million files of all kinds."""


@pytest.mark.parametrize("numbers", [range(50), MANY])
@pytest.mark.parametrize("name", TARGETS)
def test_damaged_files_are_read_or_refused(name: str, numbers: range) -> None:
    """Seeded: ``python -m tests.hostile NAME --first NUMBER --count 1`` tries one of them again."""
    assert [] == troubles(name, numbers)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.skipif(find_spec("atheris") is None, reason="atheris is not installed: pip install '.[fuzz]'")
def test_damaged_files_that_find_new_ways_are_read_or_refused() -> None:
    """Coverage guides which: a minute for each reader."""
    subprocess.run([sys.executable, "-m", "tests.hostile.guided"], check=True)


@pytest.mark.parametrize("name", [name for name, target in TARGETS.items() if target.findings and name != "pickle"])
def test_what_was_found_before_stays_mended(name: str) -> None:
    """The corpus: each file took too much once, or could have. test_small_files has the pickles."""
    target = TARGETS[name]
    with in_silence():
        assert [] == [what for what in (trouble(target, data) for data in target.findings) if what is not None]


@pytest.mark.parametrize(
    "nbytes", [2**14, *(pytest.param(nbytes, marks=pytest.mark.soak) for nbytes in (2**20, 2**22, 2**24))]
)
@pytest.mark.parametrize("what", WORST)
def test_no_file_takes_more_than_the_budget(what: str, nbytes: int) -> None:
    """Files that cost as much as their bytes can: many small things, many equal ones, keys of one hash."""
    name, made = WORST[what]
    with in_silence():
        assert trouble(TARGETS[name], made(nbytes)) is None
