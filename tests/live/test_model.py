"""Models as state trees, and back."""

import pytest
import torch

from nxd_ckpt.core.manifest import ParameterSpec
from nxd_ckpt.core.partition import Partition
from nxd_ckpt.errors import DtypeMismatch, ShapeMismatch, UnsupportedState
from nxd_ckpt.live.named_models import open_model

pytestmark = pytest.mark.both


class Net(torch.nn.Module):
    """Tied weights, a frozen parameter, buffers, extra state, and tensor-parallel attributes."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(6, 4)
        self.lm_head = torch.nn.Linear(4, 6, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight
        self.scale = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("seen", torch.tensor(3))
        self.note = "as built"
        weight = self.embed.weight
        vars(weight).update(tensor_model_parallel=True, partition_dim=-2, partition_stride=1, rank_ordering=[1, 0])

    def get_extra_state(self):
        return {"note": self.note, "at": torch.arange(2)}

    def set_extra_state(self, state):
        self.note = state["note"]


def test_capture_describes_every_tensor():
    """Each tensor has its global name, its specification from NxD's attributes, and its tie."""
    state = open_model(Net()).capture(tp=2)
    embed = ParameterSpec("float32", (6, 4), Partition(0, 1, 2, (1, 0)), tie="embed.weight")
    scale = ParameterSpec("bfloat16", (4,), Partition(), trainable=False)
    seen = ParameterSpec("int64", (), Partition(), trainable=False)
    assert {"embed.weight": embed, "lm_head.weight": embed, "scale": scale, "seen": seen} == state.parameters
    described = {path: (about.name, about.spec, about.tie) for path, about in state.tensors.items()}
    assert {
        ("scale",): ("model/scale", scale, None),
        ("seen",): ("model/seen", seen, None),
        ("embed.weight",): ("model/embed.weight", embed, "embed.weight"),
        ("lm_head.weight",): ("model/lm_head.weight", embed, "embed.weight"),
        ("_extra_state", "at"): ("model/_extra_state/at", None, None),
    } == described


def test_a_partition_without_its_dimension_is_unknown():
    """A tensor-parallel parameter that does not say how it is cut is never taken for a replicated one."""
    weight = torch.nn.Parameter(torch.zeros(2))
    vars(weight).update(tensor_model_parallel=True, expert_model_parallel=True)
    state = open_model({"w": weight}).capture(tp=2)
    assert Partition(expert=True, known=False) == state.parameters["w"].partition
    assert state.tensors[("w",)].expert


def test_names_come_from_identity():
    """A parameter is known by the first of its names; tied names are aliases of each other."""
    net = Net()
    model = open_model(net)
    names = model.parameter_names()
    assert "embed.weight" == names[id(net.lm_head.weight)]
    assert ["embed.weight", "lm_head.weight"] == model.aliases("lm_head.weight")
    assert ["elsewhere"] == open_model({}).aliases("elsewhere")


def test_assign_keeps_parameter_and_memory():
    """Loading overwrites in place: optimizer, ties and views see the new values."""
    net = Net()
    before, weight = net.embed.weight.data_ptr(), net.embed.weight
    model = open_model(net)
    saved = dict(Net(tied=False).state_dict())
    saved["_extra_state"] = {"note": "as saved", "at": torch.arange(2)}
    for name in model.validate(saved):
        model.assign(name, saved[name])
    assert net.embed.weight is weight
    assert net.lm_head.weight is weight
    assert before == weight.data_ptr()
    assert saved["lm_head.weight"].tolist() == weight.tolist()
    assert "as saved" == net.note


def test_destination_is_the_live_memory_only_where_bytes_fit():
    """Bytes may be read straight into a contiguous CPU tensor, and into nothing else."""
    net = torch.nn.ParameterDict({"w": torch.zeros(3, 2)})
    model = open_model(net)
    destination = model.destinations(["w"])["w"]
    assert destination is not None
    assert net["w"].data_ptr() == destination.data_ptr()
    assert not destination.requires_grad
    assert {} == open_model({"w": torch.zeros(3, 2).t()}).destinations(["w"])
    assert {} == open_model({}).destinations(["w"])


def test_one_name_of_a_tied_parameter_is_enough():
    """A checkpoint that holds a tied weight once is complete."""
    saved = {name: value for name, value in Net().state_dict().items() if name != "embed.weight"}
    assert ([], list(saved)) == (open_model(Net()).missing(saved), open_model(Net()).validate(saved))


@pytest.mark.parametrize(
    ("saved", "error", "words"),
    [
        (torch.zeros(3, 2), ShapeMismatch, "model/w: saved with shape (3, 2), the live one has (2, 3)"),
        (torch.zeros(2, 3).half(), DtypeMismatch, "model/w: saved as float16, the live one is float32"),
        ({"w": 1}, DtypeMismatch, "model/w: saved as dict, the live one is torch.float32"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(saved, error, words):
    """Shape and dtype must match also without strict; the message has the name, saved and live."""
    with pytest.raises(error) as caught:
        open_model({"w": torch.zeros(2, 3)}).validate({"w": saved})
    assert str(caught.value).startswith(words)


def test_computed_entries_are_refused_on_load():
    """A value that state_dict() makes up cannot be written to: loading says so, and does not lose it silently."""

    class Computed(torch.nn.Linear):
        def state_dict(self, **options):
            return {**super().state_dict(**options), "norm": self.weight.norm().detach()}

    model = open_model(Computed(2, 2, bias=False))
    assert ["weight", "norm"] == list(model.capture(tp=1).tree)
    with pytest.raises(UnsupportedState, match="model/norm is computed by state_dict"):
        model.validate({"weight": torch.zeros(2, 2), "norm": torch.zeros(())})


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.empty(2, device="meta"), "model/w is on the meta device"),
        (torch.eye(2).to_sparse(), "model/w is of layout torch.sparse_coo"),
    ],
)
def test_tensors_without_values_of_their_own_are_refused(tensor, words):
    """What this process does not hold in full is named, for saving and loading alike."""
    for use in (lambda: open_model({"w": tensor}).capture(1), lambda: open_model({"w": tensor}).missing(())):
        with pytest.raises(UnsupportedState) as caught:
            use()
        assert str(caught.value).startswith(words)


def test_ties_of_dicts_are_seen_by_memory():
    """state_dict() loses the identity of tied parameters; on the CPU their memory still tells."""
    ties = {about.name: about.tie for about in open_model(Net().state_dict()).capture(tp=1).tensors.values()}
    assert ("embed.weight", "embed.weight") == (ties["model/embed.weight"], ties["model/lm_head.weight"])
    assert ties["model/scale"] is None


class Marked(torch.Tensor):
    """A tensor of another class, as libraries make them to mark theirs."""


def test_a_tie_of_a_tensor_of_another_class_is_seen():
    """It shares the memory of a plain one."""
    weight = torch.rand(2, 3)
    state = {"embed": weight, "head": weight.as_subclass(Marked), "other": torch.rand(2, 3)}
    ties = {about.name: about.tie for about in open_model(state).capture(tp=1).tensors.values()}
    assert {"model/embed": "embed", "model/head": "embed", "model/other": None} == ties
