"""What a load makes anew lies in memory as it did at the save: as with torch, also where no live tensor tells."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from nxd_ckpt import Checkpointer, load_checkpoint, open_checkpoint, save_checkpoint
from nxd_ckpt.api import close_checkpointers
from nxd_ckpt.errors import MalformedFile
from nxd_ckpt.formats.pickling import pickle_tree
from nxd_ckpt.formats.strides import Stride, fitted
from nxd_ckpt.formats.tensors import StorageSpan, iter_tensors
from nxd_ckpt.formats.unpickle import unpickle
from tests.support.rank_pool import RankPool
from tests.training.registry import LAYOUTS

Tensor = torch.Tensor


def odd_tensors() -> dict[str, Any]:
    """Tensors that are not row-major, nested as state and content nest them."""
    return {
        "transposed": torch.randn(3, 5).T,
        "channels_last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "one row": torch.randn(5, 1).T,
        "sliced": torch.randn(6, 8)[1:-1, 2:-2],
        "one of each two": torch.arange(10)[::2],
        "expanded": torch.randn(3, 1).expand(3, 4),
        "nested": [{"basis": torch.randn(4, 4).T}, (torch.randn(2, 3).T, None)],
        "plain": torch.randn(2, 3),
        "bytes": torch.arange(6, dtype=torch.uint8).view(2, 3).T,
        "narrow": torch.randn(2, 6).T.to(torch.float8_e4m3fn),
    }


class Scattered(torch.optim.SGD):
    """State in every layout, some of it as large as the parameter and in another order than that."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state.update(odd_tensors())
                    state["moment"] = torch.randn_like(parameter)
                    state["row-major"] = torch.randn(parameter.shape)
                    state["turned"] = LAYOUTS["transposed"](torch.randn(parameter.shape))
        return super().step(closure)


class Turned(torch.nn.Linear):
    """Extra state with tensors that are not row-major."""

    def __init__(self) -> None:
        super().__init__(4, 4, bias=False)
        self.weight = torch.nn.Parameter(self.weight.detach().T)
        self.extra: Any = None

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def made() -> tuple[Turned, Scattered]:
    model = Turned()
    return model, Scattered(model.parameters(), lr=0.1)


def seen(tree: Any) -> dict[Any, Any]:
    """Of each tensor in ``tree`` dtype, shape, strides and values."""
    leaves = iter_tensors(tree, Tensor)
    return {path: (one.dtype, one.shape, one.stride(), one.to(torch.float32).tolist()) for path, one in leaves}


