"""Data positions: the place of a live data loader as plain data, and back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from nxd_ckpt.core.data_position import Position, check_position, is_data_position, position
from nxd_ckpt.errors import IncompatibleState, InvalidArgument
from nxd_ckpt.live.data_streams import DataStreams
from nxd_ckpt.live.elastic_sampler import ElasticSampler

_STEPS_SINCE = "_steps_since_snapshot"
_DATASET_STATE = "dataset_state"
"""torchdata's keys: batches delivered since the state was taken, and the dataset's own state."""


def capture_data_position(loader: Any) -> Position:
    """Return the position of ``loader`` as plain data, for ``rank_content=``.

    A load on another dp re-splits the position of `DataStreams`, and of torchdata's StatefulDataLoader over an
    `ElasticSampler`. The state of any other object with ``state_dict()`` is one rank's own: a load on other sizes
    refuses it.

    Raises:
        InvalidArgument: an object without ``state_dict`` and ``load_state_dict``.
    """
    if not hasattr(loader, "state_dict") or not hasattr(loader, "load_state_dict"):
        raise InvalidArgument(
            f"{type(loader).__name__} has no state_dict() and load_state_dict(): expected a loader that has, such as "
            "torchdata.stateful_dataloader.StatefulDataLoader"
        )
    state = loader.state_dict()
    if isinstance(loader, DataStreams):
        return position(loader.dp, loader.dp_rank, None, state)
    sampler = _sampler_of(loader)
    if sampler is None:
        return position(None, None, state, None, "as nothing tells how its loader shares the data out among ranks")
    shared, alone = _place(loader, sampler, state), ""
    if shared is None:
        alone = "as its loader does not tell which samples it has delivered"
    elif any(value is not None for value in _all(state, _DATASET_STATE)):
        shared, alone = None, "as its dataset has state of its own"
    return position(sampler.dp, sampler.dp_rank, state, shared, alone)


def restore_data_position(loader: Any, saved: Position) -> None:
    """Move ``loader`` to a position that `capture_data_position` returned, re-split over other ranks if needed.

    Raises:
        InvalidArgument: not a data position, or the loader is being iterated.
        MalformedFile: a position that capture_data_position() cannot have returned.
        IncompatibleState: the position is of another kind of loader, of other data, or of another rank and cannot be
            re-split.
    """
    if not is_data_position(saved):
        raise InvalidArgument(
            f"expected the result of capture_data_position(), found {type(saved).__name__}; a load fills "
            "rank_content= with it"
        )
    check_position(saved, "data position")
    running = getattr(loader, "_iterator", None)  # torchdata's
    if running is not None and not getattr(running, "_finished", False):
        raise InvalidArgument(
            f"{type(loader).__name__} is being iterated, and its iterator would continue from the old place: restore "
            "the data position before iter(), or into a new loader"
        )
    shared, sampler = saved["shared"], _sampler_of(loader)
    kind = None if shared is None else shared["kind"]
    if isinstance(loader, DataStreams) and kind == "streams":
        loader.load_state_dict(shared)
    elif sampler is not None and kind == "samples" and _place_of(saved) != (sampler.dp, sampler.dp_rank):
        sampler.load_state_dict(shared)
        if loader is not sampler:
            loader.load_state_dict({})  # a new iterator, which asks the sampler
    elif not isinstance(loader, DataStreams) and kind != "streams" and _is_own(saved, sampler):
        loader.load_state_dict(saved["state"])
    else:
        origin = f"one rank's own, {saved['alone']}" if kind is None else f"of {kind}"
        raise IncompatibleState(
            f"a {type(loader).__name__} cannot continue from this data position, which is {origin}; make the loader as "
            "it was at the save, for the same rank and number of ranks"
        )


def _is_own(saved: Position, sampler: ElasticSampler | None) -> bool:
    """Return whether the position is that of a loader with the same share, as far as both tell.

    Positions that were merged are no rank's own.
    """
    if saved["dp"] is None and saved["shared"] is not None:
        return False
    return _place_of(saved) == (None if sampler is None else (sampler.dp, sampler.dp_rank))


def _place_of(saved: Position) -> tuple[int, int] | None:
    return None if saved["dp"] is None else (saved["dp"], saved["dp_rank"])


def _sampler_of(loader: Any) -> ElasticSampler | None:
    """Return the ElasticSampler that chooses the samples of ``loader``; None if there is none."""
    if isinstance(loader, ElasticSampler):
        return loader
    if not isinstance(loader, DataLoader):
        return None
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        if isinstance(sampler, ElasticSampler):
            return sampler
    return None


def _place(loader: Any, sampler: ElasticSampler, state: Any) -> dict[str, Any] | None:
    """Return the sampler's state after the last batch that ``loader`` delivered; None if that is unknown."""
    sampler_state = next(_samplers(state), None)
    later = sum(_all(state, _STEPS_SINCE))
    if sampler_state is None or not later:
        return sampler_state
    size = 1 if loader.batch_sampler is None else getattr(loader.batch_sampler, "batch_size", None)
    return None if size is None else sampler_state | {"consumed": sampler_state["consumed"] + later * size * sampler.dp}


def _samplers(state: Any) -> Iterator[dict[str, Any]]:
    """Yield the states of ElasticSamplers anywhere in a loader's state."""
    if isinstance(state, dict):
        if state.get("kind") == "samples" and "consumed" in state:
            yield dict(state)
        else:
            for value in state.values():
                yield from _samplers(value)


def _all(state: Any, name: str) -> Iterator[Any]:
    """Yield every value of that name in nested dicts."""
    if isinstance(state, dict):
        for key, value in state.items():
            if key == name:
                yield value
            else:
                yield from _all(value, name)
