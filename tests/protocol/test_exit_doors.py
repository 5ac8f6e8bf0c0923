"""Each way in which a process ends, with a save in flight or one that comes last: nothing is lost without a word.

On two Pythons: from 3.12 on an exiting interpreter starts no threads, and children of multiprocessing call functions of
``atexit`` only from 3.13 on.
"""

from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch

from nxd_ckpt import open_checkpoint
from tests.protocol.children import fails_without_rank_1, in_child
from tests.protocol.states import visible_tags
from tests.support.processes import FORKED, run_file, run_program, run_to_their_ends

pytestmark = pytest.mark.both

# After a line with the directory, and whether its second save fails.
PROLOGUE = """
import atexit, os, sys
import torch
import nxd_ckpt
from nxd_ckpt import dcp

state = {"model": {"weight": torch.ones(2**18)}}
if fails:
    open(os.path.join(path, "last"), "w").close()  # a file in the place of the tag
"""


PROGRAMS = {
    "dcp.async_save": 'dcp.async_save(state, checkpoint_id=f"{path}/last")',
    "atexit": 'atexit.register(lambda: nxd_ckpt.save_checkpoint(path, "last", state["model"]))',
    "atexit, async": """
atexit.register(lambda: nxd_ckpt.Checkpointer(path).save("last", state["model"], async_save=True))
nxd_ckpt.save_checkpoint(os.path.join(path, "other"), "first", state["model"], async_save=True)
""",
    "sys.exit": """
nxd_ckpt.save_checkpoint(path, "last", state["model"], async_save=True)
sys.exit()
""",
    "caught": """
try:
    nxd_ckpt.save_checkpoint(path, "last", state["model"], async_save=True)
    nxd_ckpt.finalize_checkpoint()
except nxd_ckpt.errors.SaveFailed:
    print("caught")
""",
    "exception": """
nxd_ckpt.save_checkpoint(path, "last", state["model"], async_save=True)
raise LookupError("no batch")
""",
    "exception, alone": """
alone = {"topology": nxd_ckpt.Topology(dp=2), "run_id": "a", "timeout": 3600}
nxd_ckpt.save_checkpoint(path, "last", state["model"], async_save=True, **alone)
raise LookupError("no batch")
""",
    "thread": """
import threading
def save():
    threading.main_thread().join()
    nxd_ckpt.save_checkpoint(path, "last", state["model"], async_save=True)
threading.Thread(target=save).start()
""",
}
LOST = ["dcp.async_save", "atexit, async", "thread"]
ENDS = [(name, False) for name in PROGRAMS] + [(name, True) for name in (*LOST, "caught")]


@dataclass(frozen=True)
class End:
    """How a program ended, and the directory that it saved to."""

    path: Path
    process: CompletedProcess[str]


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], End]:
    """Of each program, and for some where its last save fails."""
    paths = {(name, fails): tmp_path_factory.mktemp("end") for name, fails in ENDS}
    programs = {
        f"{name}, {fails}": f"path, fails = {str(path)!r}, {fails}{PROLOGUE}{PROGRAMS[name]}"
        for (name, fails), path in paths.items()
    }
    return dict(zip(paths, map(End, paths.values(), run_to_their_ends(programs).values()), strict=True))


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "exception, alone"])
def test_the_last_save_is_finished(ends: dict[tuple[str, bool], End], name: str) -> None:
    """Whoever makes it; the exit code is 0, or that of the script's own exception."""
    end, raises = ends[name, False], name == "exception"
    assert raises == end.process.returncode, end.process.stderr
    assert raises == ("LookupError: no batch" in end.process.stderr)
    assert raises == ("Traceback" in end.process.stderr)
    assert torch.equal(torch.ones(2**18), open_checkpoint(end.path, "last").read("model/weight"))
    assert not list(end.path.glob("**/lease.json"))


@pytest.mark.parametrize("name", LOST)
def test_a_lost_save_is_the_exit_code(ends: dict[tuple[str, bool], End], name: str) -> None:
    """And the log names the tag."""
    end = ends[name, True]
    assert 1 == end.process.returncode, end.process.stderr
    assert "last" in end.process.stderr


def test_a_lost_save_that_the_script_caught_is_not(ends: dict[tuple[str, bool], End]) -> None:
    """Its exit code is its own."""
    process = ends["caught", True].process
    assert (0, "caught\n") == (process.returncode, process.stdout), process.stderr


