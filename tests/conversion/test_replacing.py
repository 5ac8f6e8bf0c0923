"""Outputs that replace others survive SIGKILL at every instant: the old one or the new one is there, whole."""

import ctypes
import errno
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import count, product
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from torch.distributed.checkpoint.state_dict_loader import load

from nxd_ckpt import convert, effects, load_checkpoint, save_checkpoint, unshard_checkpoint
from nxd_ckpt.errors import CheckpointError, DirectoryInUse, InvalidArgument
from nxd_ckpt.output import locations
from nxd_ckpt.output.locations import remove_unused
from nxd_ckpt.storage import local, system
from nxd_ckpt.storage.urls import open_storage
from nxd_ckpt.testing.storage import Hook, HookedStorage, Operation, failing
from tests.conversion.tags import contents, remains
from tests.support.processes import run_program

KILLED = """
import os, sys

from nxd_ckpt import convert
from nxd_ckpt.output import locations
from nxd_ckpt.storage import local
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.testing.storage import HookedStorage, killing

directory, exchanges, *kills = sys.argv[1:]
if exchanges == "no":
    local.exchange = lambda one, other: False
for number, kill in enumerate(kills):
    what, operation, key = kill.split(" ", 2)
    if os.fork() == 0:
        locations.open_storage = lambda path, *given: HookedStorage(LocalStorage(path, False), killing(operation, key))
        make = {"whole": "files", "dcp": "dcp", "packed.tar": "tar"}[what]
        convert(f"{directory}/new", f"{directory}/{number}/{what}", to=make, overwrite=True)
        os._exit(0)
    print(os.WTERMSIG(os.wait()[1]))
"""

SECOND = """
import os, sys

from nxd_ckpt import unshard_checkpoint
from nxd_ckpt.errors import DirectoryInUse
from nxd_ckpt.output import locations
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.testing.storage import HookedStorage

first, second, output = sys.argv[1:]
opened = locations.open_storage

def begun(operation):
    if operation.name == "make_dir" and operation.key == ".whole.incomplete":
        locations.open_storage = opened
        if os.fork() == 0:
            try:
                unshard_checkpoint(second, output, overwrite=True)
            except DirectoryInUse as error:
                print(error, flush=True)
            os._exit(0)
        os.wait()

locations.open_storage = lambda path, *given: HookedStorage(LocalStorage(path, False), begun)
unshard_checkpoint(first, output)
"""

OUTPUTS: dict[str, Callable[..., object]] = {
    "whole": partial(convert, to="files"),
    "dcp": partial(convert, to="dcp"),
    "packed.tar": partial(convert, to="tar"),
}


@pytest.fixture
def tags(tmp_path: Path) -> Path:
    """The tags "old" and "new"."""
    for number, name in enumerate(("old", "new")):
        save_checkpoint(tmp_path, name, {"w": torch.full((3,), float(number))}, durable=False)
    return tmp_path


def kill(tags: Path, kills: list[str], *, exchanges: bool) -> list[Path]:
    """Outputs of the old tag, each killed while it was replaced: just before an operation ("OUTPUT NAME KEY")."""
    outputs = [tags / str(number) / one.split()[0] for number, one in enumerate(kills)]
    for output in outputs:
        OUTPUTS[output.name](tags / "old", output)
    done = run_program(KILLED, tags, "yes" if exchanges else "no", *kills)
    assert [signal.SIGKILL.value] * len(kills) == list(map(int, done.stdout.split()))
    return outputs


def made_of(output: Path) -> float:
    """Which tag the output is of: 0 the old one, 1 the new one. It is read as any program would."""
    if output.name == "whole":
        found: torch.Tensor = torch.load(output / "model.pt", weights_only=True)["w"]
    elif output.name == "dcp":
        state = {"model": {"w": torch.empty(3)}}
        load(state, checkpoint_id=output, no_dist=True)
        found = state["model"]["w"]
    else:
        model: dict[str, torch.Tensor] = {}
        load_checkpoint(str(output), model=model)
        found = model["w"]
    return found.unique().item()


def test_where_names_can_be_exchanged_one_of_both_is_there(tags: Path) -> None:
    """At every instant; what is left over is gone after the next one."""
    assert system.exchange(tags / "old", tags / "new")
    assert system.exchange(tags / "old", tags / "new")
    steps = ["swap .{0}.incomplete <-> {0}", "rename .{0}.incomplete -> *", "rename .{0}.replaced -> *"]
    kills = [f"{output} {step.format(output)}" for output in OUTPUTS for step in steps]
    outputs = kill(tags, kills, exchanges=True)
    assert [0, 1, 1] * len(OUTPUTS) == [made_of(output) for output in outputs]
    for output in outputs:
        OUTPUTS[output.name](tags / "new", output, overwrite=True)
        assert [output] == list(output.parent.iterdir())


