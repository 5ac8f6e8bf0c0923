"""Overwriting live state: the second phase of a load, when all ranks know that everything fits."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.formats.strides import stored_stride, strided
from nxd_ckpt.formats.tensors import Assembly, TensorStub, itemsize, map_tensors
from nxd_ckpt.live.model import ModelAdapter
from nxd_ckpt.load.delivery import Delivery
from nxd_ckpt.tag.reading import Leaf

logger = logging.getLogger("nxd_ckpt")

PARTLY = "The live state is partly overwritten: load another tag before training on"


@contextmanager
def overwriting(where: str) -> Iterator[None]:
    """Context in which live state changes. Errors add that it is partly overwritten with the state at ``where``."""
    try:
        yield
    except CheckpointError as error:
        raise type(error)(f"{error}. {PARTLY}") from error
    except OSError as error:
        logger.error("%s: %s. %s", where, error, PARTLY)
        raise


def fill_model(
    model: ModelAdapter, names: Sequence[str], tree: Mapping[str, Any], delivery: Delivery, strict: bool = True
) -> None:
    """Assign the values of ``tree`` under ``names``. All are in place when the delivery has finished.

    State that modules load themselves comes first: they may refuse it, and then nothing else has changed.
    """
    own = [name for name in names if model.owns(name)]
    if own:
        model.load_own({name: _with_strides(tree[name], delivery) for name in own}, strict)
        names = [name for name in names if not model.owns(name)]
    # All destinations before the first read: while threads read, any tensor operation takes ten times as long.
    destinations = {name: model.destination(name) for name in names}
    for name in names:
        if isinstance(tree[name], (TensorStub, Assembly)):
            _assign(model, name, tree[name], destinations[name], delivery)
            continue
        # Extra state: a module may look at its parameters when it is given that, and may replace them.
        delivery.finish()
        model.assign(name, _with_strides(tree[name], delivery))
        destinations = {name: model.destination(name) for name in names}


def nbytes_of(leaf: Leaf) -> int:
    """Return the bytes of a tensor in memory."""
    return math.prod(leaf.shape) * itemsize(leaf.dtype)


def _assign(model: ModelAdapter, name: str, leaf: Leaf, destination: torch.Tensor | None, delivery: Delivery) -> None:
    if destination is None and model.is_on_host(name):
        model.assign(name, _with_strides(leaf, delivery))  # at once: it may share memory with what comes next
    elif destination is None:
        delivery.then(leaf, lambda value: model.assign(name, strided(value, stored_stride(leaf))))
    else:
        delivery.into(leaf, destination)


def _with_strides(tree: Any, delivery: Delivery) -> Any:
    """Return ``tree`` with its tensors, read, with their saved strides."""
    return map_tensors(tree, lambda leaf: strided(delivery(leaf), stored_stride(leaf)), (TensorStub, Assembly))
