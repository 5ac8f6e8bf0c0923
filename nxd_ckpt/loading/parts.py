"""Parts of a tag, and the loading of those beside model and optimizer.

A scheduler may have set learning rates that its optimizer lacks. With expert parallelism NxD saves the param groups of
the two inner optimizers of ZeRO-1, which get the scheduler's rates only at the next step. The rates that it set are
only in the scheduler's own state. Conversions write what they read, so their results lack them too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from types import NoneType
from typing import Any

import torch

from nxd_ckpt.core.data_position import Position, check_position, is_complete, is_data_position, merge_positions
from nxd_ckpt.core.limits import shown
from nxd_ckpt.core.name_patterns import filtered_name
from nxd_ckpt.core.suggestions import listed
from nxd_ckpt.core.topology import Coordinates, Topology
from nxd_ckpt.effects import logger
from nxd_ckpt.errors import (
    CheckpointError,
    CorruptCheckpoint,
    IncompatibleState,
    PartLost,
    PartNotFound,
    UnsafePickle,
)
from nxd_ckpt.formats.memory import TENSORS
from nxd_ckpt.formats.tensors import TensorReference
from nxd_ckpt.live.data_position import is_of_share, is_random_state
from nxd_ckpt.live.ignoring import RANDOM_STATE
from nxd_ckpt.live.named import OBJECTS, NamedObjects, named_states, state_of
from nxd_ckpt.loading.filters import Filter
from nxd_ckpt.loading.options import LoadRequest
from nxd_ckpt.surroundings import as_called
from nxd_ckpt.tag.opened import OpenTag


def demand(opened: OpenTag, model: Any, optim: Any, scheduler: Any, rank_content: Any) -> None:
    """Raise PartNotFound for a requested part that was never saved."""
    parts = opened.parts
    for requested, saved, name in (
        (model is not None, parts.model, "model"),
        (optim is not None, parts.optimizer is not None, "optimizer"),
        (scheduler is not None, parts.scheduler, "scheduler"),
        (rank_content is not None, parts.rank_content, "rank_content"),
    ):
        if requested and not saved and name == "scheduler" and isinstance(scheduler, NamedObjects):
            raise PartNotFound(
                f"{opened.where} was saved without the state of {listed(scheduler, ())}; it holds "
                f"{_parts_text(parts)}. Leave out state=, or choose another tag"
            )
        if requested and not saved:
            keeps = " or with weights_only=True, which cuts ZeRO-1's shards from the weights,"
            may_be_content = opened.manifest is None and parts.user_content and name in ("model", "optimizer")
            names_key = f", or convert a script's file with {name[:5]}_key=, if that has it under a key of its own"
            raise PartNotFound(
                f"{opened.where} was saved without {name}; it holds {_parts_text(parts)}. "
                f"Load it with {name}=None, the first time if it is new in this job,{keeps * (name == 'optimizer')} or "
                f"choose another tag{names_key * may_be_content}"
            )


def refuse_forgotten(opened: OpenTag, request: LoadRequest, filtered: Filter) -> None:
    """Raise IncompatibleState if a resume passes no optimizer, or no objects by name, though the tag has some.

    A load without ``state=`` may leave the optimizer out, as with NxD.
    """
    if request.options.prefix:  # one of several models, alone
        return
    forgotten = []
    if opened.parts.optimizer is not None and request.optimizer is None and request.state is not None:
        forgotten.append(("optimizer", "optim"))
    if opened.parts.scheduler and request.scheduler is None and (request.state is not None or request.optimizer):
        states = None if filtered.covers("scheduler") else named_states(opened.scheduler())
        forgotten.extend([(listed(states, ()), "scheduler")] if states else [])
    for name, part in forgotten:
        if not filtered.covers(part):
            raise IncompatibleState(
                f"{opened.where} holds the state of {name}, and the load has nothing to put it into. Pass all objects "
                f"that were saved, by their names in state=, or leave it out with ignore_keys={part!r}"
            )


def warn_of_forgotten(opened: OpenTag, request: LoadRequest, filtered: Filter) -> None:
    """Warn of saved parts that a load with an optimizer, most likely a resume, does not ask for."""
    objects = {"scheduler": request.scheduler, "rank_content": request.options.rank_content}
    saved = [part for part, live in objects.items() if live is None and getattr(opened.parts, part)]
    left = [part for part in saved if not filtered.covers(part)]
    if left and request.optimizer and request.reports_progress:
        logger.warning(
            "%s: nothing was passed for %s, which the tag holds: it is not loaded. If this run goes on, pass %s; "
            "otherwise ignore_keys=%s says that it is left out on purpose",
            opened.where,
            " and ".join(left),
            " and ".join(f"{part}=" for part in left),
            left,
        )


_PARTS = ("model", "optimizer", "scheduler", "user_content", "rank_content")


def _parts_text(parts: Any) -> str:
    """List the parts of a tag."""
    names = [name for name in _PARTS if getattr(parts, name)]
    return ", ".join(names) or "nothing"


def check_scheduler(live: Any, saved: Any, where: str) -> None:
    """Raise IncompatibleState if other schedulers, or objects of other names, were saved than are live."""
    states = named_states(saved)
    if isinstance(live, NamedObjects) or (states is not None and live is not None and not isinstance(live, dict)):
        names = list(live) if isinstance(live, NamedObjects) else []
        saved_names = list(states or ())
        if sorted(names) != sorted(saved_names):
            objects = "one scheduler, without a name" if states is None else listed(saved_names, ())
            expected = f"state= has {listed(names, ())}" if names else "the live one is one scheduler"
            raise IncompatibleState(
                f"{where} holds the state of {objects}; {expected}. Pass the objects that were saved, by their names, "
                "or leave them out with ignore_keys='scheduler'"
            )
        return
    counts = [len(state) if isinstance(state, (list, tuple)) else None for state in (state_of(live), saved)]
    if live is not None and counts[0] != counts[1]:
        forms = ["one scheduler" if count is None else f"a list of {count}" for count in counts]
        raise IncompatibleState(f"scheduler: {where} holds {forms[1]}, the live one is {forms[0]}; pass the same form")


def warn_of_other_shares(live: Any, saved: Any, opened: OpenTag, topology: Topology) -> None:
    """Warn of data loaders among objects by name if other ranks may share the data than at the save."""
    saved_dp = opened.topology.dp
    for name, one in live.items() if isinstance(live, NamedObjects) and saved_dp != topology.dp else ():
        if is_of_share(one, saved[OBJECTS][name]):
            logger.warning(
                "%s: state[%r] is the position of a %s, saved by %d ranks that may share the data, and loaded by %d: "
                "if it counts the samples of one rank's share, some are lost or read twice now. capture_data_position()"
                " of an ElasticSampler or of DataStreams in rank_content= fits any number of ranks",
                opened.where, name, type(one).__name__, saved_dp, topology.dp,
            )  # fmt: skip


_TORCHS = ("torch.optim.lr_scheduler", "torch.optim.swa_utils", "torch.amp.grad_scaler")
"""Modules whose ``load_state_dict`` does no more than to take the state."""

_OPTIONS = (
    *("step_size", "milestones", "gamma", "factor", "start_factor", "end_factor", "total_iters", "power", "T_max"),
    *("eta_min", "T_0", "total_steps", "max_lrs", "patience", "anneal_epochs", "lr_lambdas", "_milestones"),
)
"""Options of torch's schedulers in their states, by which their classes are told apart."""

