"""`install` replaces neuronx-distributed's functions wherever a program reaches them."""

import functools
import importlib
import pickle
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

import nxd_ckpt
from nxd_ckpt import Last, Tier
from nxd_ckpt.errors import InvalidArgument
from tests.support.processes import run_program

pytestmark = pytest.mark.usefixtures("nxd")

FOUR = ("save_checkpoint", "load_checkpoint", "has_checkpoint", "finalize_checkpoint")
PLACES = {
    "neuronx_distributed": FOUR,
    "neuronx_distributed.trainer": FOUR[:2],
    "neuronx_distributed.trainer.checkpoint": FOUR,
    "neuronx_distributed.parallel_layers": ("save", "load"),
    "neuronx_distributed.parallel_layers.checkpointing": ("save", "load"),
    "neuronx_distributed.lightning.checkpoint_io": ("save", "load"),
}


def owners() -> set[str]:
    """The packages that the functions at all places are from."""
    functions = (getattr(import_module(module), name) for module, names in PLACES.items() for name in names)
    return {function.__module__.partition(".")[0] for function in functions}


def test_what_is_imported_later_is_replaced():
    """A script that installs first, and imports then, finds ours under every name; undone, NxD's own."""
    nxd_ckpt.install()
    assert "neuronx_distributed" not in sys.modules
    assert {"nxd_ckpt"} == owners()
    nxd_ckpt.uninstall()
    assert {"neuronx_distributed"} == owners()


def test_what_is_loaded_is_replaced():
    """A script that installs after its imports finds ours under every name."""
    assert {"neuronx_distributed"} == owners()
    nxd_ckpt.install()
    assert {"nxd_ckpt"} == owners()


def test_the_rest_of_the_package_stays(tmp_path: Path):
    """A script uses one name for the checkpoints and for everything else."""
    nxd_ckpt.install()
    nxd: Any = import_module("neuronx_distributed")
    assert {"tensor_parallel_size": 2} == nxd.neuronx_distributed_config(tensor_parallel_size=2)
    model = torch.nn.Linear(2, 2)
    assert None is nxd.save_checkpoint(str(tmp_path), "step_1", model, user_content={"step": 1})
    assert {"step": 1} == nxd.load_checkpoint(str(tmp_path), model=model)
    assert nxd.has_checkpoint(str(tmp_path)) is True
    assert None is nxd.finalize_checkpoint()


def test_names_in_other_modules_are_replaced():
    """A module that has imported a function under any name calls ours too, before and after; undone, neither does."""
    nxd: Any = import_module("neuronx_distributed")
    own = nxd.save_checkpoint
    script: Any = ModuleType("a_training_script")
    script.nxd_save = own
    sys.modules["a_training_script"] = script
    try:
        nxd_ckpt.install()
        assert nxd.save_checkpoint is script.nxd_save is not own
        script.save_later = nxd.save_checkpoint
        nxd_ckpt.uninstall()
        assert [own] * 3 == [nxd.save_checkpoint, script.nxd_save, script.save_later]
    finally:
        del sys.modules["a_training_script"]


def test_twice_is_once(caplog: pytest.LogCaptureFixture):
    """A second install() changes and says nothing, and one uninstall() undoes both."""
    import_module("neuronx_distributed")
    nxd_ckpt.install()
    nxd_ckpt.install()
    assert 1 == caplog.text.count("takes the place")
    nxd_ckpt.uninstall()
    assert {"neuronx_distributed"} == owners()


def test_one_line_names_all_places(caplog: pytest.LogCaptureFixture):
    """What is replaced, and what will be, can be read in the log."""
    import_module("neuronx_distributed")
    nxd_ckpt.install()
    (line,) = [record.getMessage() for record in caplog.records]
    assert "neuronx_distributed.trainer.checkpoint.save_checkpoint" in line
    assert line.endswith(", the others as soon as they are imported")


