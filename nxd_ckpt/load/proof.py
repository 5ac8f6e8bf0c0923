"""Proof of a load: live objects, captured again as a save captures them, are what the load meant to put there.

Values are compared as they are, and tensors by digest: by the one in the tag's index, or for a tensor that was put
together by the one of its bytes in that moment, before a live object had them. No file is read again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch

from nxd_ckpt.core.box import Box
from nxd_ckpt.core.findings import Finding, doubt, problem
from nxd_ckpt.core.partition import Piece, zero1_pieces, zero1_shape
from nxd_ckpt.errors import CorruptCheckpoint
from nxd_ckpt.formats.assembly import box_of
from nxd_ckpt.formats.crc32 import crc32
from nxd_ckpt.formats.strides import fitted, stored_stride, stride_of
from nxd_ckpt.formats.tensors import (
    Assembly,
    Path,
    TensorStub,
    allocated,
    byte_view,
    contiguous_stride,
    iter_leaves,
)
from nxd_ckpt.live.dtensor import local_of
from nxd_ckpt.live.load_hooks import is_users_object
from nxd_ckpt.live.model import ModelAdapter
from nxd_ckpt.live.named import NamedObjects, state_of
from nxd_ckpt.live.named_models import open_model
from nxd_ckpt.live.optimizer_dict import DictOptimizer
from nxd_ckpt.live.optimizer_state import OPTIMIZER_NAME, VALUE, OptimizerAdapter, Slot, is_rows
from nxd_ckpt.live.parameters import form_of
from nxd_ckpt.live.state import MASTER_WEIGHTS, State, StateTensor
from nxd_ckpt.live.state_names import parameter_sections, state_entries
from nxd_ckpt.live.torch_xla import is_xla, to_cpu
from nxd_ckpt.live.zero1 import EXPERT_KEYS, MASTERS
from nxd_ckpt.load.live_digests import SMALL, LiveDigests
from nxd_ckpt.load.load_context import LoadContext, live_optimizer
from nxd_ckpt.load.provenance import Provenance
from nxd_ckpt.load.trees import LoadTrees
from nxd_ckpt.reshard.plain_values import ABSENT, equal_values
from nxd_ckpt.tag.reading import Leaf, LeafReader

_SHOWN = 5
"""Differences that an error names."""

_PLAIN = (bool, int, float, complex, str, type(None))

_NOT_OPTIONS = ("params", "param_names", OPTIMIZER_NAME)


Digests = Callable[[Leaf, str], int | None]
"""Returns the CRC-32 of the row-major bytes of a leaf, by its name; None if it was not read."""


def recorded_digest(leaf: Leaf) -> int | None:
    """Return the digest of exactly this tensor, row-major, in the tag; None if it has none."""
    is_whole = isinstance(leaf, TensorStub) and leaf.is_contiguous and leaf.nbytes == leaf.storage.nbytes
    return leaf.storage.crc32 if isinstance(leaf, TensorStub) and is_whole else None


class Witness:
    """Digests of the tensors of a load: those of the tag, and of those that it puts together what it `saw`."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}

    def saw(self, leaf: Leaf, value: torch.Tensor) -> None:
        """Remember a leaf as it was read: a contiguous CPU tensor."""
        if recorded_digest(leaf) is None:
            self._seen[id(leaf)] = crc32(byte_view(value))

    def digest(self, leaf: Leaf, name: str) -> int | None:
        """Return the digest that the live tensor should have; None if the leaf was never read."""
        recorded = recorded_digest(leaf)
        return self._seen.get(id(leaf)) if recorded is None else recorded


