"""Loading: validate everything on all ranks, agree, then change live state; model before optimizer.

The optimizer comes second because shards without saved master weights are cut from the model's *loaded* parameters.
Between the two phases only the places of the bytes are kept in memory: verified bytes are read again,
mostly from the page cache, and compared again. With ``verify="reading"`` there is the second phase only. Replicas,
which load the same model or the same shards of it, share the verifying, and if storage is slow the reading.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from types import NoneType
from typing import Any, NamedTuple, cast

from nxd_ckpt import effects
from nxd_ckpt.coordination.agreement import Agreement, decided_by_rank0, on_all
from nxd_ckpt.core.tags import Tag, narrowed, step_of, validate_tag
from nxd_ckpt.effects import logger
from nxd_ckpt.errors import (
    CheckpointNotFound,
    CorruptCheckpoint,
    InvalidArgument,
    PartLost,
    RanksDisagree,
    TagReplaced,
)
from nxd_ckpt.hugging_face.mappings import find_mapping
from nxd_ckpt.live.parameters import refuse_fake_mode
from nxd_ckpt.loading.collective_checks import filter_summary
from nxd_ckpt.loading.load_attempt import LoadAttempt, PreparedLoad, open_cache
from nxd_ckpt.loading.options import LoadRequest
from nxd_ckpt.loading.overwriting import overwriting
from nxd_ckpt.loading.retries import LoadRetries
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.progress import report
from nxd_ckpt.surroundings import gc_paused
from nxd_ckpt.tag.choosing import ByPath, Opens, around, find_by_path, open_complete_tag, with_given_model
from nxd_ckpt.tag.identity import of_latest, require_one_save
from nxd_ckpt.tag.opened import OpenTag
from nxd_ckpt.tag.union import TagSource, choose_nearest


class Loaded(NamedTuple):
    """A tag that was loaded, None for a Hugging Face directory, and its user content."""

    tag: str | None = None
    user_content: Any = None

    @property
    def step(self) -> int:
        """The number in the tag's name, else "steps" or "step" of the user content. Raises InvalidArgument."""
        content = self.user_content if isinstance(self.user_content, Mapping) else {}
        numbers = [None if self.tag is None else step_of(self.tag), content.get("steps"), content.get("step")]
        step = next((n for n in numbers if isinstance(n, int) and not isinstance(n, bool)), None)
        if step is None:
            raise InvalidArgument(
                f"tag {self.tag!r} was loaded, but there is no number in its name, and no 'steps' or 'step' in its "
                "user content: use load(), and take the step from where it was saved"
            )
        return step


def load(storages: Sequence[Storage], tag: Tag | None, request: LoadRequest) -> Loaded:
    """Load ``tag``, or the latest, into live objects. Collective.

    ``storages`` are the places that may have the tag, the nearest first. See `Checkpointer.load`.
    """
    agreement = request.agreement
    requests = agreement.gather([tag, filter_summary(request.options), request.asked()])
    values = request.options.tag_values

    def agreed() -> Tag | None:
        common = _common_tag(requests or [])
        _warn_of_ranks_that_ask_for_less([asked for _, _, asked in requests or ()])
        return common if values is None else narrowed(common, values)

    agreed_tag: Tag | None = decided_by_rank0(agreement, agreed)

    retries = LoadRetries(storages, request, unnamed=agreed_tag is None)
    objects = (request.model, request.optimizer, request.scheduler)
    empty = [target for target in objects if isinstance(target, dict) and not target]

    def read() -> Loaded:
        before = retries.number
        for target in empty:  # an earlier try may have filled it from a tag that was given up
            target.clear()
        # If the tag is removed while it is loaded, the next one is loaded over it; there may be none.
        with overwriting(storages[0].url) if request.touched else nullcontext():
            loaded = read_tag()
        return loaded if retries.number == before else read()

    def read_tag() -> Loaded:
        """Load a tag. What is returned counts for nothing if that failed, and there is another try."""
        chosen = decided_by_rank0(agreement, lambda: _checkpoint_at(request, storages, agreed_tag, retries))
        decided = _Decision(*chosen)
        if decided.by_path is not None:
            inside, _ = around(storages[0], agreed_tag, request.place)
            return _load_by_path(inside, ByPath(*decided.by_path), request)
        source = retries.source(TagSource(*decided.source))
        try:
            loaded = one_load(source.open(storages), source, request)
        except Exception as error:  # all ranks get here: the one with the error raises it unchanged
            retries.failed(source, error)
            return Loaded()
        if retries.unfit and agreement.rank == 0:
            logger.warning("%s was loaded, not the latest tag: %s", loaded.where, retries.skipped)
        return Loaded(source.tag, loaded.user_content)

    # A named tag may also be on another tier when it is removed from the nearest.
    return of_latest(agreed_tag is None or len(storages) > 1, read)


def one_load(
    storage: Storage, source: TagSource, request: LoadRequest, opens: Opens = open_complete_tag
) -> PreparedLoad:
    """Load the tag of ``source`` through ``storage``; see "One load" in docs/architecture.md. Collective.

    Live objects stay as they are until all ranks have agreed.
    """
    agreement = request.agreement
    started = effects.monotonic()
    with ExitStack() as caches:
        # 1. Open: the same save on every rank.
        attempt = on_all(agreement, partial(_opened, storage, source, request, opens, caches))
        _require_one_save(agreement, attempt)
        # 2. Plan: which names are loaded, by the filters of all ranks.
        if attempt.filtered:
            on_all(agreement, attempt.apply_filter).complain(request)
            on_all(agreement, attempt.compare_names)
        # 3. Compare: names first, then forms and param groups.
        attempt.judge_names()
        load = on_all(agreement, attempt.prepare)
        load.judge_parameters()
        with load.reader:
            # 4. Verify: replicas share the bytes. 5. Agree: an error of one rank is raised on all.
            load.share()
            on_all(agreement, load.verify)
            load.join()
            # 6. Apply, and prove what the live objects hold.
            request.touched.append(source.tag)
            on_all(agreement, load.apply)
    if request.reports_progress and logger.isEnabledFor(logging.INFO):
        report("loaded", load.where, load.nbytes, started)
    return load


