"""Arguments as people have them: what argparse, YAML, OmegaConf, NumPy and torch give is taken as what it means.

Or it is refused by name, on all ranks alike, before anything is written.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from signal import Signals
from typing import Any

import numpy as np
import pytest
import torch

import nxd_ckpt
from nxd_ckpt import (
    Checkpointer,
    Every,
    Last,
    Partition,
    Tier,
    Topology,
    close_checkpointers,
    has_checkpoint,
    load_checkpoint,
    open_checkpoint,
    remove_checkpoint,
    save_checkpoint,
)
from nxd_ckpt.core.option_classes import Options
from nxd_ckpt.errors import InvalidArgument
from nxd_ckpt.loading.options import LoadOptions
from nxd_ckpt.options.checkpointer_options import CheckpointerOptions, JobOptions, PreemptionOptions
from nxd_ckpt.options.execution import OpenOptions
from nxd_ckpt.saving.options import SaveOptions
from tests.support.rank_pool import RankPool
from tests.support.refusals import refusal


class Config(Mapping[str, Any]):
    """A mapping that is no dict, as OmegaConf's DictConfig."""

    def __init__(self, **values: Any) -> None:
        self._values = values

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


PLAIN: dict[str, Callable[[], tuple[Any, Any]]] = {
    "NumPy bool": lambda: (np.bool_(True), True),
    "NumPy int": lambda: (np.int64(3), 3),
    "NumPy float": lambda: (np.float64(2.5), 2.5),
    "NumPy string": lambda: (np.str_("3"), "3"),
    "0-d array": lambda: (np.array(2), 2),
    "0-d tensor": lambda: (torch.tensor(3), 3),
    "mapping": lambda: (Config(a=np.int64(1)), {"a": 1}),
    "list": lambda: ([1, 2], (1, 2)),
    "tuple of texts": lambda: (("a", "b"), ["a", "b"]),
    "int": lambda: (1, 1),
    "text": lambda: ("false", "false"),
    "None": lambda: (None, None),
    "path": lambda: (Path("somewhere"), Path("somewhere")),
    "object": lambda: (object, object),
}
"""Kinds of value, each with a plain one that means the same."""


def _classes(kind: type[Any] = Options) -> list[type[Any]]:
    return [one for sub in kind.__subclasses__() for one in (sub, *_classes(sub)) if one.__module__.startswith("nxd_")]


CLASSES = sorted(_classes(), key=lambda kind: kind.__qualname__)
NEEDED = {"path": "run", "count": 1, "steps": 1, "metric": "loss", "size": 4, "hours": 1}


def _made(kind: type[Any], name: str, value: Any) -> Any:
    """The value that an option class keeps, or the message that refuses it."""
    given = {each.name: NEEDED[each.name] for each in fields(kind) if each.name in NEEDED}
    try:
        return getattr(kind(**given | {name: value}), name)
    except InvalidArgument as error:
        return f"refused: {error}"


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, set)):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(map(_is_plain, [*value, *value.values()]))
    return value is None or type(value) in (bool, int, float, str, Signals) or isinstance(value, os.PathLike)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__qualname__)
def test_each_option_takes_a_value_as_what_it_means_or_refuses_it_by_name(kind: type[Any]) -> None:
    """What is kept is plain Python, and the same as for the plain value."""
    for field in fields(kind):
        for values in PLAIN.values():
            value, plain = values()
            made, expected = _made(kind, field.name, value), _made(kind, field.name, plain)
            refused = isinstance(made, str) and made.startswith("refused: ")
            if not refused and field.type != "Any":
                assert (made, type(made)) == (expected, type(expected))
                assert callable(value) or _is_plain(made), (field.name, made)
            elif refused and field.name != "rank_content":  # which is filled: it has to be the caller's own dict
                assert str(expected).startswith("refused: ")


def test_there_are_option_classes_of_every_call() -> None:
    """The property above is asked of all of them, also of those that people make themselves."""
    assert {SaveOptions, LoadOptions, *JobOptions.kinds(), OpenOptions, Tier, Last, Partition} <= {*CLASSES}
    assert len(CLASSES) > 20


YES = [True, 1, 1.0, "true", "True", " YES ", "on", "1", np.bool_(True), torch.tensor(True)]
NO = [False, 0, 0.0, "false", "False", "No", "off", "0", np.bool_(False), torch.tensor(0)]


@pytest.mark.parametrize(("spelling", "expected"), [*((one, True) for one in YES), *((one, False) for one in NO)])
def test_spellings_of_true_and_false(spelling: Any, expected: bool) -> None:
    """Those of YAML, argparse, NumPy and torch: a string is not True because it is not empty."""
    kept = SaveOptions(use_xser=spelling).use_xser, LoadOptions(strict=spelling).strict
    assert (expected, expected) == kept


def test_none_is_the_default_where_it_means_nothing() -> None:
    """As argparse and YAML have it for what was not given."""
    none: Any = None
    kept = SaveOptions(use_xser=none), LoadOptions(strict=none), CheckpointerOptions(timeout=none)
    assert (False, True, 600.0) == (kept[0].use_xser, kept[1].strict, kept[2].timeout)


