"""Dtypes that torch has no copy kernels for come back, by every path; tensors that are more than their elements are
refused by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import Topology, convert, load_checkpoint, open_checkpoint, save_checkpoint, unshard_checkpoint
from nxd_ckpt.api import close_checkpointers
from nxd_ckpt.errors import UnsupportedState

NAMES = ("float4_e2m1fn_x2", "int4", "uint2", "float8_e8m0fnu", "uint64", "bits8", "complex32")
DTYPES = [
    pytest.param(getattr(torch, name), marks=[] if number < 2 else [pytest.mark.soak], id=name)
    for number, name in enumerate(NAMES)
    if hasattr(torch, name)
]


def tensor(dtype: torch.dtype, *, transposed: bool = False) -> torch.Tensor:
    made = (torch.arange(64, dtype=torch.uint8) * 3).view(dtype).view(4, -1)
    return made.t() if transposed else made


def data(value: torch.Tensor) -> tuple[torch.dtype, list[int]]:
    """The dtype, and the elements' bytes."""
    whole = value.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[value.itemsize])
    return value.dtype, whole.flatten().tolist()


@pytest.mark.parametrize(
    ("transposed", "options"),
    [(False, {}), (True, {"use_xser": True}), (True, {"async_save": True})],
    ids=["pt", "xser", "async"],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_dtypes_come_back(tmp_path: Path, dtype: torch.dtype, transposed: bool, options: dict[str, Any]) -> None:
    """In a dict, a module, an optimizer's state and user content; into fresh objects and into live ones."""
    saved = tensor(dtype, transposed=transposed)

    def made(buffer: torch.Tensor) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Linear(2, 2)
        model.register_buffer("packed", buffer)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    model, optimizer = made(saved)
    optimizer.state[model.get_parameter("weight")]["packed"] = saved
    save_checkpoint(tmp_path, "t", model, optimizer, **options)
    close_checkpointers()
    fresh, other = made(torch.zeros(64, dtype=torch.uint8).view(dtype).view(saved.shape))
    whole: dict[str, Any] = {}
    load_checkpoint(tmp_path, "t", fresh, other)
    load_checkpoint(tmp_path, "t", whole)
    found = [
        fresh.get_buffer("packed"),
        other.state[fresh.get_parameter("weight")]["packed"],
        whole["packed"],
        open_checkpoint(tmp_path).read("model/packed"),
    ]
    assert [data(saved)] * 4 == list(map(data, found))


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_dtypes_are_cut_and_converted(tmp_path: Path, dtype: torch.dtype) -> None:
    """To other sizes, along either dimension, and to one file."""
    for dim in (0, 1):
        saved, directory = tensor(dtype), tmp_path / str(dim)
        for rank in range(2):
            model = torch.nn.Module()
            model.register_buffer("packed", saved.clone() if dtype.itemsize > 1 else saved)
            vars(model.get_buffer("packed")).update(
                tensor_model_parallel=True, partition_dim=dim, partition_stride=1, num_partitions=2
            )
            save_checkpoint(directory, "t", model, topology=Topology(tp=2, rank=rank), run_id="x", async_save=True)
        close_checkpointers()
        whole: dict[str, Any] = {}
        load_checkpoint(directory, "t", whole, topology=Topology())
        byte = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        expected = data(torch.cat([saved.view(byte)] * 2, dim).view(dtype))
        assert expected == data(whole["packed"])
        convert(directory / "t", directory / "out" / "t", to="tag", tp=1)
        load_checkpoint(directory / "out", "t", whole, topology=Topology())
        assert expected == data(whole["packed"])
        unshard_checkpoint(directory / "t", directory / "file")
    assert (tmp_path / "0" / "file").exists()


UNUSUAL: dict[str, Callable[[], torch.Tensor]] = {
    "of layout torch.sparse_coo": lambda: torch.eye(3).to_sparse(),
    "of layout torch.sparse_csr": lambda: torch.eye(3).to_sparse_csr(),
    "of dtype torch.qint8": lambda: torch.quantize_per_tensor(torch.ones(8), 1.0, 0, torch.qint8),
    "on the meta device": lambda: torch.empty(2, device="meta"),
    "a nested tensor.*unbind": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "a nested tensor": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "a .*FakeTensor": lambda: torch._subclasses.FakeTensorMode().from_tensor(torch.ones(2)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("where", ["dict", "module", "optimizer"])
@pytest.mark.parametrize("what", UNUSUAL)
def test_tensors_with_more_than_elements_are_refused_by_name(tmp_path: Path, what: str, where: str) -> None:
    """Before anything is written."""
    model: Any = torch.nn.Linear(2, 2)
    optimizer, name, unusual = torch.optim.SGD(model.parameters(), lr=0.1), "model/inner.packed", UNUSUAL[what]()
    if where == "dict":
        model = {"inner.packed": unusual}
    elif where == "module":
        model.inner = torch.nn.Module()
        model.inner.register_buffer("packed", unusual)
    else:
        optimizer.state[model.weight]["packed"], name = unusual, "optim/weight/packed"
    with pytest.raises(UnsupportedState, match=f"{name} is {what}"):
        save_checkpoint(tmp_path, "t", model, None if where == "dict" else optimizer)
    close_checkpointers()
    assert not (tmp_path / "t").exists()