class Proof:
    """Comparison of live objects with what a load meant, by ``trees``, the state of a scheduler, and ``digest``.

    ``before`` are the names of state
    that the live objects had before the load; without them strides are not compared. ``nbytes`` counts what was
    compared. ``everything``: also large tensors on devices. ``verify_again`` is called with the first tensor that
    differs from its record in the tag.
    """

    def __init__(
        self,
        context: LoadContext,
        trees: LoadTrees,
        reader: LeafReader,
        digest: Digests,
        *,
        scheduler: Any = None,
        before: Collection[str] | None = None,
        everything: bool = False,
        verify_again: Callable[[Leaf, str], None] | None = None,
    ) -> None:
        self._context, self._trees, self._reader, self._digest = context, trees, reader, digest
        self._scheduler, self._before, self._everything = scheduler, before, everything
        self._verify_again = verify_again
        self._digests = LiveDigests(reader, everything)
        self._findings: list[Finding] = []
        self.nbytes = 0

    def findings(
        self, model: Any, optimizer: Any, scheduler: Any, content: tuple[Any, Any] = (None, None)
    ) -> list[Finding]:
        """Return the differences: problems, and doubts where user code that the load called may explain them.

        ``content`` is what was saved of the rank's content, and the dict that was filled with it.
        """
        self._sees_scheduler = is_users(scheduler)
        live = None
        with self._capturing("model"):
            live = None if model is None else open_model(model)
            self._compare_model(live)
        with self._capturing("optimizer"):
            context = self._context
            if optimizer is not None:
                opened = live_optimizer(context.opened, context.topology, live, optimizer, context.options)
                self._compare_optimizer(opened, opened.capture())
        with self._capturing("scheduler"):
            self._compare_scheduler(scheduler, state_of(scheduler))
        saved, filled = content
        now = dict(iter_leaves(filled))
        for path, value in iter_leaves(self._context.filter.pruned("rank_content", saved or {})):
            if path:
                self._compare("parts", "/".join(map(str, ("rank_content", *path))), value, now.get(path, ABSENT), False)
        self._digests.finish()
        return self._findings

    @contextmanager
    def _capturing(self, part: str) -> Iterator[None]:
        """Context in which a part is captured; an error in that, which may be user code's, proves nothing."""
        try:
            yield
        except CorruptCheckpoint:
            raise
        except Exception as error:
            message = f"it cannot be captured, as a save would have to: {type(error).__name__}: {error}"
            self._find("parts", part, message, True)

    def _find(self, kind: str, name: str, message: str, by_user: bool) -> None:
        self._findings.append((doubt if by_user else problem)(kind, name, message))

    def _compare_model(self, live: ModelAdapter | None) -> None:
        trees = self._trees
        if live is None or not trees.names or trees.model is None:
            return
        aliases, placed = live.aliases, live.placed([name for name in trees.names if name in live.live])
        provenance = Provenance(self._context.opened, self._context.topology, self._reader, aliases)
        specs = live.parameters(self._context.topology.tp)
        for name in trees.names:
            by_user = live.passes_user_code(name)
            if by_user and name not in live.live:
                continue  # under what name its module keeps it, only the module knows
            values = dict(iter_leaves({name: live.live.get(name, ABSENT)}))
            for path, leaf in iter_leaves({name: trees.model_tree[name]}):
                what = "/".join(map(str, ("model", *path)))
                if self._compare("weights", what, leaf, values.get(path, ABSENT), by_user) and path == (name,):
                    about = StateTensor(what, specs.get(name), placed=placed.get(path))
                    self._trace(provenance, self._described(about), leaf, by_user)
            self._compare_stride(f"model/{name}", trees.model_tree[name], live.live.get(name), False)
            if name in trees.model.live and trees.model.aliases(name) != aliases(name):
                message = f"it was one tensor with {trees.model.aliases(name)}, and is one with {aliases(name)} now"
                self._find("ties", f"model/{name}", message, by_user)
        left = {*trees.missing, *trees.left}
        for name in live.missing(trees.names):
            if name not in left and not self._context.filter.ignores_model(name) and not live.passes_user_code(name):
                self._find("weights", f"model/{name}", "the live model has it, and nothing was loaded into it", False)

    def _compare_optimizer(self, optimizer: OptimizerAdapter, state: State) -> None:
        saved, by_user = self._trees.optimizer_tree, optimizer.passes_user_code
        if saved and not isinstance(optimizer, DictOptimizer):
            saved = _as_live(saved, state.tree)
        if saved:
            self._compare_entries(optimizer, state, saved, by_user)
        if self._trees.names or saved:
            self._compare_shards(optimizer, state, saved, by_user)

    def _compare_entries(self, optimizer: OptimizerAdapter, state: State, tree: dict[str, Any], by_user: bool) -> None:
        names = self._trees.names_by_index
        sections = parameter_sections(state.tree)
        now, meant = dict(iter_leaves(state.tree)), dict(iter_leaves(tree))
        entries = dict(state_entries(tree, names))
        aliases = (lambda name: [name]) if self._trees.model is None else self._trees.model.aliases
        provenance = Provenance(self._context.opened, self._context.topology, self._reader, aliases)
        for path, leaf in meant.items():
            is_state = len(path) > 1 and path[0] in sections
            if not _is_compared(path, leaf, now) or (path[0] == MASTERS and MASTERS not in state.tree):
                continue
            name = self._entry_name(path, entries)
            kind = "groups" if path[0] == "param_groups" else "weights" if path[0] == MASTERS else "moments"
            explained = by_user or (kind == "groups" and self._sees_scheduler)
            if self._compare(kind, name, leaf, now.get(path, ABSENT), explained) and is_state:
                about = state.tensors.get(path)
                if about is not None:
                    self._trace(provenance, self._described(about), leaf, by_user)
                    self._compare_stride(name, leaf, now[path], not isinstance(optimizer, DictOptimizer))
        for path, name in state_entries(state.tree, names):
            is_known = path in entries or path[0] == MASTERS or path[2:] == (VALUE,) or self._trees.keeps(name)
            if not is_known and not (path[0] not in tree and by_user):
                self._find("moments", name, "the live optimizer has it, and the tag does not", by_user)
        if not isinstance(optimizer, DictOptimizer):
            for name in provenance.unread([name for name in names if not name.startswith("#")], {*entries.values()}):
                if not (self._context.filter.ignores(name) or name in self._trees.rank_state.absent):
                    self._find("moments", name, "the tag has it, and it was not loaded", by_user)

    @cached_property
    def _partitions(self) -> Mapping[str, Any]:
        return self._context.options.partitions or {}

    def _described(self, about: StateTensor) -> StateTensor:
        """Return the description with the caller's cut of the parameter, if there is one."""
        partition = self._partitions.get(about.name.split("/")[1])  # "model/<name>", "optim/<name>/exp_avg"
        if about.spec is None or partition is None:
            return about
        return replace(about, spec=replace(about.spec, partition=partition))

    def _entry_name(self, path: Path, entries: Mapping[Path, str]) -> str:
        name = entries.get(path[:3]) or entries.get(path[:2])
        if name is None:
            return "optim/" + ".".join(map(str, path))
        return "/".join(map(str, (name, *path[3:])))

    def _compare_shards(
        self, optimizer: OptimizerAdapter, state: State, saved: Mapping[str, Any], by_user: bool
    ) -> None:
        """Compare ZeRO-1's shards with the master weights that were loaded, or with the loaded parameters."""
        loaded = saved.get(MASTERS, {})
        for index, slot in optimizer.shards(state.tree).items():
            name = slot.global_name(MASTER_WEIGHTS)
            if index in loaded:
                if MASTERS not in state.tree:
                    self._compare("weights", name, loaded[index], slot.key, by_user)
            elif self._trees.keeps(name) or not self._is_compared_on(slot.key):
                continue
            elif not _is_shard_of_parameter(slot):
                self._find("weights", name, "it is not this rank's shard of the loaded parameter", by_user)
            elif saved and self._has_exact(slot):
                self._find(
                    "weights", name, "it is cut from the rounded parameter; the tag has it exact", by_user
                )

    def _has_exact(self, slot: Slot) -> bool:
        """Return whether the tag has the values of a shard, as master weights or as weights that were rounded."""
        model = self._trees.model
        names = [slot.name] if model is None else model.aliases(slot.name)
        weights = [self._trees.model_tree.get(name) for name in names]
        stubs = [each.stub for leaf in weights if isinstance(leaf, Assembly) for each in leaf.fragments]
        dtype = slot.master_dtype
        is_rounded = any(leaf is not None and form_of(leaf)[0] != dtype for leaf in weights)
        return is_rounded and (
            any(stub.dtype == dtype for stub in stubs)
            or any(f"optim/{name}/{MASTER_WEIGHTS}" == entry.name for entry in self._reader.entries() for name in names)
        )

    def _is_compared_on(self, tensor: torch.Tensor) -> bool:
        return self._everything or tensor.device.type == "cpu" or tensor.nbytes <= SMALL

    def _compare_scheduler(self, scheduler: Any, state: Any) -> None:
        if scheduler is None or self._scheduler is None:
            return
        objects = scheduler.items() if isinstance(scheduler, NamedObjects) else ()
        by_users = {name for name, one in objects if is_users(one)}
        now = dict(iter_leaves(state))
        for path, leaf in iter_leaves(self._scheduler):
            by_user = path[1] in by_users if objects and len(path) > 1 else self._sees_scheduler
            name = "/".join(map(str, ("scheduler", *path)))
            self._compare("scheduler", name, leaf, now.get(path, ABSENT), by_user)

    def _compare(self, kind: str, name: str, saved: Any, now: Any, by_user: bool) -> bool:
        """Compare one value, or begin to. Return whether both are tensors of one form."""
        if not isinstance(saved, (TensorStub, Assembly)):
            self._compare_values(kind, name, saved, now, by_user)
            return False
        self.nbytes += saved.nbytes
        if not isinstance(now, (torch.Tensor, int, float)):
            self._find(kind, name, "the tag holds it, and the live objects do not: it was not loaded", by_user)
            return False
        live = local_of(torch.as_tensor(now))
        if form_of(live) != (saved.dtype, tuple(saved.shape)):
            self._compare_numbers(kind, name, saved, live, by_user)
            return False
        expected = self._digest(saved, name)
        if expected is None and saved.numel:
            self._find(kind, name, "it was not read", by_user)
        elif saved.numel:
            self._digests.add(name, live, partial(self._judge, kind, name, saved, expected or 0, by_user))
        return True

    def _judge(self, kind: str, name: str, saved: Leaf, expected: int, by_user: bool, found: int) -> None:
        if found == expected:
            return
        if self._verify_again is not None and recorded_digest(saved) is not None and not by_user:
            verify_again, self._verify_again = self._verify_again, None
            verify_again(saved, name)
        message = f"the live tensor is not the one that was saved: expected CRC-32 {expected:08x}, found {found:08x}"
        self._find(kind, name, message, by_user)

    def _compare_numbers(self, kind: str, name: str, saved: Leaf, live: torch.Tensor, by_user: bool) -> None:
        """Compare a count or an option, which the live optimizer may keep in another form."""
        if saved.numel != 1 or live.numel() != 1 or kind == "weights":
            expected, found = f"{saved.dtype} {list(saved.shape)}", "{} {}".format(*form_of(live))
            self._find(kind, name, f"expected {expected}, as it was saved, found {found}", by_user)
            return
        out = allocated(saved.shape, saved.dtype)
        self._reader.read_into(saved, out, name, compare=False)
        self._reader.finish()
        value = live.detach().cpu().reshape(())
        if not equal_values(out.reshape(()).to(value.dtype), value):
            self._find(kind, name, f"expected {out.item()!r}, as it was saved, found {value.item()!r}", by_user)

    def _compare_values(self, kind: str, name: str, saved: Any, now: Any, by_user: bool) -> None:
        if isinstance(now, torch.Tensor) and isinstance(saved, (int, float)) and now.numel() == 1:
            value = now.detach().cpu().reshape(())
            if equal_values(torch.as_tensor(saved, dtype=value.dtype), value):
                return
            now = value.item()
        elif equal_values(saved, now) and (type(saved) is type(now) or not isinstance(saved, _PLAIN)):
            return
        self._find(kind, name, f"expected {saved!r}, as it was saved, found {now!r}", by_user)

    def _trace(self, provenance: Provenance, about: StateTensor, leaf: Leaf, by_user: bool) -> None:
        fault = provenance.fault(about, leaf)
        if fault is not None:
            self._find("weights" if about.name.startswith("model/") else "moments", about.name, fault, by_user)

    def _compare_stride(self, name: str, leaf: Any, now: Any, of_parameter: bool) -> None:
        """Compare the strides of a tensor that the load made: those that were noted, or those of its parameter."""
        if self._before is None or name in self._before or not isinstance(leaf, (TensorStub, Assembly)):
            return
        if not isinstance(now, torch.Tensor) or is_xla(now) or is_rows(name) or not leaf.numel:
            return
        saved, noted, found = stored_stride(leaf), stride_of(now), local_of(now).stride()
        if of_parameter and (saved is None or saved.as_parameter):
            expected, is_equal = "those of its parameter", noted is None or noted.as_parameter
        else:
            steps = contiguous_stride(leaf.shape) if saved is None else fitted(saved.steps, leaf.shape)
            expected, is_equal = str(steps), steps == found
        if not is_equal:
            self._find("moments", name, f"expected strides {expected}, as it was saved, found {found}", False)