def stepped(model: Any, optimizer: Any) -> None:
    model(torch.randn(2, 4)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("xser", [False, True], ids=["plain", "xser"])
def test_state_and_content_keep_their_strides(tmp_path: Path, xser: bool) -> None:
    """The first save, and one that uses its plan again with other numbers beside the tensors; into fresh objects."""
    model, optimizer = made()
    stepped(model, optimizer)
    model.extra = odd_tensors()
    content, own = {"user": odd_tensors()}, {"own": odd_tensors()}
    with Checkpointer(tmp_path) as checkpointer:
        for tag in ("a", "b"):
            beside: Any = {"user_content": content, "rank_content": own}
            checkpointer.save(tag, model, optimizer, {"s": content}, use_xser=xser, **beside)
            optimizer.param_groups[0]["lr"] /= 2
        for tag in ("a", "b"):
            other, fresh = made()
            scheduler, given = dict[str, Any](), dict[str, Any]()
            loaded = checkpointer.load(tag, other, fresh, scheduler, rank_content=given)
            assert seen(optimizer.state_dict()) == seen(fresh.state_dict())
            assert seen(model.extra) == seen(other.extra)
            assert (seen(content), seen(own)) == (seen(loaded), seen(given))
            state = dict[str, Any]()
            checkpointer.load(tag, dict[str, Any](), state)
            assert seen(optimizer.state_dict()) == seen(state)
        checkpointer.load("a", model, optimizer)  # what is expanded is made again: it cannot be overwritten
        assert seen(optimizer.state_dict()) == seen(state)


def test_an_optimizer_dict_keeps_its_strides(tmp_path: Path) -> None:
    """A state dict in place of the optimizer, saved and loaded, and then given to an optimizer.

    It does not tell the parameter's strides: what is row-major takes those.
    """
    model, optimizer = made()
    stepped(model, optimizer)
    state, read = optimizer.state_dict(), dict[str, Any]()
    save_checkpoint(tmp_path, "t", model, state)
    load_checkpoint(tmp_path, "t", Turned(), read)
    assert seen(state) == seen(read)
    other, fresh = made()
    load_checkpoint(tmp_path, "t", other, fresh)
    of_parameter = state["state"][0].pop("row-major"), fresh.state[other.weight].pop("row-major")
    assert other.weight.stride() == of_parameter[1].stride()
    assert torch.equal(*of_parameter)
    assert seen(state) == seen(fresh.state_dict())
    close_checkpointers()


def test_torch_reads_a_tensor_whose_strides_are_noted(tmp_path: Path) -> None:
    """Also with ``weights_only``: it has the note as an attribute, which nothing in torch looks at."""
    model, optimizer = made()
    stepped(model, optimizer)
    save_checkpoint(tmp_path, "t", model, optimizer, user_content=odd_tensors())
    close_checkpointers()
    (file,) = (tmp_path / "t" / "optim").glob("*.pt")
    expected = seen(optimizer.state_dict())
    for path in (file, tmp_path / "t" / "user_content.pt"):
        read = torch.load(path, weights_only=True)
        assert all(one.is_contiguous() for _, one in iter_tensors(read, Tensor))
    found = seen(torch.load(file, weights_only=True))
    assert [one[3] for one in expected.values()] == [one[3] for one in found.values()]
    assert not hasattr(next(iter(optimizer.state.values()))["transposed"], "live_stride")


def test_views_that_torch_saved_keep_their_strides(tmp_path: Path) -> None:
    """User content that another program wrote by torch.save."""
    save_checkpoint(tmp_path, "t", torch.nn.Linear(2, 2))
    close_checkpointers()
    content = odd_tensors()
    torch.save(content, tmp_path / "t" / "user_content.pt")
    for of_ours in ("manifest.json", "index"):
        path = tmp_path / "t" / of_ours
        for file in path.iterdir() if path.is_dir() else ():
            file.unlink()
        path.rmdir() if path.is_dir() else path.unlink()
    assert seen(content) == seen(open_checkpoint(tmp_path).user_content())


@pytest.mark.parametrize("steps", [(1,), (1, -1), (1, 2**70), "ab", (1, 2, 3)], ids=repr)
def test_a_note_that_is_none_is_malformed(steps: Any) -> None:
    """A damaged or hostile file."""
    pickled, _ = pickle_tree(torch.randn(3, 5).T, id, lambda tensor: Stride(steps))
    with pytest.raises(MalformedFile, match="stride"):
        unpickle(pickled, "file.pt", {"0": StorageSpan("data/0", 0, 60, None)})


@pytest.mark.parametrize(
    ("steps", "shape", "expected"),
    [
        ((1, 5), (5, 3), (1, 5)),
        ((1, 10**9), (5, 3), (1, 5)),
        ((10**9, 1), (5, 3), (3, 1)),
        ((1, 1), (5, 3), (3, 1)),
        ((0, 1), (5, 3), (0, 1)),
        ((2**62, 2**62), (2**20, 2**20), (2**20, 1)),
        ((7, 7), (0, 3), (3, 1)),
    ],
)
def test_no_note_asks_for_memory_without_bounds(steps: Any, shape: Any, expected: Any) -> None:
    """Gaps are kept while they are small; elements share memory only along what was expanded."""
    assert expected == fitted(steps, shape)


class Local(torch.optim.SGD):
    """Keeps DTensors and plain tensors of its own shard that are not row-major."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                state, local = self.state[parameter], parameter.to_local()
                if not state:
                    state["basis"] = torch.randn(3, 2).T
                    state["turned"] = DTensor.from_local(
                        LAYOUTS["transposed"](torch.randn(local.shape)),
                        parameter.device_mesh,
                        parameter.placements,
                        run_check=False,
                        shape=parameter.shape,
                        stride=parameter.stride(),
                    )
                    state["everywhere"] = torch.arange(12.0).view(parameter.shape).T
        return super().step(closure)


def _locals_of(optimizer: Any) -> dict[Any, Any]:
    return {
        (number, key): seen([value.to_local() if isinstance(value, DTensor) else value])
        for number, entries in optimizer.state_dict()["state"].items()
        for key, value in entries.items()
    }


def _on_ranks(rank: int, directory: Path) -> bool:
    def sharded() -> Any:
        torch.manual_seed(rank)
        model = torch.nn.Linear(4, 3, bias=False)
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        return model, Local(model.parameters(), lr=0.1)

    model, optimizer = sharded()
    stepped(model, optimizer)
    with Checkpointer(directory) as checkpointer:
        checkpointer.save("t", model, optimizer)
        other, fresh = sharded()
        checkpointer.load("t", other, fresh)
    return _locals_of(optimizer) == _locals_of(fresh)


def test_ranks_of_a_mesh_keep_their_strides(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """DTensors, and plain tensors of each rank's own; shards differ in size, and one is empty."""
    assert [True] * 4 == gloo_ranks.run(_on_ranks, tmp_path)