_KINDS: dict[str, Any] = {
    "a tensor": (*TENSORS, TensorReference),
    "a dict": Mapping,
    "a list": (list, tuple),
    "text": str,
    "a number": (bool, int, float),
}


def require_kinds(
    live: Mapping[str, Any], saved: Mapping[str, Any], where: str, refused: type[CheckpointError]
) -> None:
    """Raise ``refused`` for a name of the model under which another kind of value was saved than the live one is.

    Extra state of a module may be None, or an object of its own, in either.
    """
    for name, value in saved.items():
        if name not in live or (isinstance(value, TENSORS) and isinstance(live[name], TENSORS)):  # as nearly all are
            continue
        expected = _kind_of(live[name])
        found = _kind_of(value)
        if expected is not None and found not in (None, expected):
            raise refused(f"{where}: model/{name} was saved as {found}, {shown(value)}; the live one is {expected}")


def _kind_of(value: Any) -> str | None:
    return next((kind for kind, types in _KINDS.items() if isinstance(value, types)), None)


def require_taken(live: Any, saved: Any, where: str, refused: type[CheckpointError]) -> None:
    """Raise ``refused`` unless torch's own schedulers and scalers, among those to load, take their saved states.

    They take them once, and get back what they had, before the load changes anything. Code of others takes its state
    once, at the end: nothing is known of what else it does then.
    """
    if isinstance(live, NamedObjects):
        for name, one in live.items():
            require_taken(one, saved[OBJECTS][name], where, refused)
    elif isinstance(live, (list, tuple)):
        for one, state in zip(live, saved, strict=True):
            require_taken(one, state, where, refused)
    elif getattr(getattr(type(live), "load_state_dict", None), "__module__", None) in _TORCHS:
        _check_class(live, saved, where, refused)
        attributes = dict(vars(live))
        before = deepcopy(live.state_dict())
        try:
            live.load_state_dict(deepcopy(saved))
            if saved and not before:
                raise ValueError("it is disabled, and keeps no state")
        except Exception as error:
            raise refused(
                f"scheduler: the live {type(live).__name__} does not take the state in {where}, {shown(saved)} "
                f"({type(error).__name__}: {error}). Pass one of the class that was saved, or leave it out with "
                "scheduler=None"
            ) from error
        finally:
            with suppress(Exception):  # nested ones may have taken theirs
                live.load_state_dict(before)
            vars(live).clear()
            vars(live).update(attributes)
    elif isinstance(live, dict) and not isinstance(saved, (Mapping, NoneType)):
        raise refused(f"scheduler: {where} holds {shown(saved)}, expected a dict")