def test_elsewhere_the_next_to_open_it_finishes(tags: Path) -> None:
    """Between two renames neither is there; then the new one is, for whoever reads it with us, or writes it again."""
    steps = ["rename {0} -> *", "rename .{0}.incomplete -> {0}", "rename .{0}.replaced -> .{0}.incomplete"]
    kills = [f"{output} {step.format(output)}" for output in OUTPUTS for step in steps]
    outputs = kill(tags, kills, exchanges=False)
    assert [True, False, True] * len(OUTPUTS) == [output.exists() for output in outputs]
    convert(tags / "4" / "dcp", tags / "back" / "step_1", to="tag", dry_run=True)
    for output in outputs:
        if not output.exists():
            with pytest.raises(InvalidArgument, match="overwrite=True"):
                OUTPUTS[output.name](tags / "old", output)
    assert [0, 1, 1] * len(OUTPUTS) == [made_of(output) for output in outputs]
    for output in outputs:
        OUTPUTS[output.name](tags / "new", output, overwrite=True)
        assert [output] == list(output.parent.iterdir())


def test_a_second_process_is_refused_before_it_changes_anything(tags: Path) -> None:
    """Both would write below one temporary name, and the second would remove the first one's files."""
    done = run_program(SECOND, tags / "old", tags / "new", output := tags / "outputs" / "whole")
    assert f"output {output} is being written by run " in done.stdout
    assert 0 == made_of(output)
    assert [output] == list(output.parent.iterdir())