def test_paths_of_bytes_are_refused(tmp_path: Path) -> None:
    """Bare ones, and those that os.scandir gives for a directory of bytes."""
    (tmp_path / "run").mkdir()
    entry: Any = next(os.scandir(os.fsencode(tmp_path)))
    for call in (nxd_ckpt.Checkpointer, nxd_ckpt.open_checkpoint, nxd_ckpt.load_checkpoint, nxd_ckpt.list_checkpoints):
        for path in (entry, entry.path):
            with pytest.raises(InvalidArgument, match="must be a string or a path"):
                call(path)


@pytest.mark.parametrize(
    ("given", "option", "expected"),
    [
        ({"memory_cap": "4GB"}, "memory_cap", 4 * 10**9),
        ({"memory_cap": "512 MiB"}, "memory_cap", 2**29),
        ({"memory_cap": np.int64(4096)}, "memory_cap", 4096),
        ({"memory_cap": 4e9}, "memory_cap", 4 * 10**9),
        ({"timeout": "10m"}, "timeout", 600.0),
        ({"timeout": "30 s"}, "timeout", 30.0),
        ({"timeout": "1.5h"}, "timeout", 5400.0),
        ({"timeout": "90"}, "timeout", 90.0),
        ({"timeout": torch.tensor(20)}, "timeout", 20.0),
    ],
)
def test_sizes_and_durations(given: dict[str, Any], option: str, expected: float) -> None:
    """They are written the same way everywhere, and kept as bytes and seconds."""
    kept = getattr(CheckpointerOptions(**given), option)
    assert (expected, type(expected)) == (kept, type(kept))


@pytest.mark.parametrize(
    "given",
    [
        {"timeout": -1},
        {"timeout": 0},
        {"timeout": float("nan")},
        {"timeout": "soon"},
        {"memory_cap": 0},
        {"memory_cap": "4 apples"},
        {"memory_cap": True},
        {"max_failed_saves": 0},
        {"on_save_failure": "ignore"},
        {"durable": "perhaps"},
        {"durable": 2},
        {"preemption": 999},
        {"preemption": "SIGNOTHING"},
        {"preemption_grace": -1},
        {"every": 0},
        {"every": 2.5},
        {"every_minutes": -1},
        {"final_save": 3},
        {"num_kept_ckpts": 0},
        {"retain": []},
        {"topology": 2},
        {"tiers": "far"},
        {"storage": 3},
        {"path": 3},
        {"run_id": 7},
    ],
    ids=str,
)
def test_a_handle_refuses_what_no_save_could_honour(given: dict[str, Any], tmp_path: Path) -> None:
    """When it is made, not after the training; the message names the option."""
    (option,) = given
    with pytest.raises(InvalidArgument, match=rf"^{option} must be .*, found "):
        Checkpointer(**{"path": tmp_path / "run", **given})
    assert not (tmp_path / "run").exists()


def test_secrets_are_in_no_message() -> None:
    """Storage options as a string, which is how a command line has them, are refused without being shown."""
    with pytest.raises(InvalidArgument, match=r"^storage_options must be a dict .*, found a str$"):
        Checkpointer("run", storage_options='{"secret": "hunter2"}')  # type: ignore[arg-type]


def test_nested_options_of_a_configuration_are_plain() -> None:
    given: Any = Config(client_kwargs=Config(region_name="us-west-2"))
    kept = OpenOptions(storage_options=given).storage_options
    assert kept == {"client_kwargs": {"region_name": "us-west-2"}}
    assert type(kept["client_kwargs"]) is dict


@pytest.mark.parametrize(
    ("notice", "expected"),
    [(1, True), (0, False), ("true", True), (15, 15), (np.int64(15), 15), ("SIGTERM", 15), ([2, "SIGTERM"], (2, 15))],
)
def test_preemption(notice: Any, expected: Any) -> None:
    """1 is True, SIGTERM's flag, not signal 1, which is SIGHUP."""
    assert PreemptionOptions(preemption=notice).preemption == expected


def test_counts_of_numpy_are_counts() -> None:
    assert (Last(3), Every(1000)) == (Last(np.int64(3)), Every(np.int32(1000)))
    assert Topology(dp=2, rank=1) == Topology(dp=np.int64(2), rank=np.int64(1))
    assert Partition(0, rank_ordering=(0, 1), num_partitions=2) == Partition(
        np.int64(0), rank_ordering=[0, 1], num_partitions=2  # type: ignore[arg-type]
    )