def _opened(storage: Storage, source: TagSource, request: LoadRequest, opens: Opens, caches: ExitStack) -> LoadAttempt:
    """Open the tag. Names are compared at once unless filters of other ranks count. ``caches`` outlive the load."""
    refuse_fake_mode()
    options = request.options
    cache = None
    if options.mapping is not None:  # it has no effect on a tag, but a typo in it has one elsewhere
        find_mapping(options.mapping, {})
    settled = replace(request.settled(), options=options.settled(reads_are_cheap=storage.renames))
    if options.pre_download:
        cache = caches.enter_context(open_cache(storage, source.tag, options.work_dir))
    with gc_paused():
        opened = opens(cache or storage, source.tag, trust_pickle=options.trust_pickle)
        _require_attempt(opened, source.attempt)
        if request.model is not None:
            opened = with_given_model(opened, options.verify is not False and request.agreement.rank == 0)
        with opened.guarded(verified=opened.is_one_save):  # else it is looked at once more when all is prepared
            attempt = LoadAttempt(opened, settled, cache)
            if not attempt.filtered:
                attempt.compare()
            return attempt


def _load_by_path(storage: Storage, found: ByPath, request: LoadRequest) -> Loaded:
    require_same_save(request.agreement, f"{storage.url}/{found.key}")
    if request.options.pre_download:
        where = f"{storage.url}/{found.key}"
        raise InvalidArgument(f"{where} was named by its path: pre_download= is for the tags of a directory")
    opens = partial(found.open, tells=request.agreement.rank == 0)
    loaded = one_load(storage, TagSource(found.key, [0]), request, opens)
    return Loaded(None if found.is_weights else found.key, loaded.user_content)


def _require_attempt(opened: OpenTag, attempt: str | None) -> None:
    """Raise TagReplaced unless the tag is of the attempt whose files were searched."""
    if attempt is not None and (opened.manifest is None or opened.manifest.attempt != attempt):
        raise TagReplaced(f"{opened.where} was replaced by another save while it was read; read it again")


class _Decision(NamedTuple):
    """The checkpoint to load: a tag of the places, or the one that the path itself names. Both are JSON."""

    source: Sequence[Any]
    by_path: Sequence[Any] | None = None


def _checkpoint_at(
    request: LoadRequest, storages: Sequence[Storage], tag: Tag | None, retries: LoadRetries
) -> _Decision:
    """Return the checkpoint to load, which is not unfit.

    Raises the errors of `choose_nearest` and `find_by_path`, and CorruptCheckpoint if all tags are unfit.
    """
    try:
        return _Decision(choose_nearest(storages, tag, retries.unfit))
    except PartLost:  # there is one, and it is damaged
        raise
    except CheckpointNotFound as error:
        if retries.unfit:
            raise CorruptCheckpoint(
                f"{storages[0].url}: no complete tag is undamaged. {retries.skipped}; restore one from a copy"
            ) from error
        inside, key = around(storages[0], tag, request.place)
        found = find_by_path(inside, key)
        if found is None:
            raise
        if found.key != key and inside.is_file(found.key):
            logger.warning("%s/%s holds no tags: its file %s is loaded", inside.url, key, found.key)
        return _Decision((), found)


def _require_one_save(agreement: Agreement, attempt: LoadAttempt) -> None:
    """Raise, on all ranks, TagReplaced if ranks opened a tag before and after it was replaced; or RanksDisagree.

    If no digest distinguishes two saves, copies on several hosts may have other times: these count as one.
    """
    saves = agreement.gather(attempt.save)
    if decided_by_rank0(agreement, lambda: len(set(saves or ())) > 1):
        on_all(agreement, attempt.require_unchanged)
    require_same_save(agreement, attempt.identity)


def require_same_save(agreement: Agreement, save: str) -> None:
    """Raise RanksDisagree, on all ranks, unless all are about to load the same."""
    saves = agreement.gather(save)
    decided_by_rank0(agreement, partial(require_one_save, saves or ()))


def _common_tag(requests: Sequence[Sequence[Any]]) -> Tag | None:
    """Return the tag that every rank asked for, with the same filters. Raises RanksDisagree, InvalidTag."""
    first, filters, _ = requests[0]
    if not isinstance(first, (str, int, NoneType)):
        validate_tag(first)  # which raises
    for rank, (tag, its_filters, _) in enumerate(requests):
        if tag != first:
            raise RanksDisagree(f"rank 0 loads tag {first!r}, rank {rank} {tag!r}; all ranks must load the same")
        for name in sorted({*filters, *its_filters}):
            if filters.get(name) != its_filters.get(name):
                raise RanksDisagree(
                    f"rank 0 loads with {name}={filters.get(name)}, rank {rank} with {name}={its_filters.get(name)}; "
                    "all ranks must filter alike"
                )
    return cast("Tag | None", first)


def _warn_of_ranks_that_ask_for_less(asked: Sequence[Sequence[str]]) -> None:
    """Warn of parts that some ranks load and others do not: these keep what they have."""
    for part in dict.fromkeys(part for parts in asked for part in parts):
        left = [rank for rank, parts in enumerate(asked) if part not in parts]
        if left:
            logger.warning(
                "the load of %s=: nothing was passed on rank %d, and an object on others. Pass it on all ranks, "
                "unless your program sends it to the others afterwards",
                part,
                left[0],
            )
