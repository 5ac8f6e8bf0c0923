"""What one rank alone has, under keys that look like others, in other strides, as its content, is not lost unsaid."""

import json
import pickle
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from copy import deepcopy
from datetime import datetime, time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from nxd_ckpt import Checkpointer, open_checkpoint
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.loading.rank_state import RankState
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.tag.per_rank import Gone, OwnValue
from nxd_ckpt.testing.storage import HookedStorage, Operation
from tests.support.logged import logged
from tests.support.rank_pool import RankPool
from tests.support.refusals import refusal, refusals
from tests.support.stateful import Extra, Object


def _full(number: int) -> torch.Tensor:
    return torch.full((2,), float(number))


KEYS: dict[str, Any] = {
    "a number and its text": lambda n, late: {1: n, "1": 7},
    "a text and its number": lambda n, late: {1: 7, "1": n},
    "True": lambda n, late: {True: n, "True": 7},
    "a tuple": lambda n, late: {(1, 2): n, "(1, 2)": 7},
    "numpy's number": lambda n, late: {np.int64(3): n, 4: late},
    "a slash": lambda n, late: {"loss": n, "loss/train": late},
    "a slash in another's": lambda n, late: {"a": {"b": n}, "a/b": late},
    "marks": lambda n, late: {"a": n, "a~1b": late, "~": n, "a/b": n},
}
NESTED = {"tensors": lambda n, late: {"a": {"b": _full(n)}, "a/b": _full(late)}}
"""Tensors of such names; in a model they are refused."""


def keyed(rank: int, directory: Path) -> list[str]:
    """Which of KEYS do not come back, where one value differs at first, and another one later."""
    lost = []
    kinds = [(name, form, kind) for kind in (Object, Extra) for name, form in KEYS.items()]
    for number, (name, form, kind) in enumerate([*kinds, *((each, form, Object) for each, form in NESTED.items())]):
        live, expected = kind(), list[str]()
        with Checkpointer(directory / str(number)) as checkpointer:
            for late in (0, rank, rank):
                live.state = form(rank, late)
                checkpointer.save(len(expected), **_passed(live))
                expected.append(repr(deepcopy(live.state)))
            for step, state in enumerate(expected):
                other = kind(form(9, 9))
                checkpointer.load(step, **_passed(other))
                lost += [f"{name}, {kind.__name__}, {step}"] if repr(other.state) != state else []
    return lost


def _passed(live: Any) -> dict[str, Any]:
    return {"model": live} if isinstance(live, Extra) else {"state": {"object": live}}