def test_strings_of_a_command_line_at_a_resume(tmp_path: Path) -> None:
    """``weights_only="False"`` loads the optimizer, and ``trust_pickle="False"`` trusts nothing."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    false: Any = "False"
    save_checkpoint(tmp_path, "step_1", model, optimizer, weights_only=false, async_save=false, dedup=false)
    fresh = torch.optim.AdamW(model.parameters())
    load_checkpoint(tmp_path, None, model, fresh, weights_only=false, strict="True")  # type: ignore[arg-type]
    assert 2 == len(fresh.state)
    with pytest.raises(InvalidArgument, match=r"^trust_pickle must be True or False"):
        load_checkpoint(tmp_path, None, model, trust_pickle="never")  # type: ignore[arg-type]
    assert open_checkpoint(tmp_path, trust_pickle=false).tag == "step_1"
    assert has_checkpoint(tmp_path)
    remove_checkpoint(tmp_path, "step_1", dry_run="yes")  # type: ignore[arg-type]
    assert has_checkpoint(tmp_path)


def test_methods_of_a_checkpointer(tmp_path: Path) -> None:
    """Numbers that a training loop has, and what is none, or no name."""
    made: Any = Checkpointer
    with made(tmp_path, every="2", durable="no") as checkpointer:
        assert [False, True] == [checkpointer.should_save(step) for step in (np.int64(1), torch.tensor(2))]
        assert not checkpointer.step("3")
        checkpointer.save(2, {"w": torch.ones(1)}, metrics={"loss": "0.5"})
        assert 2 == checkpointer.best_step(np.str_("loss"), "min")
        checkpointer.wait(np.int32(0))
        for call, name in (
            (lambda: checkpointer.should_save("soon"), "step"),
            (lambda: checkpointer.step(None), "number"),
            (lambda: checkpointer.best_step("loss", "lowest"), "mode"),
            (lambda: checkpointer.best_step(3), "metric"),
            (lambda: checkpointer.wait("last"), "tier"),
            (lambda: checkpointer.load_latest(default="first"), "default"),
        ):
            with pytest.raises(InvalidArgument, match=rf"^{name} must be .*, found "):
                call()


_ELSEWHERE = {"process_group", "topology", "run_id", "storage_options", "partitions", "param_names", "ignore_keys"}
"""Options that say where ranks or tensors are: the plain values here would be refused for that, on two ranks too."""


def _saving(rank: int, directory: str, given: list[dict[str, Any]]) -> str:
    options: dict[str, Any] = {"durable": False, **given[rank]}
    found = refusal(lambda: save_checkpoint(directory, "step_1", {"w": torch.ones(2)}, **options))
    close_checkpointers()
    return found or refusal(lambda: load_checkpoint(directory, None, {}))


def _in_turn(names: list[str]) -> Iterator[tuple[str, str, Any]]:
    """Each option with None and with a third of the other kinds of value, another one than the option before it."""
    for turn, name in enumerate(names):
        for number, (kind, values) in enumerate(PLAIN.items()):
            if kind == "None" or (number + turn) % 3 == 0:
                yield name, kind, values()[0]


def _each_option(rank: int, directory: str, names: list[str]) -> list[tuple[str, str, str]]:
    """Return the outcome of a save with each option, on this rank."""
    return [
        (name, kind, _saving(rank, f"{directory}/{name} {kind}", [{name: value}] * 2))
        for name, kind, value in _in_turn(names)
    ]


def test_two_ranks_take_or_refuse_alike(pair: RankPool, tmp_path: Path) -> None:
    """Each option of a save with several kinds of value: the same outcome on both ranks, and what was saved loads.

    A rank that waited for the other one would end with a PeerTimeout.
    """
    names = [each.name for kind in (SaveOptions, CheckpointerOptions) for each in fields(kind)]
    names = [name for name in names if name not in _ELSEWHERE]
    first, second = pair.run(_each_option, str(tmp_path), names)
    assert first == second
    assert {outcome for _, _, outcome in first if not outcome.startswith("InvalidArgument: ")} == {""}


def _loading(rank: int, directory: str, given: list[dict[str, Any]]) -> str:
    return refusal(lambda: load_checkpoint(directory, None, {}, **given[rank])).partition(":")[0]


def _each_load(rank: int, directory: str, names: list[str]) -> list[tuple[str, str, str]]:
    """Return the outcome of a load with each option, on this rank."""
    return [(name, kind, _loading(rank, directory, [{name: value}] * 2)) for name, kind, value in _in_turn(names)]


def test_two_ranks_load_alike(pair: RankPool, tmp_path: Path) -> None:
    """Each option of a load with several kinds of value: the same outcome on both ranks, and at once."""
    assert ["", ""] == pair.run(_saving, str(tmp_path / "run"), [{}, {}])
    names = [each.name for each in fields(LoadOptions) if each.name not in _ELSEWHERE]
    first, second = pair.run(_each_load, str(tmp_path / "run"), names)
    assert first == second
    assert "PeerTimeout" not in {outcome for _, _, outcome in first}
    assert {""} == {outcome for _, kind, outcome in first if kind == "None"}


def test_defaults_are_values_of_their_options() -> None:
    for kind in CLASSES:
        for field in fields(kind):
            if field.default is not MISSING and field.type != "Any":
                assert _is_plain(_made(kind, field.name, field.default)), (kind, field.name)
