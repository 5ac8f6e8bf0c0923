"""A load that cannot give every rank its part says why, and changes nothing."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nxd_ckpt import Partition, errors, load_checkpoint
from tests.interop.saving import save_as_every_rank
from tests.reshard.ranks import Live, fresh, load_rank, save_job
from tests.reshard.transformer import layout_of, weights_of
from tests.reshard.whole import Layout, Weight, expected
from tests.tag.equality import difference

WEIGHTS = weights_of()
ROUNDED = weights_of(torch.bfloat16)
SAVED = layout_of("dp2tp2", WEIGHTS)
LIVE = layout_of("dp3", WEIGHTS)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of dp=2 tp=2, ZeRO-1."""
    directory = tmp_path_factory.mktemp("kept")
    save_job(directory, WEIGHTS, SAVED)
    return directory


def refuse(directory: Path, live: Live, error: type[Exception], match: str, **options: object) -> None:
    refuse_load(load_rank, directory, live, error, match, **options)


def refuse_load(
    load: Callable[..., object], directory: Path, live: Live, error: type[Exception], match: str, **options: object
) -> None:
    before = live.held()
    with pytest.raises(error, match=match):
        load(directory, live, **options)
    assert None is difference(before, live.held())


def load_part(directory: Path, live: Live, *, optimizer: bool) -> None:
    """The model, and the optimizer or not."""
    load_checkpoint(directory, None, live.model, live.optimizer if optimizer else None, topology=live.at)


def changed(name: str, change: Callable[[Weight], Weight]) -> list[Weight]:
    return [change(weight) if weight.name == name else weight for weight in WEIGHTS]


def test_one_live_group_cannot_have_the_options_of_two(kept: Path) -> None:
    """Parameters of one live param group were saved with other options: which should count?"""
    [(first, second)] = [LIVE.groups]
    live = fresh(WEIGHTS, replace(LIVE, groups=(first + second,)), LIVE.topology)
    refuse(kept, live, errors.OptimizerMismatch, "group")


@pytest.mark.parametrize(("trained_at_save", "trained_live"), [(True, False), (False, True)])
def test_another_set_of_trained_parameters(tmp_path: Path, trained_at_save: bool, trained_live: bool) -> None:
    """Frozen when it was saved and trained now, or the reverse: the optimizers do not hold the same parameters."""
    sides = [
        changed("embed", lambda weight, kind=kind: replace(weight, kind=kind))  # type: ignore[misc]
        for kind in ("parameter" if trained else "frozen" for trained in (trained_at_save, trained_live))
    ]
    save_job(tmp_path, sides[0], layout_of("dp2tp2", sides[0]))
    live = fresh(sides[1], layout_of("dp3", sides[1]), LIVE.topology)
    refuse(tmp_path, live, errors.OptimizerMismatch, "embed")


@pytest.mark.parametrize("optimizer", [True, False])
def test_another_whole_shape_is_refused(kept: Path, optimizer: bool) -> None:
    """Both whole shapes are named, whatever the ranks' own shapes are."""
    weights = changed("block0_norm", lambda weight: replace(weight, shape=(9,)))
    live = fresh(weights, layout_of("dp3", weights), LIVE.topology)
    shapes = r"block0_norm.*\(7,\).*\(9,\)"
    refuse_load(load_part, kept, live, errors.ShapeMismatch, shapes, optimizer=optimizer)


def test_another_dtype_is_refused(kept: Path) -> None:
    """Values are not cast silently on another topology either: no master weights are given that hold them."""
    weights = changed("embed", lambda weight: replace(weight, dtype=torch.bfloat16))
    live = fresh(weights, layout_of("dp3", weights), LIVE.topology)
    refuse_load(load_part, kept, live, errors.DtypeMismatch, "embed.*float32.*bfloat16", optimizer=False)


def test_live_attributes_that_were_lost(kept: Path) -> None:
    """A live parameter that does not say how it is cut has another shape than the whole: ``partitions=`` is named."""
    layout = layout_of("tp3", WEIGHTS)
    live = fresh(WEIGHTS, layout, layout.topology)
    for parameter in live.stage.parameters():
        vars(parameter).clear()
    refuse(kept, live, errors.IncompatibleState, r"(?s)embed.*partitions=", partitions=layout.partitions)


def unmarked(rank: int) -> dict[str, object]:
    live = Live(WEIGHTS, SAVED, SAVED.topology.at(rank))
    live.fill_optimizer(WEIGHTS, SAVED)
    for parameter in live.stage.parameters():
        vars(parameter).clear()
    return {"model": live.model, "optimizer": live.optimizer}