def _check_class(live: Any, saved: Any, where: str, refused: type[CheckpointError]) -> None:
    """Raise ``refused`` if the options of one of torch's schedulers, or of those inside it, were not saved."""
    if not isinstance(saved, Mapping) or type(live).__module__ not in _TORCHS:
        return
    own_options, saved_options = (
        [option for option in _OPTIONS if option in state] for state in (live.state_dict(), saved)
    )
    inner = getattr(live, "_schedulers", [])
    inside = saved.get("_schedulers")
    states = inside if isinstance(inside, list) else []
    if (own_options, len(inner)) != (saved_options, len(states)):
        raise refused(
            f"scheduler: the live {type(live).__name__} does not take the state in {where}: it has "
            f"{listed(own_options, ())} and {len(inner)} schedulers inside, that of the save "
            f"{listed(saved_options, ())} and {len(states)}. Pass one of the class that was saved, or leave it out "
            "with scheduler=None"
        )
    for one, state in zip(inner, states, strict=True):
        _check_class(one, state, where, refused)


def keeps_rates(live: Any) -> bool:
    """Return whether a scheduler, or one of several objects, may store learning rates by param group."""
    if isinstance(live, NamedObjects):
        return any(hasattr(one, "optimizer") for one in live.values())
    return live is not None


def load_scheduler(live: Any, saved: Any) -> None:
    """Load a scheduler, a list of them, or a dict that is filled with its state."""
    if isinstance(live, NamedObjects):
        for name, one in live.items():
            load_scheduler(one, saved[OBJECTS][name])
    elif isinstance(live, dict):
        live.clear()
        live.update(saved or {})
    elif isinstance(live, (list, tuple)):
        for scheduler, state in zip(live, saved, strict=True):
            load_scheduler(scheduler, state)
    else:
        try:
            with as_called():
                live.load_state_dict(saved)
        except CheckpointError:
            raise
        except Exception as error:
            raise IncompatibleState(
                f"scheduler: the live {type(live).__name__} does not take the saved state, {shown(saved)} "
                f"({type(error).__name__}: {error})"
            ) from error


def part_names(
    opened: OpenTag, topology: Topology, filtered: Filter, *, scheduler: bool, rank_content: bool
) -> Iterator[str]:
    """Yield the names of the tag's content beside model and optimizer, of single ranks' content, and of parts to load.
    """
    parts = opened.parts
    covers = filtered.covers
    yield from map(filtered_name, opened.per_rank)
    if parts.scheduler or scheduler:
        yield "scheduler"
    if parts.user_content:
        yield "user_content"
        content = None if covers("user_content") else opened.user_content()
        yield from (f"user_content/{key}" for key in (content if isinstance(content, dict) else ()))
    if parts.rank_content or rank_content:
        yield "rank_content"
    if parts.rank_content:
        reads_own = rank_content and not covers("rank_content")
        own = _own_or_positions(opened, topology) if reads_own else {}
        yield from (f"rank_content/{key}" for key in own)
        if not own or any(map(is_random_state, own.values())):
            yield RANDOM_STATE  # another rank may have one


def own_content(opened: OpenTag, topology: Topology, filtered: Filter, *, warns: bool) -> dict[Any, Any]:
    """Return the content that this rank saved for itself; on other sizes the merged data positions of all ranks.

    ``warns``: this rank says so for all.

    Raises IncompatibleState for content that is no dict, and for positions that cannot be re-split and are not left
    out.
    """
    if _same_ranks(opened, topology):
        return _own(opened, topology.rank)
    if warns:
        logger.warning(
            "%s was saved on %s: on %s, with other ranks, only data positions are loaded into rank_content=. "
            "open_checkpoint(...).rank_content(rank) returns each rank's",
            opened.where,
            opened.topology.describe(),
            topology.describe(),
        )
    positions = {key: of for key, of in _positions(opened).items() if not filtered.covers(f"rank_content/{key}")}
    return {key: merge_positions(of, f"{opened.where}: rank_content[{key!r}]") for key, of in positions.items()}


