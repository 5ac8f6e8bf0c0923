"""Options of a load, and its request: a call of load, as its phases need it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nxd_ckpt.coordination.agreement import Agreement, SingleProcessAgreement, on_all
from nxd_ckpt.core.arguments import Count
from nxd_ckpt.core.heads import Hardware
from nxd_ckpt.core.name_patterns import IgnoreKeys
from nxd_ckpt.core.option_classes import option, options_of
from nxd_ckpt.core.partition import Partition
from nxd_ckpt.core.tags import TagValues
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import InvalidArgument
from nxd_ckpt.live.named import LiveObjects, with_state
from nxd_ckpt.live.named_models import open_model
from nxd_ckpt.live.optimizer import open_optimizer
from nxd_ckpt.options.checkpointer_options import DEFAULT_TIMEOUT
from nxd_ckpt.options.conversion import MappingSpec
from nxd_ckpt.options.execution import DownloadOptions, Verify
from nxd_ckpt.tag.choosing import Place


@dataclass(frozen=True)
class LoadOptions(DownloadOptions):
    """Options of a load, named as in neuronx_distributed's ``load_checkpoint`` where it has them, with its defaults."""

    strict: bool = option(True, """names that are missing or unexpected in the model are an error; False skips them with
        a warning. So it does with names in ``key_mapping``, a ``prefix`` and globs in ``ignore_keys`` that match
        nothing. With False, parameters of the optimizer without state in the tag start fresh, and state of other
        parameters is left out.""")
    num_workers: int | None = option(8, "accepted for existing scripts. Every rank reads its own files at once.")
    use_zero1_dcp: bool = option(False, "accepted for existing scripts. The format is detected.")
    param_names: Sequence[Sequence[str]] | None = option(None, """names of the optimizer's parameters, a list for each
        param group; needed without a live model.""")
    saved_param_names: Sequence[Sequence[Sequence[str]]] | None = option(None, """the optimizer's parameter names at
        the save, for each pipeline stage; needed for NxD's tags on other sizes.""")
    partitions: Mapping[str, Partition] | None = option(None, """cuts of live parameters over tensor-parallel ranks,
        by name; needed if their attributes were lost.""")
    rank_content: dict[Any, Any] | None = option(None, """an empty dict, filled with this rank's saved
        ``rank_content``. On other sizes: data positions only, re-split.""")
    verify: Verify | None = option(None, """when digests are compared. True: before anything changes, which reads
        twice. "reading": in one pass; after an error live state may be partly overwritten. False: never. None: True
        on file systems and with ``pre_download``, "reading" on object stores.""")
    share_reads: bool | None = option(None, """one of the ranks that load the same tensor or shard reads it and sends
        it to the others. None: from an object store, of what is large. No effect with ``pre_download``.""")
    trust_pickle: bool = option(False, """allow objects of any class. This can run any code: use it only for
        checkpoints that you trust.""")
    progress: bool = option(True, "show a bar on rank 0's terminal for work of more than two seconds.")
    mapping: MappingSpec = option(None, """for Hugging Face directories, as the next two: a shipped mapping's name, a
        JSON file, or a document. Default: config.json decides.""")
    kv_size_multiplier: Count = option(1, "copies of each key-value head in the live model.")
    hardware: Hardware = option("trn1", 'the order of those copies, "trn1" or "trn2".')
    key_mapping: Mapping[str, str] | None = option(None, """maps live names of parameters and buffers to whole names
        in the checkpoint.""")
    prefix: str = option("", """beginning of names in the checkpoint that live names lack. Names without it are
        ignored.""")
    ignore_keys: IgnoreKeys | None = option(None, """names that keep their live values, neither read nor verified:
        globs such as ``optim/*``, or a function from all names to those left out.""")
    weights_only: bool = option(False, "load the model only. ZeRO-1 shards are cut from its weights.")
    load_weights_only: bool = option(False, "another name for ``weights_only``, OLMo-core's.")
    strict_model_weights: bool | None = option(None, """``strict`` for the model's names alone. None uses ``strict``,
        which also counts for filters.""")
    tag_values: TagValues | None = option(None, """values of fields of a tag such as ``"ep{epoch}-ba{batch}"``:
        the newest tag that fits is loaded. A field without a value stands for any number.""")
    prove: bool | None = option(None, """compare the live state after the load with what was loaded: a difference is an
        error. None: a warning where user code such as a load hook may explain it; nothing with ``verify=False``, and
        of large tensors on a device nothing. True: everything, and always an error. False: not at all.""")
    fallback: bool = option(False, """if the latest tag is damaged, load the newest undamaged one, with a warning.
        Never for a named tag or a model that does not match.""")

    @property
    def loads_weights_only(self) -> bool:
        """True if optimizer, scheduler and content are left out, by either name of the option."""
        return self.weights_only or self.load_weights_only

    @property
    def strict_names(self) -> bool:
        """True if the model's names must be those of the checkpoint."""
        return self.strict if self.strict_model_weights is None else self.strict_model_weights

    @property
    def verifies_first(self) -> bool:
        """True if everything is verified before anything changes."""
        return self.verify is True

    def settled(self, reads_are_cheap: bool) -> LoadOptions:
        """Return these options with ``verify=None`` resolved; reading twice is acceptable if ``reads_are_cheap``."""
        if self.verify is not None:
            return self
        return replace(self, verify=True if reads_are_cheap or self.pre_download else "reading")

    def __post_init__(self) -> None:
        """Raise InvalidArgument for contradictions, too."""
        super().__post_init__()
        if self.weights_only and self.load_weights_only:
            raise InvalidArgument("pass weights_only= or load_weights_only=, which is another name for it, not both")
        if self.fallback and self.verify is False:
            raise InvalidArgument("fallback=True with verify=False: without digests no damage is found; pass one only")