def test_after_an_exception_other_ranks_get_a_short_grace_only(ends: dict[tuple[str, bool], End]) -> None:
    """This rank's vote is written, but it does not wait a timeout of an hour for a rank that never saves."""
    end = ends["exception, alone", False]
    assert 1 == end.process.returncode
    assert "LookupError: no batch" in end.process.stderr
    votes = end.path / ".nxd_ckpt" / "votes" / "a-1"
    assert ["rank_00000.vote.json"] == [file.name for file in votes.rglob("*.json")]
    assert [] == visible_tags(end.path)


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.once)])
def test_a_child_of_multiprocessing_finishes_its_saves(tmp_path: Path, method: str) -> None:
    """Its exit code is 1 if one failed."""
    for fails, code, tags in ((False, 0, ["one", "two"]), (True, 1, ["one"])):
        assert code == in_child(method, tmp_path / str(code), fails)
        assert tags == visible_tags(tmp_path / str(code))


@pytest.mark.parametrize("error", [LookupError("no batch"), SystemExit(1)])
def test_a_child_that_fails_gives_other_ranks_a_short_grace(tmp_path: Path, error: BaseException) -> None:
    """An hour is not waited for a rank that never saves. torch's spawn makes each exception the exit code 1."""
    child = FORKED.Process(target=fails_without_rank_1, args=(tmp_path, error))
    child.start()
    child.join(600)
    code = child.exitcode
    child.kill()
    assert 1 == code
    assert [] == visible_tags(tmp_path)


FORKS = """
import multiprocessing, sys
from pathlib import Path
from nxd_ckpt import close_checkpointers
from tests.protocol.children import in_child, saves_last

path, results = Path(sys.argv[1]), multiprocessing.get_context("fork").Queue()
for used in (False, True):
    if used:
        saves_last(path / "parent", False)
        close_checkpointers()
    print(in_child("fork", path / f"{used} 0", False), in_child("fork", path / f"{used} 1", True))
"""


def test_a_forked_child_finishes_its_saves(tmp_path: Path) -> None:
    """Whether its parent saved before or not."""
    done = run_program(FORKS, tmp_path)
    assert (0, "0 1\n0 1\n") == (done.returncode, done.stdout), done.stderr
    for used in (False, True):
        assert ["one", "two"] == visible_tags(tmp_path / f"{used} 0")
        assert ["one"] == visible_tags(tmp_path / f"{used} 1")


POOLED = """
import concurrent.futures, multiprocessing, sys
import torch
import nxd_ckpt
from tests.protocol.children import saves_last

made = []

def task(path, fails, own):
    if own:
        made.append(nxd_ckpt.Checkpointer(path))
        made[-1].save(f"own-{own}", {"weight": torch.ones(10)}, async_save=True)
    else:
        saves_last(path, fails)
    return "done"

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[2])
    with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
        for fails, own in ((False, 0), (False, 1), (False, 2), (True, 0)):
            future = pool.submit(task, f"{sys.argv[1]}/{fails}", fails, own)
            print(future.exception() or future.result())
"""


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.once)])
def test_a_task_of_a_pool_ends_with_its_saves(tmp_path: Path, method: str) -> None:
    """A lost one is its exception, since nobody looks at exit codes of a pool. The next task saves again."""
    script = tmp_path / "pooled.py"
    script.write_text(POOLED)
    ended = run_file(script, tmp_path, method)
    assert 0 == ended.returncode, ended.stderr
    *done, lost = ended.stdout.splitlines()
    assert ["done"] * 3 == done
    assert "'two'" in lost
    assert "No space left on device" in lost
    assert ["one", "two", "own-1", "own-2"] == visible_tags(tmp_path / "False")
    assert ["one"] == visible_tags(tmp_path / "True")


LAUNCHED = """
import os, sys
os.environ["PJRT_DEVICE"] = "CPU"
import torch, torch_xla, nxd_ckpt

def train(index, path, lost):
    for directory in (path, lost):
        nxd_ckpt.save_checkpoint(directory, "last", {"weight": torch.ones(2**18)}, async_save=True)

if __name__ == "__main__":
    torch_xla.launch(train, args=tuple(sys.argv[1:]))
"""


@pytest.mark.xla
def test_what_torch_xla_launches_finishes_its_saves(tmp_path: Path) -> None:
    """In a process of a pool, where two are in flight; that one of them is lost is an exception of the launch."""
    pytest.importorskip("torch_xla")
    script = tmp_path / "train.py"
    script.write_text(LAUNCHED)
    (tmp_path / "lost").mkdir()
    (tmp_path / "lost" / "last").touch()  # a file in the place of the tag
    ended = run_file(script, tmp_path / "run", tmp_path / "lost")
    assert 1 == ended.returncode, ended.stderr
    assert str(tmp_path / "lost") in ended.stderr
    assert ["last"] == visible_tags(tmp_path / "run")