def _is_shard_of_parameter(slot: Slot) -> bool:
    values, shard = to_cpu([slot.parameter, slot.key])
    whole = Box.whole(tuple(values.shape))
    expected = torch.zeros(zero1_shape(whole.size, slot.shards), dtype=shard.dtype)
    for piece in zero1_pieces([Piece(whole, whole)], whole.size, slot.shards, slot.shard):
        box_of(expected, piece.local).copy_(box_of(values, piece.box))
    return expected.shape == shard.shape and crc32(byte_view(expected)) == crc32(byte_view(shard.contiguous()))


def in_words(findings: Sequence[Finding]) -> str:
    """Return the first findings, and how many more there are."""
    texts = [f"{each.what}: {each.message}" for each in findings[:_SHOWN]]
    more = f"; and {len(findings) - _SHOWN} more" if len(findings) > _SHOWN else ""
    return "; ".join(texts) + more


def is_users(scheduler: Any) -> bool:
    """Return whether the state of a scheduler, or of one in a list or of several by name, is set by user code."""
    if isinstance(scheduler, NamedObjects):
        return any(map(is_users, scheduler.values()))
    if isinstance(scheduler, (list, tuple)):
        return any(map(is_users, scheduler))
    return scheduler is not None and is_users_object(scheduler)


