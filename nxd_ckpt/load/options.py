"""How to load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from typing_extensions import TypedDict

from nxd_ckpt.core.heads import Hardware
from nxd_ckpt.core.partition import Partition
from nxd_ckpt.errors import InvalidArgument
from nxd_ckpt.live.ignoring import IgnoreKeys
from nxd_ckpt.options.hugging_face import MappingSpec
from nxd_ckpt.storage.urls import StrPath

Verify = bool | Literal["reading"]


@dataclass(frozen=True)
class LoadOptions:
    """How to load; names, defaults and meaning as in neuronx_distributed's ``load_checkpoint`` where it has them.

    Attributes:
        strict: names that are missing or unexpected in the model are an error, else they are skipped with a warning. So
            are names in ``key_mapping``, a ``prefix`` and globs in ``ignore_keys`` that match nothing. Without it, an
            optimizer's parameters that the tag has no state of start anew, and state of others is left out.
        num_workers: accepted for the sake of existing scripts. Every rank reads its own files at once.
        use_zero1_dcp: accepted likewise. The format is detected.
        param_names: the names of the optimizer's parameters, a list for each param group; needed where no live model
            tells them.
        saved_param_names: the same as they were at the save, for each pipeline stage; needed to load tags on other
            sizes that do not say it (neuronx_distributed's).
        partitions: how live parameters are cut over tensor-parallel ranks, by name; needed where their attributes were
            lost.
        rank_content: an empty dict, filled with what this rank saved as ``rank_content``. On other sizes it is filled
            with the data positions in it only, re-split.
        verify: when digests are compared. True: on all ranks before anything changes on any, which reads everything
            twice. "reading": as the bytes arrive, in one pass; an error is raised on all ranks, but may leave live
            state partly overwritten. False: never; structure, sizes and indexes are checked all the same. None:
            "reading" on object stores, where True would download everything twice; True on file systems, and with
            ``pre_download``.
        share_reads: one of the data-parallel replicas reads each tensor and broadcasts it to the others; None does so
            where that is measured to be faster. Of several ranks' answers False goes before True, and True before
            None. It has no effect with ``pre_download``.
        pre_download: first download the files that this rank needs, whole, to a local disk, and load from there. The
            processes of a host share the downloads. Of each directory or URL the files of the tag that was loaded last
            stay there.
        work_dir: the local directory for ``pre_download``; by default one of this user's below the system's temporary
            one.
        trust_pickle: allow objects of any class. A file that is loaded with it can run any code: only for checkpoints
            that you trust like your own code.
        progress: show a bar on rank 0's standard error, if that is a terminal, for what takes longer than two seconds.
        mapping: of a Hugging Face directory, like the next two, which have no effect on tags: the name of a mapping
            that comes with nxd_ckpt, a JSON or YAML file, or the document itself; by default config.json chooses it.
        kv_size_multiplier: how many copies of each key-value head the live model keeps.
        hardware: the order of those copies, "trn1" or "trn2".
        key_mapping: maps live names of parameters and buffers to whole names in the checkpoint, all at once.
        prefix: what the names in the checkpoint begin with and other live names do not. What does not begin with it
            there is ignored.
        ignore_keys: what keeps its live value, and is neither read nor verified: globs over names, or a function from
            the list of all names to those that are left out. Names are ``model/<name>``, ``optim/<name>/<state>``,
            ``optim/param_groups``, ``scheduler``, ``user_content``, ``rank_content`` (and their keys, as
            ``rank_content/epoch``), and ``rng``, which is a random state from ``capture_random_state`` in rank_content.
            ``*`` stands for anything, slashes too, and a name for all that is below it. Names are the live ones, after
            ``key_mapping``.
        load_weights_only: load the model and nothing else, even if optimizer and scheduler are given. ZeRO-1 shards are
            cut from its weights.
        strict_model_weights: ``strict`` for the names of the model alone; None is as ``strict``, which also counts for
            filters.
        fallback: where no tag is named and the latest is damaged, load the newest one that is not, with a warning that
            says which and why.
    """

    strict: bool = True
    num_workers: int | None = 8
    use_zero1_dcp: bool = False
    param_names: Sequence[Sequence[str]] | None = None
    saved_param_names: Sequence[Sequence[Sequence[str]]] | None = None
    partitions: Mapping[str, Partition] | None = None
    rank_content: dict[Any, Any] | None = None
    verify: Verify | None = None
    share_reads: bool | None = None
    pre_download: bool = False
    work_dir: StrPath | None = None
    trust_pickle: bool = False
    progress: bool = True
    mapping: MappingSpec = None
    kv_size_multiplier: int = 1
    hardware: Hardware = "trn1"
    key_mapping: Mapping[str, str] | None = None
    prefix: str = ""
    ignore_keys: IgnoreKeys | None = None
    load_weights_only: bool = False
    strict_model_weights: bool | None = None
    fallback: bool = False

    @property
    def strict_names(self) -> bool:
        """Whether the model's names must be those of the checkpoint."""
        return self.strict if self.strict_model_weights is None else self.strict_model_weights

    @property
    def verifies_first(self) -> bool:
        """Whether everything is verified before anything changes."""
        return self.verify is True

    def settled(self, reads_are_cheap: bool) -> LoadOptions:
        """These options with what ``verify=None`` means: ``reads_are_cheap`` says that twice is no matter."""
        if self.verify is not None:
            return self
        return replace(self, verify=True if reads_are_cheap or self.pre_download else "reading")

    def validate(self) -> None:
        """Raise InvalidArgument for what has no meaning."""
        known = self.verify is None or isinstance(self.verify, (bool, str))
        if not known or self.verify not in (None, True, False, "reading"):
            raise InvalidArgument(
                f"verify={self.verify!r}: expected True (compare all digests before anything changes), 'reading' (as "
                "the bytes arrive), False (not at all) or None (True on file systems, 'reading' on stores)"
            )
        if self.fallback and self.verify is False:
            raise InvalidArgument("fallback=True with verify=False: without digests no damage is found; pass one only")
        if self.work_dir is not None and not self.pre_download:
            raise InvalidArgument("work_dir= is where pre_download=True keeps its copies: pass that too, or neither")


class OurLoadKeywords(TypedDict, total=False):
    """Those that neuronx_distributed's signature does not have."""

    param_names: Sequence[Sequence[str]] | None
    saved_param_names: Sequence[Sequence[Sequence[str]]] | None
    partitions: Mapping[str, Partition] | None
    rank_content: dict[Any, Any] | None
    verify: Verify | None
    share_reads: bool | None
    pre_download: bool
    work_dir: StrPath | None
    trust_pickle: bool
    progress: bool
    mapping: MappingSpec
    kv_size_multiplier: int
    hardware: Hardware
    key_mapping: Mapping[str, str] | None
    prefix: str
    ignore_keys: IgnoreKeys | None
    load_weights_only: bool
    strict_model_weights: bool | None
    fallback: bool


class LoadKeywords(OurLoadKeywords, total=False):
    strict: bool
    num_workers: int | None
    use_zero1_dcp: bool
