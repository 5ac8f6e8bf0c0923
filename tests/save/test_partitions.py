"""``partitions=``: what a user says of how parameters are cut, checked against what the rank holds."""

import pytest
import torch

from nxd_ckpt.core.box import Box
from nxd_ckpt.core.partition import Partition, Piece, Section
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import InvalidArgument
from nxd_ckpt.saving.capture import capture
from nxd_ckpt.saving.options import SaveOptions
from nxd_ckpt.saving.plan import plan_save


def pieces(topology: Topology, **partitions: Partition) -> tuple[Piece, ...] | None:
    """The pieces of a weight of 6 x 3 that the rank's plan records."""
    model = {"weight": torch.zeros(6, 3)}
    plan = plan_save(capture(topology, SaveOptions(partitions=partitions), model=model), topology)
    [entry] = [tensor for file in plan.files for tensor in file.tensors if tensor.name == "model/weight"]
    return entry.pieces


def test_a_fused_weight_is_recorded_section_by_section() -> None:
    """NxD's fused q, k and v lose their attributes: with ``partitions=`` the index says where each lies."""
    fused = Partition(0, fused=(Section(8, 4), Section(4, 2), Section(4, 2)))
    expected = (
        Piece(Box((0, 0), (2, 3)), Box((6, 0), (2, 3))),
        Piece(Box((2, 0), (2, 3)), Box((10, 0), (2, 3))),
        Piece(Box((4, 0), (2, 3)), Box((14, 0), (2, 3))),
    )
    assert expected == pieces(Topology(tp=4, tp_rank=3), weight=fused)


@pytest.mark.parametrize(
    "partition",
    [
        Partition(0, 4, 2),
        Partition(0, num_partitions=4),
        Partition(0, 1, 2, (1, 0, 1, 0)),
        Partition(0, fused=(Section(8, 2), Section(4, 1))),
    ],
)
def test_a_cut_that_does_not_fit_is_refused(partition: Partition) -> None:
    """At the save, where it can be corrected, not at the load on another topology."""
    with pytest.raises(InvalidArgument, match=r"weight is cut as .* but then .* cannot each hold shape \(6, 3\)"):
        pieces(Topology(tp=2), weight=partition)


@pytest.mark.parametrize("partition", [Partition(2, num_partitions=2), Partition(2, 1, 2, known=False)])
def test_a_dimension_that_is_not_there_is_refused(partition: Partition) -> None:
    """The error names the parameter and its shape."""
    expected = r"partitions= of weight: its partition cuts dimension 2, counted from 0, but it has 2 dimensions"
    with pytest.raises(InvalidArgument, match=expected):
        pieces(Topology(tp=2), weight=partition)


def test_names_of_other_stages_are_left_to_them() -> None:
    """All ranks pass the same ``partitions=``; a pipeline stage takes what it holds."""
    partitions = {"weight": Partition(0, num_partitions=2), "of_another_stage": Partition(0, num_partitions=2)}
    expected = (Piece(Box.whole((6, 3)), Box((6, 0), (6, 3))),)
    assert expected == pieces(Topology(tp=2, pp=2, tp_rank=1), **partitions)


def test_a_name_that_no_stage_has() -> None:
    """Without pipeline stages, a name that the model does not have is a mistake."""
    with pytest.raises(InvalidArgument, match=r"partitions= names 'wieght' \(did you mean 'weight'\?\), which the"):
        pieces(Topology(tp=2), wieght=Partition(0, num_partitions=2))
