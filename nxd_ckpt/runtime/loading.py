"""Loading: validate everything on all ranks, agree, then change live state; model before optimizer.

The optimizer comes second because shards without saved master weights are cut from the model's *loaded* parameters.
Nothing is kept in memory between the two phases but where the bytes lie: what is verified first is read again then,
mostly from the page cache, and compared again. With ``verify="reading"`` there is the second phase only. Data-parallel
replicas, which want the same model, share the proving, and where storage is slow the reading.
"""

from __future__ import annotations

import gc
import logging
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch

from nxd_ckpt.adapters import torch_xla
from nxd_ckpt.adapters.random_state import is_random_state
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import (
    CheckpointError,
    CheckpointNotFound,
    CorruptCheckpoint,
    IncompatibleState,
    OptimizerMismatch,
    PartNotFound,
    RanksDisagree,
)
from nxd_ckpt.formats.tensors import torch_dtype
from nxd_ckpt.layout.hugging_face import is_hugging_face
from nxd_ckpt.runtime.agreement import Agreement, Alone, decided_by_rank0, on_all
from nxd_ckpt.runtime.delivery import Delivery
from nxd_ckpt.runtime.downloading import download, open_cache
from nxd_ckpt.runtime.filters import RANDOM_STATE, Filter, Unmatched, word_of
from nxd_ckpt.runtime.load_hugging_face import load_hugging_face
from nxd_ckpt.runtime.load_options import LoadOptions
from nxd_ckpt.runtime.load_trees import open_source
from nxd_ckpt.runtime.opening import OpenTag, choose_tag, open_complete_tag
from nxd_ckpt.runtime.overwriting import fill_model, nbytes_of, overwriting
from nxd_ckpt.runtime.progress import is_watched, report, watched
from nxd_ckpt.runtime.reading import Leaf
from nxd_ckpt.runtime.renamed_tag import RenamedTag
from nxd_ckpt.runtime.replicas import WORTH_IT, Broadcast, Shares, agree_on_shares, open_broadcast
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.cached import CachedStorage

logger = logging.getLogger("nxd_ckpt")

_MEASURED = 64 * 2**20
"""Bytes that are read to learn how fast reading is."""


def load(
    storage: Storage,
    topology: Topology,
    agreement: Agreement | None,
    tag: str | None,
    model: Any,
    optimizer: Any,
    scheduler: Any,
    options: LoadOptions,
    timeout: float,
) -> Any:
    """Load what is not None, and return the user content or None. See Checkpointer.load."""
    agreement = agreement or Alone()
    started = time.monotonic()
    asked = agreement.gather([tag, word_of(options)])
    chosen: str | None = decided_by_rank0(agreement, lambda: _tag_at(storage, _same_on_all(asked or [[tag, {}]])))
    if chosen is None:
        load_hugging_face(storage, topology, agreement, model, (optimizer, scheduler), options)
        return None

    def prepare() -> _Prepared:
        options.validate()
        settled = options.settled(reads_are_cheap=storage.renames)
        cache = None
        if options.pre_download:
            cache = caches.enter_context(open_cache(storage, chosen, options.work_dir))
        with _garbage_left():
            opened = open_complete_tag(cache or storage, chosen, trust_pickle=options.trust_pickle)
            prepared = _Prepared(opened, topology, model, optimizer, scheduler, settled, cache)
            if not prepared.filtered:
                prepared.find()
            return prepared

    with ExitStack() as caches:
        prepared = on_all(agreement, prepare)
        if prepared.filtered:
            unmatched = on_all(agreement, prepared.apply_filter)
            unmatched.complain(agreement, topology, options.strict)
            on_all(agreement, prepared.find)
        prepared.told = agreement.rank == 0
        with prepared.reader:
            prepared.share(agreement)
            on_all(agreement, prepared.verify)
            prepared.join(agreement, timeout)
            on_all(agreement, prepared.apply)
    if prepared.told and logger.isEnabledFor(logging.INFO):
        report("loaded", prepared.where, prepared.nbytes, started)
    return prepared.user_content