def test_a_second_thread_is_refused(tags: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, replaces in product(OUTPUTS, (False, True)):
        output = tags / f"outputs of {kind}" / kind

        def second(operation: Operation, kind: str = kind, output: Path = output) -> None:
            if operation.name == "create":
                patch.undo()
                with pytest.raises(DirectoryInUse, match="by another thread of this process"):
                    OUTPUTS[kind](tags / "old", output, durable=False, overwrite=True)

        with monkeypatch.context() as patch:
            disturb(patch, second)
            OUTPUTS[kind](tags / ("new" if replaces else "old"), output, durable=False, overwrite=replaces)
        assert replaces == made_of(output)
        assert [output] == list(output.parent.iterdir())


def test_what_others_made_in_the_place_of_the_lease_stays(tags: Path) -> None:
    """Links are not followed, and a live job keeps its empty directories."""
    (tags / "victim" / "empty").mkdir(parents=True)
    (tags / "victim" / "place").touch()
    lease = tags / "outputs" / ".whole.lease"
    lease.mkdir(parents=True)
    (lease / ".nxd_ckpt").symlink_to(tags / "victim")
    with pytest.raises(OSError, match=r"\.nxd_ckpt"):
        unshard_checkpoint(tags / "old", tags / "outputs" / "whole", durable=False)
    remove_unused([str(lease)])
    assert ["empty", "place"] == sorted(path.name for path in (tags / "victim").iterdir())
    (tags / "victim" / "lease.json").touch()
    (lease / ".nxd_ckpt").unlink()
    (tags / "victim").rename(lease / ".nxd_ckpt")
    remove_unused([str(lease)])
    assert ["empty", "lease.json", "place"] == sorted(path.name for path in (lease / ".nxd_ckpt").iterdir())


def test_a_lease_that_could_not_be_given_back_is_taken_again(tags: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody writes there any more, so nobody is waited for."""
    output = tags / "outputs" / "whole"
    hook = failing("remove", ".nxd_ckpt/lease.json", OSError(errno.EIO, "broken"))
    with monkeypatch.context() as patch:
        disturb(patch, hook)
        unshard_checkpoint(tags / "old", output, durable=False)
    assert (output.parent / ".whole.lease" / ".nxd_ckpt" / "lease.json").exists()
    unshard_checkpoint(tags / "new", output, durable=False, overwrite=True)
    assert 1 == made_of(output)
    assert [output] == list(output.parent.iterdir())


def test_a_dead_job_of_another_host_is_watched_once(
    tags: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For a minute in all, and the log tells what is waited for. A live one finishes its replacement itself."""
    place = tags / "outputs" / ".whole.lease" / ".nxd_ckpt"
    place.mkdir(parents=True)
    dead = {"run_id": "gone", "host": "other/1", "pid": 3, "born": "9"}
    (place / "lease.json").write_text(json.dumps(dead))
    (place / "heartbeat.json").write_text(json.dumps({**dead, "beat": 4}))
    seconds = [0.0]
    monkeypatch.setattr(effects, "monotonic", lambda: seconds[0])
    monkeypatch.setattr(effects, "sleep", lambda some: seconds.append(seconds.pop() + some))
    unshard_checkpoint(tags / "old", tags / "outputs" / "whole", durable=False)
    assert 60 <= seconds[0] < 62
    assert "waiting for run gone (pid 3 on other), up to 60 s" in caplog.text
    (tags / "outputs" / "whole").rename(aside := tags / "outputs" / ".whole.replaced")
    place.mkdir(parents=True)
    (place / "lease.json").write_text(json.dumps(dead))
    beats = count()
    monkeypatch.setattr(
        effects, "sleep", lambda some: (place / "heartbeat.json").write_text(json.dumps({**dead, "beat": next(beats)}))
    )
    with pytest.raises(DirectoryInUse, match="run gone"):
        unshard_checkpoint(tags / "old", tags / "outputs" / "whole", durable=False)
    assert aside.exists()
    assert not (tags / "outputs" / "whole").exists()


@pytest.mark.usefixtures("tree")
@pytest.mark.parametrize(("kind", "last"), [("dcp", "dcp/.metadata"), ("packed.tar", "packed.tar")])
def test_a_store_keeps_what_the_next_process_completed(
    tags: Path, monkeypatch: pytest.MonkeyPatch, kind: str, last: str
) -> None:
    """The one that it took over from looks at its lease before its own last file."""
    directory = tags / "store"

    def take_over(operation: Operation) -> None:
        if operation.name == "create":
            shutil.rmtree(directory / f".{kind}.lease")
            (directory / last).parent.mkdir(parents=True, exist_ok=True)
            (directory / last).write_text("the next one's")

    with monkeypatch.context() as patch:
        disturb(patch, take_over)
        with pytest.raises(DirectoryInUse, match="another job took over"):
            OUTPUTS[kind](tags / "old", f"tree://{directory / kind}")
    assert "the next one's" == (directory / last).read_text()


@pytest.mark.usefixtures("tree")
def test_a_store_with_directories_keeps_no_empty_ones(tags: Path) -> None:
    convert(tags / "old", f"tree://{tags / 'store' / 'dcp'}", to="dcp")
    assert ["dcp"] == [path.name for path in (tags / "store").iterdir()]


@pytest.fixture
def tree() -> None:
    """``tree://`` as a store with directories, as sftp:// is, of this machine's files."""

    class Tree(LocalFileSystem):  # type: ignore[misc]
        protocol = "tree"

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return "/" + str(path).removeprefix("tree://").strip("/")

    fsspec.register_implementation("tree", Tree, clobber=True)


def disturb(patch: pytest.MonkeyPatch, hook: Hook, *, exchanges: bool = True) -> None:
    """Ask the hook before each operation on outputs; names can be exchanged, or not."""
    patch.setattr(locations, "open_storage", lambda *given: HookedStorage(open_storage(*given), hook))
    if not exchanges:
        patch.setattr(local, "exchange", lambda one, other: False)


def test_what_fails_to_be_replaced_stays(tags: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error at any step of the replacement: the old one is as it was."""
    for exchanges, step in product((True, False), ("swap *", "rename out*", "rename .out.incomplete*", "sync_dir ")):
        if step == "rename out*" and exchanges:
            continue
        output = tags / f"{exchanges} {step[:-1]}" / "out"
        unshard_checkpoint(tags / "old", output)
        name, _, pattern = step.partition(" ")
        with monkeypatch.context() as patch:
            if not exchanges:
                patch.setattr(local, "exchange", lambda one, other: False)
            hook = failing(name, pattern, OSError(errno.EIO, "broken"))
            disturb(patch, hook)
            with pytest.raises(CheckpointError, match="broken"):
                unshard_checkpoint(tags / "new", output, overwrite=True)
        assert 0 == made_of(output.rename(output.with_name("whole")))
        # What was visible, and whose undoing cannot be made durable, stays until it can.
        left = [".out.incomplete"] if name == "sync_dir" else []
        assert [*left, "whole"] == sorted(path.name for path in output.parent.iterdir())
        unshard_checkpoint(tags / "new", output)
        assert ["out", "whole"] == sorted(path.name for path in output.parent.iterdir())


def unanswered(
    numbers: Iterator[int], last: int, name: str, move: Callable[[str, str], object], one: str, other: str
) -> object:
    """Moves; of those of ``name`` the ``last`` raises although it happened."""
    moved = move(one, other)
    if name in one and next(numbers) == last:
        raise OSError(errno.EIO, "no answer")
    return moved


@pytest.mark.parametrize("replaces", [True, False])
@pytest.mark.parametrize("exchanges", [True, False])
def test_what_was_moved_without_an_answer_is_moved_back(
    tags: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool, replaces: bool
) -> None:
    """An output of a command that ends with an error is not visible."""
    for number, (kind, step) in enumerate(product(OUTPUTS, range(1 + (replaces and not exchanges)))):
        output = tags / str(number) / kind
        if replaces:
            OUTPUTS[kind](tags / "old", output, durable=False)
        with monkeypatch.context() as patch:
            if not exchanges:
                patch.setattr(local, "exchange", lambda one, other: False)
            patch.setattr(os, "rename", partial(unanswered, count(), step, kind, os.rename))
            with pytest.raises(CheckpointError, match="no answer"):
                OUTPUTS[kind](tags / "new", output, overwrite=True, durable=False)
        assert [output] * replaces == list(output.parent.glob("*"))
        assert replaces == output.parent.exists()
        assert not replaces or 0 == made_of(output)


@pytest.mark.parametrize("happens", [True, False])
def test_an_exchange_without_an_answer_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, happens: bool
) -> None:
    for name in ("one", "other"):
        (tmp_path / name).write_text(name)
    exchange = system._renameat2

    def failed(*args: Any) -> int:
        assert exchange is not None
        assert not happens or exchange(*args) == 0
        ctypes.set_errno(errno.EIO)
        return -1

    monkeypatch.setattr(system, "_renameat2", failed)
    with nullcontext() if happens else pytest.raises(OSError, match="Input/output error"):
        assert system.exchange(tmp_path / "one", tmp_path / "other")
    assert ("other" if happens else "one") == (tmp_path / "one").read_text()


def test_a_replaced_output_that_cannot_be_removed_is_no_error(
    tags: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The new one is complete; the next output of the name removes the rest."""
    output = tags / "outputs" / "whole"
    unshard_checkpoint(tags / "old", output, durable=False)
    with monkeypatch.context() as patch:
        hook = failing("rename", ".whole.replaced -> *", OSError(errno.EIO, "broken"))
        disturb(patch, hook)
        unshard_checkpoint(tags / "new", output, overwrite=True, durable=False)
    assert 1 == made_of(output)
    assert "is complete, but the one that it replaces was not removed: [Errno 5] broken" in caplog.text
    unshard_checkpoint(tags / "new", output, overwrite=True, durable=False)
    assert [output] == list(output.parent.iterdir())


@pytest.mark.parametrize("exchanges", [True, False])
def test_what_was_to_be_replaced_stays_where_the_new_one_was_removed(
    tags: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    """By another process, just before it was to get the name."""
    output = tags / "outputs" / "whole"
    unshard_checkpoint(tags / "old", output)

    def remove(operation: Operation) -> None:
        if operation.name in ("swap", "rename") and operation.key.startswith((".whole", "whole")):
            shutil.rmtree(output.with_name(".whole.incomplete"), ignore_errors=True)

    with monkeypatch.context() as patch:
        disturb(patch, remove, exchanges=exchanges)
        with pytest.raises(CheckpointError, match="No such file"):
            unshard_checkpoint(tags / "new", output, overwrite=True)
    assert 0 == made_of(output)


@pytest.mark.parametrize(("kind", "key"), [*product(OUTPUTS, "*"), ("tag", "*"), ("tag", "*/guest")])
def test_a_full_disk_leaves_what_was_there(tags: Path, monkeypatch: pytest.MonkeyPatch, kind: str, key: str) -> None:
    """And nothing of the attempt beside it; the error says how much room there is."""
    output = tags / "out" / kind
    make = OUTPUTS.get(kind, partial(convert, to="tag", dp=2))
    make(tags / "old", output)
    before = contents(output.parent)
    (tags / "new" / "guest").write_text("the last file that a tag gets")
    disturb(monkeypatch, failing("write_at", key, OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(CheckpointError, match=r"No space left on device \(.* are to be written, .* are free"):
        make(tags / "new", output, overwrite=True)
    assert before.items() <= contents(output.parent).items()
    assert [output] == [path for path in output.parent.iterdir() if path.name != ".nxd_ckpt"]
    assert [] == remains(output.parent)


@pytest.mark.parametrize("after", range(4))
def test_a_disk_that_fills_as_a_lease_is_taken_keeps_none_of_it(
    tags: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """Its files are the first of a conversion: its mark, its heartbeat and itself."""
    (tags / "out").mkdir()
    hook = failing("link_new", "*", OSError(errno.ENOSPC, "No space left on device"), after)
    monkeypatch.setattr(locations, "open_storage", lambda *given: HookedStorage(open_storage(*given), hook))
    with pytest.raises(CheckpointError, match="No space left") if after < 3 else nullcontext():
        unshard_checkpoint(tags / "new", tags / "out" / "whole")
    assert (["whole"] if after == 3 else []) == [path.name for path in (tags / "out").iterdir()]
