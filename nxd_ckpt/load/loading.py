"""Loading: validate everything on all ranks, agree, then change live state; model before optimizer.

The optimizer comes second because shards without saved master weights are cut from the model's *loaded* parameters.
Nothing is kept in memory between the two phases but where the bytes lie: what is verified first is read again then,
mostly from the page cache, and compared again. With ``verify="reading"`` there is the second phase only. Data-parallel
replicas, which want the same model, share the verifying, and where storage is slow the reading.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any, cast

from nxd_ckpt import effects
from nxd_ckpt.coordination.agreement import Agreement, SingleProcessAgreement, decided_by_rank0, on_all
from nxd_ckpt.core.tags import Tag
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import (
    CheckpointNotFound,
    CorruptCheckpoint,
    RanksDisagree,
    TagReplaced,
)
from nxd_ckpt.gc_paused import gc_paused
from nxd_ckpt.load.attempt import LoadAttempt
from nxd_ckpt.load.downloading import open_cache
from nxd_ckpt.load.filter_summary import filter_summary
from nxd_ckpt.load.hugging_face import load_hugging_face
from nxd_ckpt.load.options import LoadOptions
from nxd_ckpt.load.overwriting import overwriting
from nxd_ckpt.load.retries import LoadRetries
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.progress import report
from nxd_ckpt.tag.foreign.hugging_face_directory import is_hugging_face
from nxd_ckpt.tag.identity import of_latest
from nxd_ckpt.tag.nearest import Copy, Source, choose_nearest
from nxd_ckpt.tag.opened import OpenTag
from nxd_ckpt.tag.opening import open_complete_tag

logger = logging.getLogger("nxd_ckpt")


def load(
    storages: Sequence[Storage],
    topology: Topology,
    agreement: Agreement | None,
    tag: Tag | None,
    given: tuple[Any, Any, Any],
    options: LoadOptions,
    timeout: float,
) -> Any:
    """Load what is not None of ``given``, which are model, optimizer and scheduler; the user content or None.

    ``storages`` are the places that may have the tag, the nearest first. See Checkpointer.load.
    """
    agreement = agreement or SingleProcessAgreement()
    started = effects.monotonic()
    asked = agreement.gather([tag, filter_summary(options)])
    wanted: Tag | None = decided_by_rank0(agreement, lambda: _same_on_all(asked or [[tag, {}]]))

    touched: list[str] = []
    tries = LoadRetries(storages, agreement, options, wanted is None, given[1] is not None)
    empty = [one for one in given if isinstance(one, dict) and not one]

    def read() -> Any:
        before = tries.number
        for one in empty:  # what an earlier try put into it is of a tag that was given up
            one.clear()
        # If the tag is removed while it is loaded, the next one is loaded over it; there may be none.
        with overwriting(storages[0].url) if touched else nullcontext():
            content = read_tag()
        return content if tries.number == before else read()

    def read_tag() -> Any:
        """The user content; None too where that failed, and there is another try."""
        decided = decided_by_rank0(agreement, lambda: _tag_at(storages, wanted, tries.damaged))
        if decided is None:
            model, *others = given
            _must_be_one(agreement, storages[0].url)
            load_hugging_face(storages[0], topology, agreement, model, others, options)
            return None
        source = tries.source(Source(*decided))
        try:
            storage = source.open(storages)
            prepared = _load(storage, source, topology, agreement, given, options, timeout, touched)
        except Exception as error:  # the rank that met an error raises it as it is, and is needed here too
            tries.failed(source, error)
            return None
        _say_passed_over(agreement, prepared.where, tries.damaged)
        if prepared.reports_progress and logger.isEnabledFor(logging.INFO):
            report("loaded", prepared.where, prepared.nbytes, started)
        return prepared.user_content

    # A tag that is named may be on another tier, too, when it goes from the nearest.
    return of_latest(wanted is None or len(storages) > 1, read)


def _load(
    storage: Storage,
    source: Source,
    topology: Topology,
    agreement: Agreement,
    given: tuple[Any, Any, Any],
    options: LoadOptions,
    timeout: float,
    touched: list[str],
) -> LoadAttempt:
    """Load the tag of ``source``, which ``storage`` reads. Once live objects change, it is among ``touched``."""
    with ExitStack() as caches:
        prepared = _found(storage, source, topology, agreement, given, options, caches)
        prepared.reports_progress = agreement.rank == 0
        with prepared.reader:
            prepared.share(agreement)
            on_all(agreement, prepared.verify)
            prepared.join(agreement, timeout)
            touched.append(source.tag)
            on_all(agreement, prepared.apply)
    return prepared


def require_fit(
    storage: Storage, topology: Topology, agreement: Agreement, tag: str, given: tuple[Any, Any, Any]
) -> None:
    """Raise what a load of ``tag`` would where live objects are not such as were saved; all ranks at once.

    Reads no tensor, and changes nothing: for a caller that loads several tags, and all or none.
    """
    with ExitStack() as caches:
        found = _found(storage, Source(tag, [0]), topology, agreement, given, LoadOptions(), caches)
        caches.enter_context(found.reader)


def _found(
    storage: Storage,
    source: Source,
    topology: Topology,
    agreement: Agreement,
    given: tuple[Any, Any, Any],
    options: LoadOptions,
    caches: ExitStack,
) -> LoadAttempt:
    """The load of a tag that fits the live objects on all ranks. ``caches`` is closed once it is done."""

    def prepare() -> LoadAttempt:
        options.validate()
        settled = options.settled(reads_are_cheap=storage.renames)
        cache = None
        if options.pre_download:
            cache = caches.enter_context(open_cache(storage, source.tag, options.work_dir))
        with gc_paused():
            opened = open_complete_tag(cache or storage, source.tag, trust_pickle=options.trust_pickle)
            _must_be_of(opened, source.attempt)
            with opened.guarded():
                prepared = LoadAttempt(opened, topology, *given, settled, cache)
                if not prepared.filtered:
                    prepared.find()
            return prepared

    prepared = on_all(agreement, prepare)
    _must_be_one_save(agreement, prepared)
    if prepared.filtered:
        unmatched = on_all(agreement, prepared.apply_filter)
        unmatched.complain(agreement, topology, options.strict)
        on_all(agreement, prepared.find)
    prepared.refuse_unmatched(agreement)
    return prepared


def _must_be_of(opened: OpenTag, attempt: str | None) -> None:
    """Raise TagReplaced unless the tag is of the attempt whose files were looked for."""
    if attempt is not None and (opened.manifest is None or opened.manifest.attempt != attempt):
        raise TagReplaced(f"{opened.where} was replaced by another save while it was read; read it again")


def _tag_at(storages: Sequence[Storage], tag: Tag | None, damaged: Mapping[Copy, str]) -> Source | None:
    """The tag to load, none that is ``damaged``; None where there is none, but a Hugging Face directory.

    Raises as :func:`choose_nearest`, and CorruptCheckpoint where all are damaged.
    """
    try:
        return choose_nearest(storages, tag, damaged)
    except CheckpointNotFound as error:
        if damaged:
            raise CorruptCheckpoint(
                f"{storages[0].url}: no complete tag is undamaged. {_passed_over(damaged)}; restore one from a copy"
            ) from error
        if tag is None and is_hugging_face(storages[0]):
            return None
        raise


def _say_passed_over(agreement: Agreement, where: str, damaged: Mapping[Copy, str]) -> None:
    if damaged and agreement.rank == 0:
        logger.warning("%s was loaded, not the latest tag: %s", where, _passed_over(damaged))


def _passed_over(damaged: Mapping[Copy, str]) -> str:
    return "; ".join(f"{copy.tag!r} is damaged ({why})" for copy, why in damaged.items())


def _must_be_one_save(agreement: Agreement, prepared: LoadAttempt) -> None:
    """Raise, on all ranks, TagReplaced if some opened a tag before it was replaced and others after; or RanksDisagree.

    Where no digest tells two saves apart, copies on several hosts may be of other times: these are one.
    """
    saves = agreement.gather(prepared.save)
    if decided_by_rank0(agreement, lambda: len(set(saves or ())) > 1):
        on_all(agreement, prepared.require_unchanged)
    _must_be_one(agreement, prepared.identity)


def _must_be_one(agreement: Agreement, identity: str) -> None:
    """Raise RanksDisagree, on all ranks, unless what they are about to load is the same."""
    identities = agreement.gather(identity)

    def compare() -> None:
        for rank, other in enumerate(identities or ()):
            if other != identity:
                raise RanksDisagree(
                    f"rank 0 loads {identity}, rank {rank} {other}; all ranks must make the same calls, in the same "
                    "order, and load the same save; what has no manifest of ours, from the same path"
                )

    decided_by_rank0(agreement, compare)


def _same_on_all(asked: Sequence[Sequence[Any]]) -> Tag | None:
    """The tag that every rank asked for, with the same filters. Raises RanksDisagree."""
    first, filters = asked[0]
    for rank, (tag, others) in enumerate(asked):
        if tag != first:
            raise RanksDisagree(f"rank 0 loads tag {first!r}, rank {rank} {tag!r}; all ranks must load the same")
        for name in sorted({*filters, *others}):
            if filters.get(name) != others.get(name):
                raise RanksDisagree(
                    f"rank 0 loads with {name}={filters.get(name)}, rank {rank} with {name}={others.get(name)}; all "
                    "ranks must filter alike"
                )
    return cast("Tag | None", first)