class _Prepared:
    """A load whose objects and trees, once :meth:`find` found them, fit. When its bytes are proved too, :meth:`apply`
    only copies.

    ``told`` says that this rank shows progress for all.
    """

    told = False

    def __init__(
        self,
        opened: OpenTag,
        topology: Topology,
        model: Any,
        optimizer: Any,
        scheduler: Any,
        options: LoadOptions,
        cache: CachedStorage | None,
    ) -> None:
        self.filtered = Filter(options)
        if self.filtered.renaming:
            opened = RenamedTag(opened, self.filtered.renaming)
            options = self.filtered.renamed(options)
        self._opened, self._topology, self._options, self._cache = opened, topology, options, cache
        self._given = {"model": model, "optim": optimizer, "scheduler": scheduler}
        if not self.filtered:
            _demand(opened, **self._wanted)
        self._source = open_source(opened, topology, model, optimizer, options, self.filtered)

    def apply_filter(self) -> Unmatched:
        """Find out what the filter is about; what is about nothing is for all ranks to say."""
        opened, filtered = self._opened, self.filtered
        live = self._source.live_names()
        names = list(dict.fromkeys([*self._source.names(), *self._part_names()]))
        filtered.choose(names)
        _demand(opened, **self._wanted)
        saved = opened.saved_names if isinstance(opened, RenamedTag) else ()
        return Unmatched(filtered, live, saved, names)

    @property
    def _wanted(self) -> dict[str, Any]:
        """What was given and is not left out."""
        return {part: None if self.filtered.covers(part) else value for part, value in self._given.items()}

    def find(self) -> None:
        """Find the trees to load, and what else there is to load."""
        opened, options = self._opened, self._options
        self._scheduler = self._wanted["scheduler"]
        self.filtered.refuse_collisions(self._source.live_names() or ())
        self._trees = self._source.trees()
        if self._scheduler is not None and self._trees.is_regrouped:
            raise OptimizerMismatch(
                f"optimizer: its param groups are not those of {opened.where} in their order, by which the scheduler "
                "keeps learning rates; build them as when it was saved, or load with scheduler=None"
            )
        self._scheduler_state = opened.scheduler() if self._scheduler is not None else None
        content = None if self.filtered.covers("user_content") else opened.user_content()
        self.user_content = self.filtered.pruned("user_content", content)
        wants_own = options.rank_content is not None and not self.filtered.covers("rank_content")
        self._rank_content = self._own_content() if wants_own else None
        self.reader = opened.reader()
        self._delivery = Delivery(self.reader, self._read_into)
        self._shares: Shares | None = None
        self._broadcast: Broadcast | None = None

    def share(self, agreement: Agreement) -> None:
        """Find out what the data-parallel replicas have in common; all ranks at once."""
        if agreement.world_size > 1:
            shares = Shares(self._topology, list(self._trees.replicated_leaves()))
            # What decides which leaves are proved, and in which order they are read.
            adapters = [type(adapter).__name__ for adapter in (self._trees.model, self._trees.optimizer)]
            terms = [self._options.verify, self._options.pre_download, *adapters]
            agreed = agree_on_shares(agreement, shares, terms)
            # Copies on a local disk are this host's own: nobody else has proved or can read them.
            self._shares = shares if agreed and self._cache is None else None

    def verify(self) -> None:
        """Prove every byte that will be loaded, before anything changes; of shared leaves, this rank's share.

        With ``pre_download``, the files that are needed are brought first.
        """
        if self._cache is not None:
            needed = (leaf for _, leaf in self._trees.leaves())
            download(self._cache, self._opened, needed, told=self.told, progress=self._options.progress)
        if not self._options.verifies_first:
            return
        leaves = self._trees.leaves()
        mine = [one for one in leaves if self._shares is None or self._shares.is_proved_here(one[1])]
        try:
            with self._watched("verify", (leaf for _, leaf in mine)), _garbage_left():
                for name, leaf in mine:
                    self.reader.prove(leaf, name)
                self.reader.finish()
        except CorruptCheckpoint as error:
            if self._cache is None:
                raise
            self._cache.discard()
            raise type(error)(f"{error}. The local copies were removed: load again to download them anew") from error

    @property
    def where(self) -> str:
        return self._opened.where

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that this rank loads."""
        return sum(nbytes_of(leaf) for _, leaf in self._trees.leaves())

    def _watched(self, what: str, leaves: Iterable[Leaf]) -> AbstractContextManager[None]:
        """A bar of these leaves, on the rank that tells."""
        if not (self.told and self._options.progress and is_watched()):
            return nullcontext()  # without adding up all leaves
        done = self.reader.done
        before = done.nbytes
        return watched(what, sum(map(nbytes_of, leaves)), lambda: done.nbytes - before, True)

    def join(self, agreement: Agreement, timeout: float) -> None:
        """Join the replicas for a broadcast, if they are to share the reading as well; all ranks at once."""
        if self._shares is not None:
            wanted = self._options.share_reads
            rate = self._read_rate(self._shares) if wanted is None else math.inf
            self._broadcast = open_broadcast(agreement, self._shares, wanted, rate, timeout)

    def _read_rate(self, shares: Shares) -> float:
        """Bytes per second of reading what another replica proved: from the page cache, if that one is on this host."""
        nbytes, started = 0, time.monotonic()
        if shares.nbytes < WORTH_IT:
            return math.inf
        try:
            for name, leaf in self._trees.replicated_leaves():
                if nbytes < _MEASURED and not shares.is_proved_here(leaf):
                    out = torch.empty(leaf.shape, dtype=torch_dtype(leaf.dtype))
                    self.reader.read_into(leaf, out, name, compare=False)
                    nbytes += out.nbytes
            self.reader.finish()
        except (CheckpointError, OSError):
            return math.inf  # who reads it for good will say so
        return nbytes / max(time.monotonic() - started, 1e-9) if nbytes else math.inf

    def apply(self) -> None:
        """Change the live objects. Replicas part afterwards, also where it fails: none may wait for this rank then."""
        with (
            self._broadcast or nullcontext(),
            overwriting(self.where),
            self._watched("load", (leaf for _, leaf in self._trees.leaves())),
        ):
            self._fill()

    def _fill(self) -> None:
        model, optimizer = self._trees.model, self._trees.optimizer
        if model is not None:
            with _garbage_left():
                fill_model(model, self._trees.names, self._trees.model_tree, self._delivery)
            self._delivery.finish()
        if optimizer is not None:
            with _garbage_left():
                if self._trees.optimizer_tree:
                    optimizer.load(self._trees.optimizer_tree, self._delivery, self._trees.keeps)
                else:
                    optimizer.follow(self._trees.keeps)
            self._delivery.finish()
        if isinstance(self._scheduler, dict):
            self._scheduler.clear()
            self._scheduler.update(self._scheduler_state or {})
        elif self._scheduler is not None:
            self._scheduler.load_state_dict(self._scheduler_state)
        if self._options.rank_content is not None and self._rank_content is not None:
            live, saved = self._options.rank_content, self._rank_content
            content = self.filtered.pruned("rank_content", saved) | self.filtered.kept("rank_content", live, saved)
            live.clear()
            live.update(content)
        # Constants that the model made on the device are pending in a new process. Left to the first step, they would
        # make its graph another than the uninterrupted run's: a whole step compiled for one use, and rounded otherwise.
        torch_xla.sync()

    def _part_names(self) -> Iterator[str]:
        """What the tag holds, or is to be loaded, beside model and optimizer."""
        parts, covers = self._opened.parts, self.filtered.covers
        if parts.scheduler or self._given["scheduler"] is not None:
            yield "scheduler"
        if parts.user_content:
            yield "user_content"
            content = None if covers("user_content") else self._opened.user_content()
            yield from (f"user_content/{key}" for key in (content if isinstance(content, dict) else ()))
        if parts.rank_content:
            yield "rank_content"
            known = self._options.rank_content is not None and not covers("rank_content")
            content = self._own_content() if known else {}
            yield from (f"rank_content/{key}" for key in content)
            if not content or any(map(is_random_state, content.values())):
                yield RANDOM_STATE  # that of a rank whose content is not read may be there

    def _own_content(self) -> dict[Any, Any]:
        saved, rank = self._opened.topology, self._topology.rank
        if saved.sizes != self._topology.sizes and self._opened.parts.rank_content:
            logger.warning(
                "%s was saved on %s: rank_content= stays empty on %s, where no rank is one of those. "
                "open_checkpoint(...).rank_content(rank) gives what each saved",
                self._opened.where,
                saved.describe(),
                self._topology.describe(),
            )
            return {}
        content = self._opened.rank_content(rank)
        if not isinstance(content, dict):
            raise IncompatibleState(
                f"{self._opened.where}: rank_content= fills a dict, but rank {rank} saved a {type(content).__name__}; "
                f"read it with open_checkpoint(...).rank_content({rank})"
            )
        return content

    def _read_into(self, leaf: Leaf, out: torch.Tensor) -> None:
        """Begin to fill ``out``; where replicas share the reading, all of them at once, and at once."""
        owner = None if self._shares is None or self._broadcast is None else self._shares.owner(leaf)
        if self._broadcast is None or owner is None:
            self._begin(leaf, out)
        else:
            self._broadcast.fill(out, owner, partial(self._read_now, leaf, out))

    def _read_now(self, leaf: Leaf, out: torch.Tensor) -> None:
        self._begin(leaf, out)
        self.reader.finish()

    def _begin(self, leaf: Leaf, out: torch.Tensor) -> None:
        compare, proved = self._options.verify is not False, self._options.verifies_first
        self.reader.read_into(leaf, out, self._trees.name_by_leaf[id(leaf)], compare=compare, proved=proved)


@contextmanager
def _garbage_left() -> Iterator[None]:
    """No garbage collection inside: walking all objects again and again while thousands of new ones are made, none of
    them garbage, takes longer than making them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _tag_at(storage: Storage, tag: str | None) -> str | None:
    """The tag to load; None where there is none, but a Hugging Face directory. Raises as :func:`choose_tag`."""
    try:
        return choose_tag(storage, tag)
    except CheckpointNotFound:
        if tag is None and is_hugging_face(storage):
            return None
        raise


def _demand(opened: OpenTag, model: Any, optim: Any, scheduler: Any) -> None:
    """Raise PartNotFound for what is asked for, but was never saved."""
    parts = opened.parts
    for wanted, held, name in (
        (model is not None, parts.model, "model"),
        (optim is not None, parts.optimizer is not None, "optimizer"),
        (scheduler is not None, parts.scheduler, "scheduler"),
    ):
        if wanted and not held:
            raise PartNotFound(
                f"{opened.where} was saved without {name}; it holds {parts_held(parts)}. "
                f"Load it with {name}=None, or choose another tag"
            )


def _same_on_all(asked: Sequence[Sequence[Any]]) -> str | None:
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
    return cast("str | None", first)


def parts_held(parts: Any) -> str:
    """What a tag holds, in words."""
    held = [name for name in ("model", "optimizer", "scheduler", "user_content") if getattr(parts, name)]
    return ", ".join(held) or "nothing"