def test_attributes_that_were_lost_at_the_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Ranks that held other values under one name, without saying how it is cut: on other tp sizes it is refused."""
    save_as_every_rank(tmp_path, "step_1", SAVED.ranks, unmarked, durable=False)
    live = fresh(WEIGHTS, LIVE, LIVE.topology)
    for parameter in live.stage.parameters():
        vars(parameter).clear()
    refuse(tmp_path, live, errors.TopologyMismatch, "embed: the cut .* is not known.*partitions=")
    same_tp = layout_of("dp4tp2", WEIGHTS)
    live = fresh(WEIGHTS, same_tp, same_tp.topology.at(5))
    load_rank(tmp_path, live)
    assert None is difference(expected(WEIGHTS, same_tp, live.at), live.held())


def test_attributes_of_the_live_model_make_up_for_lost_ones(tmp_path: Path) -> None:
    """Where the save lost them, a layer is taken to have been cut as the live one says that it is."""
    save_as_every_rank(tmp_path, "step_1", SAVED.ranks, unmarked, durable=False)
    for at in LIVE.ranks:
        live = fresh(WEIGHTS, LIVE, at)
        load_rank(tmp_path, live, partitions=LIVE.partitions)
        assert None is difference(expected(WEIGHTS, LIVE, at), live.held())


def test_partitions_at_the_save_make_up_for_lost_attributes(tmp_path: Path) -> None:
    partitions = {name: cut for name, cut in SAVED.cuts.items() if cut != Partition()}
    save_as_every_rank(tmp_path, "step_1", SAVED.ranks, unmarked, durable=False, partitions=partitions)
    for at in LIVE.ranks:
        live = fresh(WEIGHTS, LIVE, at)
        load_rank(tmp_path, live)
        assert None is difference(expected(WEIGHTS, LIVE, at), live.held())


def test_a_gradient_on_some_ranks_only(tmp_path: Path) -> None:
    """Where half of the experts have moments and the others never had a gradient, one rank cannot have both."""
    weights = weights_of(experts=True)
    layout, whole = layout_of("dp2ep2", weights), layout_of("dp1", weights)

    def what(rank: int) -> dict[str, object]:
        live = Live(weights, layout, layout.topology.at(rank))
        live.fill_optimizer(weights, layout)
        if rank == 0:
            live.optimizer.ep_zero_optimizer.base_optimizer.state.clear()
        return {"model": live.model, "optimizer": live.optimizer}

    save_as_every_rank(tmp_path, "step_1", layout.ranks, what, durable=False, partitions=layout.partitions)
    live = fresh(weights, whole, whole.topology)
    refuse(tmp_path, live, errors.IncompatibleState, "experts.*gradient", partitions=whole.partitions)


def test_entries_of_another_shape_load_on_the_same_cut_only(tmp_path: Path) -> None:
    """What is not shaped like its parameter (a factored moment) cannot be cut anew; on the same cut it loads."""
    saved, live = (replace(layout, zero1=False) for layout in (SAVED, LIVE))

    def what(rank: int) -> dict[str, object]:
        held = Live(WEIGHTS, saved, saved.topology.at(rank))
        held.fill_optimizer(WEIGHTS, saved)
        held.optimizer.state[held.stage.embed]["rows"] = torch.full((12,), float(held.at.tp_rank))
        return {"model": held.model, "optimizer": held.optimizer}

    save_as_every_rank(tmp_path, "step_1", saved.ranks, what, durable=False, partitions=saved.partitions)
    match = r"optim/embed/rows: saved with shape \(12,\)"
    refuse(tmp_path, fresh(WEIGHTS, live, live.topology), errors.OptimizerMismatch, match)
    same_cut = layout_of("dp3tp2", WEIGHTS, zero1=False)
    other = fresh(WEIGHTS, same_cut, same_cut.topology.at(5))
    load_rank(tmp_path, other, partitions=same_cut.partitions)
    assert [1.0] * 12 == other.optimizer.state[other.stage.embed]["rows"].tolist()


@pytest.mark.parametrize("live", [LIVE, layout_of("dp1", WEIGHTS), SAVED], ids=lambda live: live.topology.describe())
@pytest.mark.parametrize("zero1", [True, False])
@pytest.mark.one_in(2)
def test_zero1_becomes_plain_and_the_reverse(tmp_path: Path, zero1: bool, live: Layout) -> None:
    """By the names of the parameters, on any sizes; without names they are refused."""
    save_job(tmp_path, WEIGHTS, replace(SAVED, zero1=zero1))
    layout = replace(live, zero1=not zero1, master_weights=False)
    held = fresh(WEIGHTS, layout, layout.topology)
    load_rank(tmp_path, held, partitions=layout.partitions)
    assert None is difference(expected(WEIGHTS, layout, layout.topology), held.held())
    nameless = fresh(WEIGHTS, layout, layout.topology)
    with pytest.raises(errors.OptimizerMismatch, match="by the names of their parameters, which are not known: pass"):
        load_checkpoint(tmp_path, None, None, nameless.optimizer, topology=layout.topology)


def test_zero1_of_rounded_weights_becomes_a_plain_one_of_its_master_weights(tmp_path: Path) -> None:
    """A plain optimizer has no master weights, so that the rounded ones would be trained on."""
    job, dtype = layout_of("dp2", ROUNDED), torch.bfloat16
    save_job(tmp_path, ROUNDED, job)
    layout = replace(layout_of("dp1", ROUNDED), zero1=False)
    rounded = fresh(ROUNDED, layout, layout.topology)
    assert {dtype} == {parameter.dtype for parameter in rounded.stage.parameters() if parameter.requires_grad}
    refuse(tmp_path, rounded, errors.OptimizerMismatch, r"on bfloat16 parameters, .* model\.to\(torch\.float32\)")
    exact = fresh(ROUNDED, layout, layout.topology)
    exact.stage.float()
    load_rank(tmp_path, exact)
    whole = {weight.name: weight.master if weight.kind == "parameter" else weight.value.float() for weight in ROUNDED}
    weights = dict(exact.stage.named_parameters())
    assert weights.keys() <= whole.keys()
    assert [] == [name for name, value in weights.items() if not torch.equal(whole[name], value)]


def test_partitions_that_do_not_fit(kept: Path) -> None:
    """What ``partitions=`` says of a live parameter is checked against it; a name that is not live is a mistake."""
    live = fresh(WEIGHTS, LIVE, LIVE.topology)
    refuse(kept, live, errors.InvalidArgument, "no_such", partitions={"no_such": Partition(0)})
    wrong = {"embed": Partition(0, num_partitions=5)}
    refuse(kept, live, errors.InvalidArgument, "embed", partitions=wrong)
