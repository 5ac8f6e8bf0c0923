"""After a load that found a host replaced: what it had is copied to it anew, before anything is saved."""

import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from nxd_ckpt import Checkpointer
from nxd_ckpt.coordination.control_files import FETCHED
from nxd_ckpt.core.names import DONE, MANIFEST, MARKER
from nxd_ckpt.output.cp_files import TagFile
from nxd_ckpt.tiers.hosts import Fetch, missing_copies
from tests.hosts.jobs import RANKS, TIMEOUT, host_of, of, save, state, tier
from tests.hosts.views import World
from tests.protocol.job import Job, until

TAGS = ("step_1", "step_2")


def copies(path: Path, tag: str) -> Counter[str]:
    """On how many hosts each file of a tag is."""
    folders = [host_of(path, rank) / tag for rank in range(RANKS)]
    return Counter(str(file.relative_to(folder)) for folder in folders for file in folder.rglob("*") if file.is_file())


def are_whole(path: Path) -> bool:
    """Whether each file of both tags is on two hosts, and what says that they are complete on all."""
    for tag in TAGS:
        found = copies(path, tag)
        if {found.pop(name) for name in (MARKER, MANIFEST, DONE)} != {RANKS} or {*found.values()} != {2}:
            return False
    return True


def hold(expected: Mapping[Path, bytes]) -> bool:
    """Whether these files are there, with these bytes."""
    return all(file.is_file() and file.read_bytes() == data for file, data in expected.items())


def load_and_wait(rank: int, path: Path, expected: Mapping[Path, bytes] = MappingProxyType({})) -> int:
    """The step that is loaded, bit-exact; the replicas are there again then, though nothing is saved."""
    model: dict[str, Any] = {}
    with Checkpointer(tiers=[tier(path, rank, replicas=2)], topology=of(rank), timeout=TIMEOUT) as launch:
        step = int(launch.load(model=model)["step"])
        assert all(value.equal(model[name]) for name, value in state(step, rank).items())
        if rank == 0:
            until(lambda: are_whole(path) and hold(expected))
            until(lambda: not any((host_of(path, number) / FETCHED).exists() for number in range(RANKS)))
            (path / "seen").touch()
        until((path / "seen").exists)
    return step


def test_what_a_lost_host_had_is_copied_to_the_newcomer(tmp_path: Path) -> None:
    """So another host may be lost before the next save. A kill in the middle of a commit had left one host alone with
    what says that the tag is complete."""
    Job(RANKS, saved, tmp_path, group=True).values()
    assert are_whole(tmp_path)
    for rank in (1, 3):
        (host_of(tmp_path, rank) / "step_2" / DONE).unlink()
    for lost in (2, 0):
        shutil.rmtree(host_of(tmp_path, lost))
        assert RANKS * [2] == Job(RANKS, load_and_wait, tmp_path, group=True).values()
        (tmp_path / "seen").unlink()


def saved(rank: int, path: Path) -> None:
    save(rank, path, [1, 2], replicas=2)


def test_files_that_are_lost_or_damaged_on_a_host_are_copied_to_it_anew(tmp_path: Path) -> None:
    """Though it was not replaced: weights and an index are gone, other weights and a manifest have changed. What
    somebody put into a tag is copied like its files, else each load would begin anew."""
    Job(RANKS, saved, tmp_path, group=True).values()
    (host_of(tmp_path, 0) / "step_1" / "notes.txt").write_text("the best so far")
    hosts = [host_of(tmp_path, rank) / "step_2" for rank in range(RANKS)]
    model = "model/dp_rank_00_tp_rank_{:02d}_pp_rank_00.pt"
    lost = [hosts[3] / model.format(2), next(hosts[0].rglob("*tp_rank_03*.json"))]
    damaged = [hosts[1] / model.format(1), hosts[2] / MANIFEST]
    good = {file: file.read_bytes() for file in damaged}
    for file in lost:
        file.unlink()
    for file in damaged:
        file.write_bytes(b"{" + good[file][1:-1])
    assert RANKS * [2] == Job(RANKS, load_and_wait, tmp_path, good, group=True).values()


def load_and_save(rank: int, path: Path) -> int:
    """A save that follows at once, under a name that is being brought back."""
    with Checkpointer(tiers=[tier(path, rank, replicas=2)], topology=of(rank), timeout=TIMEOUT) as launch:
        step = int(launch.load(model={})["step"])
        launch.save("step_2", state(9, rank), user_content={"step": 9}, overwrite=True)
    return step


def load(rank: int, path: Path) -> int:
    with Checkpointer(tiers=[tier(path, rank, replicas=2)], topology=of(rank), timeout=TIMEOUT) as launch:
        model: dict[str, Any] = {}
        step = int(launch.load(model=model)["step"])
        assert all(value.equal(model[name]) for name, value in state(step, rank).items())
    return step


def test_a_save_ends_it(tmp_path: Path) -> None:
    """Two saves of a name are not mixed."""
    Job(RANKS, saved, tmp_path, group=True).values()
    shutil.rmtree(host_of(tmp_path, 1))
    assert RANKS * [2] == Job(RANKS, load_and_save, tmp_path, group=True).values()
    found = copies(tmp_path, "step_2")
    assert {RANKS} == {found.pop(name) for name in (MARKER, MANIFEST, DONE)}
    assert {2} == {*found.values()}
    assert RANKS * [9] == Job(RANKS, load, tmp_path, group=True).values()


def test_of_a_tag_that_was_removed_nothing_is_brought_back(tmp_path: Path) -> None:
    """Nor looked for by each load: what was damaged of the save before may be no file of the one that has its name."""
    world = World(tmp_path, 2, replicas=2)
    view = world.views[0]
    view.write("step_1/optim/of_before", b"damaged")
    view.distrusted |= {("step_1/optim/of_before", 1), ("step_10/model/of_another", 1)}
    view.remove("step_1")
    view.write("step_1/model/anew", b"good")
    assert not view.is_short("step_1")
    assert {("step_10/model/of_another", 1)} == view.distrusted
    world.close()


def test_who_fetches_what() -> None:
    """Newcomers before others, the one with less to fetch, nobody what it has; nobody what none has."""
    a, b, c, lost = (TagFile(name, nbytes) for name, nbytes in (("a", 5), ("b", 3), ("c", 1), ("lost", 9)))
    holders = {"a": {0}, "b": {1}, "c": {0, 1}, "lost": set[int]()}
    assert [Fetch(2, a), Fetch(3, b)] == missing_copies([a, b, c, lost], holders, {0, 1, 2, 3}, {2, 3}, 2)
    assert [Fetch(2, a), Fetch(2, b)] == missing_copies([a, b], holders, {0, 1, 2, 3}, {2}, 2)
    assert [Fetch(1, a), Fetch(0, b)] == missing_copies([a, b], holders, {0, 1}, set(), 2)