def _is_compared(path: Path, leaf: Any, now: Mapping[Path, Any]) -> bool:
    if len(path) < 3 and path[0] in ("state", "base_state", MASTERS) and isinstance(leaf, dict):
        return False  # an empty section
    if path[0] == "param_groups":
        return len(path) > 2 and path[2] not in _NOT_OPTIONS
    return path[0] in ("state", "base_state", MASTERS) or path in now  # keys of its own may be left alone


def _as_live(tree: dict[str, Any], live: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state dict with the indices that its parameters have in the ``live`` one."""
    if all(key in tree and key in live for key in EXPERT_KEYS):
        offsets = {"base_state": "ep_base_state_offset", "shape_info": "ep_shape_info_offset"}
        moved = {key: live[key] for key in EXPERT_KEYS}
        for section in parameter_sections(tree):
            first = offsets.get(section, "ep_shape_info_offset")
            by = live[first] - tree[first]
            moved[section] = {at + by if at >= tree[first] else at: entries for at, entries in tree[section].items()}
        return {**tree, **moved}
    indices = [index for group in tree["param_groups"] for index in group["params"]]
    if "base_state" in tree or indices == list(range(len(indices))):
        return tree
    place = {index: number for number, index in enumerate(indices)}
    return {**tree, "state": {place.get(index, index): entries for index, entries in tree.get("state", {}).items()}}