def positions_together(opened: OpenTag) -> tuple[dict[Any, Position], list[str]]:
    """Return the merged data positions of all ranks by key, and why others cannot be merged.

    There are none if a rank's file is damaged or lost, or holds more than plain data: it may have held part of each.
    """
    merged: dict[Any, Position] = {}
    problems: list[str] = []
    try:
        positions = _positions(opened) if opened.parts.rank_content else {}
    except (CorruptCheckpoint, PartLost, UnsafePickle) as error:
        return {}, [f"the data positions of all ranks, if there are any: {error}"]
    for key, of in positions.items():
        try:
            merged[key] = merge_positions(of, f"{opened.where}: rank_content[{key!r}]")
        except IncompatibleState as error:
            problems.append(str(error))
    return merged, problems


def _own_or_positions(opened: OpenTag, topology: Topology) -> dict[Any, Any]:
    """Return the content as `own_content` does, except that positions are not merged."""
    return _own(opened, topology.rank) if _same_ranks(opened, topology) else _positions(opened)


def _same_ranks(opened: OpenTag, topology: Topology) -> bool:
    return opened.topology.sizes == topology.sizes


def _own(opened: OpenTag, rank: int) -> dict[Any, Any]:
    try:
        content = opened.rank_content(rank)
    except PartLost:
        raise
    except PartNotFound:
        return {}  # other ranks saved some
    if not isinstance(content, dict):
        raise IncompatibleState(
            f"{opened.where}: rank_content= fills a dict, but rank {rank} saved a {type(content).__name__}; "
            f"read it with open_checkpoint(...).rank_content({rank})"
        )
    return content


def _positions(opened: OpenTag) -> dict[Any, dict[int | None, Position]]:
    """Return the data positions that ranks saved, by their key and data-parallel rank.

    The first data-parallel rank of each stage and tensor-parallel rank shows the keys; of the others no more are read
    than needed.
    """
    positions: dict[Any, dict[int | None, Position]] = {}
    sizes = opened.topology
    first_ranks = [sizes.rank_of(Coordinates(pp, 0, tp)) for pp in range(sizes.pp) for tp in range(sizes.tp)]
    own = (sizes.rank_of(Coordinates(dp_rank=dp_rank)) for dp_rank in range(sizes.dp))
    for number, rank in enumerate(dict.fromkeys([*first_ranks, *own, *range(sizes.world_size)]), start=1):
        try:
            content = opened.rank_content(rank)
        except PartLost:
            raise
        except PartNotFound:
            continue  # this rank saved nothing
        for key, value in content.items() if isinstance(content, dict) else ():
            if is_data_position(value):
                check_position(value, f"{opened.where}: rank_content[{shown(key)}] of rank {rank}")
                positions.setdefault(key, {}).setdefault(value["dp_rank"], value)
        if number >= len(first_ranks) and all(map(is_complete, positions.values())):
            break
    return positions


def lacks_scheduled_rates(opened: OpenTag) -> bool:
    """Return whether the optimizer's learning rates in this tag may be those of the step before the scheduler's."""
    from_nxd = opened.manifest is None or opened.manifest.is_converted
    experts = opened.topology.ep > 1 and opened.parts.optimizer not in (None, "plain")
    return from_nxd and experts and opened.parts.scheduler


def with_scheduled_rates(tree: dict[str, Any], scheduler: Any) -> dict[str, Any]:
    """Return an optimizer's ``tree`` with the learning rates in the ``scheduler``'s state dict, if it has them."""
    groups = tree["param_groups"]
    rates = _rates(scheduler)
    if len(groups) == 2 * len(rates):  # experts have groups of their own
        rates = [*rates, *rates]
    if len(groups) != len(rates):
        logger.warning("learning rates are those of the last step, as NxD saves them: the scheduler's state has none")
        return tree
    if scheduler.get("cycle_momentum"):
        logger.warning("the momentum that the scheduler cycles is that of the last step, as NxD saves it")
    return {**tree, "param_groups": list(map(_with_rate, groups, rates))}


def _rates(scheduler: Any) -> list[float]:
    """Return the scheduler's rate of each param group; none if its state has no rates."""
    last = scheduler.get("_last_lr") if isinstance(scheduler, Mapping) else None
    numbers = [rate.item() if isinstance(rate, torch.Tensor) and rate.numel() == 1 else rate for rate in last or ()]
    return numbers if all(isinstance(number, (int, float)) for number in numbers) else []


def _with_rate(group: dict[str, Any], rate: float) -> dict[str, Any]:
    return {**group, "lr": rate} if "lr" in group else group