def agreed_options(agreement: Agreement | None, values: Mapping[str, Any], function: str) -> LoadOptions:
    """Return the options with these values; if those of a rank are invalid, raise on all. Collective.

    A run that begins asks too: else its options would be refused only when it resumes.
    """
    return on_all(agreement or SingleProcessAgreement(), lambda: options_of(LoadOptions, values, function))


@dataclass(frozen=True)
class LoadRequest:
    """One call of load, on one rank: the objects to load, None for those to skip, and the other ranks.

    Attributes:
        topology: sizes and the rank whose state is loaded.
        agreement: of all processes that make this call; a process alone may load any rank's state.
        state: the objects that were passed by name; `settled` adds them to the three before.
        timeout: seconds without progress after which another rank counts as lost.
        place: the path with its options, if it may be a checkpoint itself, and not a directory of tags.
        touched: tags with which it began to change live objects.
    """

    topology: Topology
    agreement: Agreement
    model: Any
    optimizer: Any
    scheduler: Any = None
    options: LoadOptions = field(default_factory=LoadOptions)
    timeout: float = DEFAULT_TIMEOUT
    state: Mapping[str, Any] | None = None
    place: Place | None = None
    touched: list[str] = field(default_factory=list, compare=False)

    def asked(self) -> list[str]:
        """Return the names of the parts that this rank loads."""
        return [part for part in ("model", "optimizer", "scheduler", "state") if getattr(self, part) is not None]

    def settled(self) -> LoadRequest:
        """Return the request with the objects of ``state`` as models, optimizers, and in place of the scheduler.

        Raises InvalidArgument if they are not such objects.
        """
        objects = with_state(LiveObjects(self.model, self.optimizer, self.scheduler), self.state)
        return replace(self, **objects._asdict())

    def checked(self) -> None:
        """Raise, on all ranks, the errors of a load for objects that no tag fits. Collective."""

        def check() -> None:
            settled = self.settled()
            model = None if settled.model is None else open_model(settled.model, may_be_meta=True)
            if settled.optimizer is not None:
                names = self.options.param_names
                open_optimizer(settled.optimizer, model=model, param_names=names, topology=self.topology)

        on_all(self.agreement, check)

    @property
    def reports_progress(self) -> bool:
        """True on the rank that shows progress for all."""
        return self.agreement.rank == 0

    @property
    def acts_for_one_stage(self) -> bool:
        """True if a process loads one of several pipeline stages without the others: names may be in theirs."""
        return self.agreement.world_size < self.topology.world_size and self.topology.pp > 1