def test_one_short_line_if_nothing_is_imported(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    """It may not even be installed: then no place is named, and the line says so."""
    monkeypatch.setattr("nxd_ckpt.drop_in.install.find_spec", lambda name: None)
    nxd_ckpt.install()
    (line,) = [record.getMessage() for record in caplog.records]
    assert "neuronx_distributed's checkpoint functions: all of them as soon as they are imported" in line
    assert line.endswith(" (neuronx_distributed is not installed here)")


def test_out_of_reach_is_warned_of(caplog: pytest.LogCaptureFixture):
    """Partials, default arguments and closures that were made before keep NxD's function: a warning names each."""
    nxd: Any = import_module("neuronx_distributed")
    save = nxd.save_checkpoint
    script: Any = ModuleType("a_script_with_partials")
    script.save_xser = functools.partial(save, use_xser=True)

    def with_default(save: Any = save) -> Any:
        return save

    def with_keyword(*, save: Any = save) -> Any:
        return save

    script.kept = [with_default, with_keyword]
    sys.modules["a_script_with_partials"] = script
    try:
        nxd_ckpt.install()
    finally:
        del sys.modules["a_script_with_partials"]
    warnings = [record.getMessage() for record in caplog.records if "bound before" in record.getMessage()]
    assert 1 == sum("functools.partial (a_script_with_partials.save_xser)" in line for line in warnings)
    assert 1 == sum("with_default" in line for line in warnings)
    assert 1 == sum("with_keyword" in line for line in warnings)


@pytest.mark.parametrize(
    "options",
    [{"num_kept_ckpts": 0}, {"verify": "maybe"}, {"tiers": []}, {"retain": "all"}, {"on_save_failure": "ignore"}],
    ids=str,
)
def test_wrong_options_are_refused(options: dict[str, Any]):
    """Options that no save could honour are refused at once, and nothing is replaced."""
    with pytest.raises(InvalidArgument):
        nxd_ckpt.install(**options)
    assert {"neuronx_distributed"} == owners()


@pytest.mark.parametrize("options", [{"num_kept_ckpts": 1}, {"retain": [Last(1)]}], ids=str)
def test_options_are_defaults(tmp_path: Path, options: dict[str, Any]):
    """Retention is for calls that keep everything, as scripts pass -1; a call's own number counts."""
    nxd_ckpt.install(**options)
    nxd: Any = import_module("neuronx_distributed")
    for step in range(4):
        nxd.save_checkpoint(str(tmp_path / "run"), f"step_{step}", torch.nn.Linear(2, 2), num_kept_ckpts=-1)
        nxd.save_checkpoint(str(tmp_path / "own"), f"step_{step}", torch.nn.Linear(2, 2), num_kept_ckpts=2)
    assert ["step_3"] == [tag.tag for tag in nxd_ckpt.list_checkpoints(tmp_path / "run")]
    assert ["step_2", "step_3"] == [tag.tag for tag in nxd_ckpt.list_checkpoints(tmp_path / "own")]


def test_tiers_are_defaults(tmp_path: Path):
    """Tiers are those of the first one's directory; other directories are saved to as they are."""
    nxd_ckpt.install(tiers=[Tier(tmp_path / "run"), Tier(tmp_path / "far")], durable=False)
    nxd: Any = import_module("neuronx_distributed")
    for step in (1, 2):
        nxd.save_checkpoint(str(tmp_path / "run"), f"step_{step}", torch.nn.Linear(2, 2))
    nxd.save_checkpoint(str(tmp_path / "other"), "step_1", torch.nn.Linear(2, 2))
    nxd_ckpt.close_checkpointers()
    tags = {name: [tag.tag for tag in nxd_ckpt.list_checkpoints(tmp_path / name)] for name in ("run", "far", "other")}
    assert {"run": ["step_1", "step_2"], "far": ["step_1", "step_2"], "other": ["step_1"]} == tags


SCRIPT = """
import sys
import torch
import neuronx_distributed as nxd
if __name__ == "__main__":
    nxd.save_checkpoint(sys.argv[1], "step_1", torch.nn.Linear(2, 2), user_content=sys.argv[2:], num_kept_ckpts=-1)
    print(nxd.load_checkpoint(sys.argv[1]), __name__)
"""


RUN = """
import os, sys
sys.path[:0] = [sys.argv[1], "unused"]
os.chdir(sys.argv[2])
from nxd_ckpt.run import main
main(sys.argv[3:])
"""


@pytest.mark.parametrize("program", [["train.py"], ["-m", "train"]], ids=["script", "module"])
def test_a_script_that_nobody_edits(package: Path, tmp_path: Path, program: list[str]):
    """``python -m nxd_ckpt.run`` runs a script, or a module, with its own arguments."""
    (tmp_path / "train.py").write_text(SCRIPT)
    done = run_program(RUN, package, tmp_path, *program, tmp_path / "run", "--lr", "1")
    assert (0, "['--lr', '1'] __main__\n") == (done.returncode, done.stdout), done.stderr


AS_BY_ITSELF = """
import atexit, dataclasses, inspect, os, pickle, sys

@dataclasses.dataclass
class Arguments:
    steps: int = 3

def at_the_end():
    assert Arguments() == pickle.loads(pickle.dumps(Arguments())), "no __main__"
    print("end")

atexit.register(at_the_end)
assert dataclasses.fields(Arguments)[0].type is int
assert sys.modules["__main__"].__dict__ is globals()
os.chdir("/")
assert os.path.isfile(__file__)
assert "print" in inspect.getsource(at_the_end)
"""


@pytest.mark.parametrize("program", [["train.py"], ["-m", "train"], ["-m", "package"]], ids=" ".join)
def test_a_script_is_as_it_is_by_itself(tmp_path: Path, program: list[str]):
    """Its annotations, its file, its source after a change of directory, and its classes until the very end."""
    (tmp_path / "package").mkdir()
    for name in ("train.py", "package/__main__.py"):
        (tmp_path / name).write_text(AS_BY_ITSELF)
    done = run_program(RUN, tmp_path, tmp_path, *program)
    assert (0, "end\n") == (done.returncode, done.stdout), done.stderr


CHILDREN = """
import multiprocessing, sys, threading, torch
import neuronx_distributed as nxd
from neuronx_distributed import save_checkpoint

def work(directory, given, step):
    assert given is save_checkpoint is nxd.save_checkpoint
    save_checkpoint(directory, f"step_{step}", {"w": torch.ones(2)})

def next_generation(*arguments):
    child = multiprocessing.get_context("spawn").Process(target=work, args=arguments)
    child.start()
    child.join()
    raise SystemExit(child.exitcode)

if __name__ == "__main__":
    import nxd_ckpt
    nxd_ckpt.install(num_kept_ckpts=1, storage_options={"lock": threading.Lock()})
    for step, (method, function) in enumerate([("fork", work), ("spawn", next_generation)]):
        arguments = sys.argv[1], nxd.save_checkpoint, step
        child = multiprocessing.get_context(method).Process(target=function, args=arguments)
        child.start()
        child.join()
        print(method, child.exitcode)
"""


def test_children_of_multiprocessing(package: Path, tmp_path: Path):
    """Those that begin the script again have ours too, with the options, except those that cannot be pickled."""
    (tmp_path / "train.py").write_text(CHILDREN)
    done = run_program(RUN, package, tmp_path, "train.py", tmp_path / "run")
    assert (0, "fork 0\nspawn 0\n") == (done.returncode, done.stdout), done.stderr
    assert ["step_1"] == [tag.tag for tag in nxd_ckpt.list_checkpoints(tmp_path / "run")]
    assert "without storage_options=" in done.stderr


def test_reloaded_modules_and_mocks(tmp_path: Path):
    """A module that is imported again is replaced again; a mock takes the place of ours for as long as it is there."""
    nxd_ckpt.install()
    module = importlib.reload(import_module("neuronx_distributed.trainer.checkpoint"))
    with mock.patch(f"{module.__name__}.save_checkpoint") as mocked:
        module.save_checkpoint("anything")
    mocked.assert_called_once_with("anything")
    assert {"nxd_ckpt"} == owners()
    nxd_ckpt.uninstall()
    assert {"neuronx_distributed"} == owners()


def test_the_functions_can_be_pickled():
    """As neuronx-distributed's own: a launcher hands them to its processes."""
    nxd_ckpt.install()
    nxd: Any = import_module("neuronx_distributed")
    for function in [*(getattr(nxd, name) for name in FOUR), nxd.parallel_layers.save, nxd.parallel_layers.load]:
        assert function is pickle.loads(pickle.dumps(function))


def test_the_scripts_own_exit_code(tmp_path: Path):
    (tmp_path / "train.py").write_text("raise SystemExit(3)")
    assert 3 == run_program(RUN, tmp_path, tmp_path, "train.py").returncode