def test_keys_that_look_alike_are_told_apart(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """1 and "1", "a/b" and "b" in "a": each rank's own value of both comes back."""
    assert [[]] * 4 == gloo_ranks.run(keyed, tmp_path)


def test_tags_of_before_have_keys_as_they_are_in_names() -> None:
    """A tensor of a rank's own has no path there, nor what it lacks; they came back as rank 0's."""
    own = {
        "scheduler/objects/s/loss/train": OwnValue(_full(1)),
        "scheduler/objects/s/2": OwnValue(_full(2)),
        "scheduler/objects/s/n/1": OwnValue(3, ("objects", "s", "n/1")),
    }
    state = RankState(values=own)
    saved = {"objects": {"s": {"loss/train": _full(0), "2": _full(0), "n/1": 0}}}
    expected = {"objects": {"s": {"loss/train": _full(1), "2": _full(2), "n/1": 3}}}
    assert repr(expected) == repr(state.put_into("scheduler", saved, None))
    groups = {"param_groups": [{"params": [0], "warm/up": 1, "lr": 0.1}]}
    state = RankState(values={"optim/param_groups/0/warm/up": OwnValue(Gone.ABSENT)})
    assert {"param_groups": [{"params": [0], "lr": 0.1}]} == state.put_into("optimizer", groups, ["w"])


HELD: dict[str, Any] = {
    "deque": lambda n: {"d": deque([n, _full(n)], maxlen=3)},
    "OrderedDict": lambda n: {"o": OrderedDict(a=n, b=_full(n))},
    "defaultdict": lambda n: {"d": defaultdict(int, a=n, b=_full(n))},
    "Counter": lambda n: Counter("ab" + "a" * n),
    "namespace": lambda n: {"s": SimpleNamespace(a=n, b=_full(n))},
}
"""Containers of a number and a tensor of each rank."""


def contained(rank: int, directory: Path) -> list[str]:
    """Which of HELD come back otherwise."""
    lost = []
    for kind in (Object, Extra):
        for name, form in HELD.items():
            live = kind(form(rank))
            with Checkpointer(directory / f"{kind.__name__} {name}") as checkpointer:
                for step in (1, 2):
                    checkpointer.save(step, **_passed(live))
                    other = kind(form(9))
                    checkpointer.load(step, **_passed(other))
                    lost += [f"{name}: {other.state}"] if repr(other.state) != repr(live.state) else []
    return lost


def test_what_differs_comes_back_in_containers_of_every_kind(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """A deque kept rank 0's; an OrderedDict became a dict."""
    assert [[]] * 4 == gloo_ranks.run(contained, tmp_path)


def one_name(rank: int, directory: Path) -> str:
    with Checkpointer(directory) as checkpointer:
        return refusal(lambda: checkpointer.save(0, Extra({"a": {"b": _full(rank)}, "a/b": _full(0)})))


def test_tensors_of_one_name_are_refused(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """Copies are compared by name: one of them could differ unseen."""
    for message in gloo_ranks.run(one_name, tmp_path):
        assert "model/_extra_state/a/b is the name of two tensors" in message


def strides(rank: int, directory: Path) -> list[Any]:
    """The strides of what came back, of a column-major tensor that differs between ranks, twice."""
    actual = []
    for kind in (Object, Extra):
        live = kind({"of rank": torch.arange(6.0).reshape(2, 3).t() + rank})
        with Checkpointer(directory / kind.__name__) as checkpointer:
            for step in (1, 2):
                checkpointer.save(step, **_passed(live))
                other = kind({"of rank": torch.zeros(3, 2)})
                checkpointer.load(step, **_passed(other))
                assert torch.equal(live.state["of rank"], other.state["of rank"])
                actual.append(other.state["of rank"].stride())
    return actual


def test_what_a_rank_alone_has_comes_back_in_its_strides(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """Found at a save, and known before it."""
    assert [[(1, 3)] * 4] * 4 == gloo_ranks.run(strides, tmp_path)


def content_of_one(rank: int, directory: Path, owner: int) -> dict[str, int]:
    model, content = torch.nn.Linear(2, 2), dict[str, int]()
    with Checkpointer(directory / str(owner)) as checkpointer:
        checkpointer.save(1, model, rank_content={"of": rank} if rank == owner else None)
        checkpointer.load(1, model, rank_content=content)
    return content


@pytest.mark.parametrize("owner", [0, 2])
def test_rank_content_of_one_rank_alone_comes_back(gloo_ranks: RankPool, tmp_path: Path, owner: int) -> None:
    """The others, which ask for theirs too, get nothing."""
    expected = [{"of": owner} if rank == owner else {} for rank in range(4)]
    assert expected == gloo_ranks.run(content_of_one, tmp_path, owner)
    checkpoint = open_checkpoint(tmp_path / str(owner))
    assert {"of": owner} == checkpoint.rank_content(owner)
    with pytest.raises(CheckpointError, match=r"its rank saved (nothing|model/)"):
        checkpoint.rank_content(3)


def user_content(rank: int, directory: Path, contents: list[Any]) -> list[str]:
    """What two saves say."""
    model = torch.nn.Linear(2, 2).requires_grad_(False)
    with logged() as messages, Checkpointer(directory) as checkpointer:
        for step in (1, 2):
            messages.append(refusal(lambda: checkpointer.save(step, model, user_content=contents[rank])))  # noqa: B023
    return [each for each in messages if "user_content" in each]


_ITSELF: dict[str, Any] = {}
_ITSELF["self"] = _ITSELF


@pytest.mark.parametrize(
    ("contents", "warnings"),
    [
        ([{"step": 1}] * 4, 0),
        ([{"step": 1}, None, None, None], 0),
        ([{"step": 1, "seed": seed, "t": torch.ones(2)} for seed in (0, 0, 7, 0)], 1),
        ([_ITSELF] * 4, 0),
    ],
    ids=["alike", "rank 0's", "of each rank", "contains itself"],
)
def test_user_content_that_differs_is_told_once(
    gloo_ranks: RankPool, tmp_path: Path, contents: list[Any], warnings: int
) -> None:
    """Rank 0's is saved for all, which would lose the others'."""
    messages, *others = gloo_ranks.run(user_content, tmp_path, contents)
    assert ([[]] * 3, warnings) == (others, len(messages))
    assert all("rank 2 passes other user_content= than rank 0" in each for each in messages)


def test_user_content_of_another_rank_alone_is_refused(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """It would be in no file."""
    for messages in gloo_ranks.run(user_content, tmp_path, [None, {"step": 1}, None, None]):
        assert "rank 1 saves user_content=, and rank 0, which writes that for all, has none" in messages[0]


def files(rank: int, directory: Path, ranks: list[int]) -> str:
    """Refusal of a save that is given a file on these ranks; "" for none."""
    note = directory / f"note_{rank}"
    note.write_text(f"of rank {rank}")
    with Checkpointer(directory / "run") as checkpointer:
        given = {"note": str(note)} if rank in ranks else None
        return refusal(lambda: checkpointer.save(1, torch.nn.Linear(2, 2).requires_grad_(False), files=given))


@pytest.mark.parametrize("ranks", [[0], [0, 2], [2]])
def test_files_of_another_rank_alone_are_refused(gloo_ranks: RankPool, tmp_path: Path, ranks: list[int]) -> None:
    """They were left out without a word; rank 0's are taken for all."""
    messages = gloo_ranks.run(files, tmp_path, ranks)
    assert all(("rank 2 saves files=, and rank 0" in each) == (ranks == [2]) for each in messages)
    assert not any("rank_content=" in each for each in messages)  # it takes no files
    assert (0 in ranks) == (tmp_path / "run" / "step_1" / "note").is_file()


def other_form(rank: int, directory: Path, is_dtype: bool) -> list[str]:
    """The errors of saves of shared writing of a tensor that is of another form on rank 2 from the second one on."""
    own = _full(1)
    if rank == 2:
        own = own.double() if is_dtype else torch.ones(3)
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(0, {"same": _full(1), "w": _full(1), "late": _full(1)}, use_xser=True)
        model = {"same": _full(1), "w": own, "late": own}
        return refusals([partial(checkpointer.save, step, model, use_xser=True) for step in (1, 2)])


@pytest.mark.parametrize("is_dtype", [False, True])
def test_a_tensor_of_another_form_is_named(gloo_ranks: RankPool, tmp_path: Path, is_dtype: bool) -> None:
    """Of thousands, nobody finds it by digests; the next save keeps it."""
    form = "float64 (2,)" if is_dtype else "float32 (3,)"
    for message, then in gloo_ranks.run(other_form, tmp_path, is_dtype):
        assert f"/w is a plain tensor of float32 (2,) on rank 0, and a plain tensor of {form} on rank 2" in message
        assert "so differ" in message
        assert "/late;" in message
        assert then == ""


def other_buffer(rank: int, directory: Path) -> list[str]:
    """Refusals of async saves of DTensors: before and after rank 2 got one more buffer, and after it lost that."""
    model = torch.nn.Linear(8, 8)
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    messages = []
    with Checkpointer(directory) as checkpointer:
        for step in range(3):
            model._buffers.pop("late", None)
            if (rank, step) == (2, 1):
                model.register_buffer("late", torch.ones(5))
            pending = checkpointer.save(step, model, async_save=True)
            messages.append(refusal(pending.wait))
    return messages


def test_a_buffer_that_one_rank_of_a_mesh_gets_later_is_saved(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """That save was refused, as all ranks wrote by the list of the first one."""
    assert [[""] * 3] * 4 == gloo_ranks.run(other_buffer, tmp_path)
    manifests = [json.loads((tmp_path / f"step_{step}" / "manifest.json").read_text()) for step in range(3)]
    assert [None, ["model/late"], None] == [each.get("per_rank") for each in manifests]


class Pair(NamedTuple):
    """A tuple with names."""

    own: Any
    other: int


class Tuple(tuple[Any, ...]):
    """A tuple of another type, which may have a note."""

    note: str = ""

    def __repr__(self) -> str:
        return f"{super().__repr__()} {self.note}"

    def noted(self) -> "Tuple":
        self.note = "first"
        return self


class Dict(dict[str, Any]):
    """A dict of another type."""


TYPES: dict[str, Any] = {
    "a tuple with names": lambda n: Pair(_full(n), 7),
    "a value in one": lambda n: Pair(n, 7),
    "a value beside a tensor": lambda n: Tuple((_full(3), n)),
    "a tuple": lambda n: Tuple((_full(n), 7)),
    "a tuple with an attribute": lambda n: Tuple((_full(n), 7)).noted(),
    "a tuple of torch's": lambda n: torch.stack([_full(n), _full(n + 1)]).max(0),
    "a dict": lambda n: Dict(own=_full(n)),
}


def of_types(rank: int, directory: Path) -> list[str]:
    """Which of TYPES do not come back to objects, extra state, states and options of optimizers."""
    lost = []
    for name, form in TYPES.items():
        value, model = form(rank), Extra({"value": form(rank)})
        model.weight = torch.nn.Parameter(torch.zeros(2))
        optimizer, one = torch.optim.SGD(model.parameters()), Object({"value": value})
        optimizer.state[model.weight] = {"value": value}
        optimizer.param_groups[0]["value"] = value
        live = {"model": model, "optimizer": optimizer, "one": one}
        with Checkpointer(directory / name) as checkpointer:
            checkpointer.save(1, state=live, trust_pickle=True)
            model.state = one.state = None
            optimizer.state.clear()
            optimizer.param_groups[0]["value"] = None
            checkpointer.load(1, state=live, trust_pickle=True)
        places = [model.state, one.state, optimizer.state[model.weight], optimizer.param_groups[0]]
        for number, place in enumerate(places):
            again = place["value"]
            if type(again) is not type(value) or repr(again) != repr(value):
                lost.append(f"{name} at {number}: {again!r}")
    return lost


def test_what_differs_in_tuples_and_dicts_of_other_types_comes_back(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """With trust_pickle=True: a load ended with a TypeError, or left what stands for a tensor in place of it."""
    assert [[]] * 4 == gloo_ranks.run(of_types, tmp_path)


def _nan(number: int) -> float:
    return float(struct.unpack("d", struct.pack("Q", 0xFFF8 << 48 | number))[0])


BITS: dict[str, Any] = {
    "not a number": _nan,
    "surrogates": lambda n: {"\ud800" + chr(0xDC00 + n): "\ud800" + chr(0xDC00 + n)},
    "the second of two hours": lambda n: (datetime(2026, 10, 25, 2, fold=n % 2), time(2, fold=n % 2)),
    "a long integer": lambda n: 10**5000 + n,
    "a large integer": lambda n: {2**1024 + n},
    "an array's order": lambda n: np.array([[1, 2], [3, 4]], order="F" if n % 2 else "C"),
    "torch's version": lambda n: [n, torch.__version__],
    "an integer's type": lambda n: True if n % 2 else 1,
}


def of_bits(rank: int, directory: Path) -> list[str]:
    """Which of BITS do not come back from any place, where ranks differ, and where they do not."""
    lost = []
    for kind, number in (("own", rank), ("alike", 3)):
        model, one = Extra(), Object({name: form(number) for name, form in BITS.items()})
        model.weight = torch.nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD(model.parameters())
        live = {"model": model, "optimizer": optimizer, "one": one}
        model.state, optimizer.state[model.weight], rank_content, user = (dict(one.state) for _ in range(4))
        optimizer.param_groups[0].update(one.state)
        content: dict[str, Any] = {}
        with Checkpointer(directory / kind) as checkpointer:
            checkpointer.save(1, state=live, user_content=user, rank_content=rank_content)
            model.state = one.state = None
            optimizer.state.clear()
            optimizer.param_groups[0].update(dict.fromkeys(BITS))
            user = checkpointer.load(1, state=live, rank_content=content)
        own = [model.state, one.state, optimizer.state[model.weight], optimizer.param_groups[0], content]
        for number_there, places in ((number, own), (number if kind == "alike" else 0, [user])):
            for name, form in BITS.items():
                expected = pickle.dumps(form(number_there), 4)
                lost += [f"{name} {place}" for place in places if pickle.dumps(place[name], 4) != expected]
    return lost


def test_all_bits_of_values_come_back(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """JSON has one number for all that are none, and one character for two surrogates; protocol 2 drops the fold."""
    assert [[]] * 4 == gloo_ranks.run(of_bits, tmp_path)


def nested(rank: int, directory: Path) -> list[str]:
    """What saves of lists in 3,000 lists say, and of one that contains itself in an optimizer's state."""
    deep: list[Any] = [rank]
    for _ in range(3000):
        deep = [deep]
    itself: list[Any] = []
    itself.append(itself)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[model.weight]["own"] = itself
    with Checkpointer(directory) as checkpointer:
        return refusals(
            [
                lambda: checkpointer.save(1, rank_content=deep),
                lambda: checkpointer.save(1, state={"one": Object(deep)}),
                lambda: checkpointer.save(1, model, optimizer),
            ]
        )


def test_what_is_nested_too_deeply_is_refused(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """It was a RecursionError."""
    for content, one, optimizer in gloo_ranks.run(nested, tmp_path):
        assert "rank_content is builtins.list" in content
        assert "nested too deeply" in one
        assert "'own': its value contains itself" in optimizer


def untold(rank: int, directory: Path) -> list[str]:
    """What two saves of values that differ say, where rank 0 fails to tell its digests once."""
    failures = [OSError("of the test")] if rank == 0 else []

    def hook(operation: Operation) -> None:
        if failures and operation.name == "write" and "digests" in operation.key:
            raise failures.pop()

    one = Object({"own": rank})
    with Checkpointer(directory, storage=HookedStorage(LocalStorage(directory), hook)) as checkpointer:
        said = [refusal(lambda: checkpointer.save(step, state={"one": one})) for step in (1, 2)]  # noqa: B023
        checkpointer.load(2, state={"one": one})
    return [*said, f"loaded {one.state['own'] == rank}"]


def test_a_rank_that_fails_to_tell_its_digests_fails_the_save_at_once(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """The others waited for them for the whole timeout."""
    for first, *later in gloo_ranks.start(untold, tmp_path).result(timeout=300):
        assert "OSError: of the test" in first
        assert ["", "loaded True"] == later


STEPS: list[Any] = [
    lambda n: {},
    lambda n: {"own": _full(n)},
    lambda n: {"own": torch.ones(2 + n)},
    lambda n: {"own": _full(n).to(torch.float64 if n % 2 else torch.float32)},
    lambda n: {"own": n if n % 2 else torch.ones(2)},
    lambda n: {"own": {"own": torch.ones(1 + n)}},
    lambda n: {"own": torch.view_as_real(torch.tensor([1 + 2j, n])).T, "column": (torch.arange(8.0) + n)[::2]},
]
"""States that an object has one after the other, for a number."""


def of_forms(rank: int, directory: Path) -> list[str]:
    """Which of STEPS do not come back, to the object and as content."""
    lost, one = [], Object()
    with Checkpointer(directory) as checkpointer:
        for step, form in enumerate(STEPS):
            one.state = form(rank)
            checkpointer.save(step, state={"one": one}, rank_content=form(rank))
        for step, form in enumerate(STEPS):
            content: dict[str, Any] = {}
            checkpointer.load(step, state={"one": one}, rank_content=content)
            lost += [f"{step}: {own!r}" for own in (one.state, content) if repr(own) != repr(form(rank))]
    return lost


def test_tensors_of_other_forms_in_later_saves_come_back(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """Once a tensor was known to differ, a save of another shape could not be loaded; nor one of a column."""
    assert [[]] * 4 == gloo_ranks.run(of_forms, tmp_path)


def of_some_rows(rank: int, directory: Path) -> list[str]:
    """How often async saves of a tensor that only rank 0 has rows of do not give back each rank's own."""
    one, other, lost = Object({"rows": torch.ones(0 if rank else 2)}), Object(), []
    with Checkpointer(directory) as checkpointer:
        for step in range(3):
            checkpointer.save(step, state={"one": one}, async_save=True).wait()
            checkpointer.load(step, state={"one": other})
            lost += [f"{step}: {other.state}"] if repr(one.state) != repr(other.state) else []
    return lost


def test_empty_tensors_of_a_rank_come_back_from_async_saves(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """The shard of a small parameter is empty on some ranks: the save failed, because nothing of it is staged."""
    assert [[]] * 4 == gloo_ranks.run(of_some_rows, tmp_path)
