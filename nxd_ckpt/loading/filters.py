"""Filters of a load: names that it leaves out (`nxd_ckpt.live.ignoring`), and names that differ in the tag."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from nxd_ckpt.core.name_patterns import Renaming
from nxd_ckpt.formats.optimizer_trees import MASTER_WEIGHTS
from nxd_ckpt.live.ignoring import Ignoring, Names
from nxd_ckpt.loading.options import LoadOptions

_BESIDE_THE_MODEL = ("optim", "scheduler", "user_content", "rank_content")


class Filter(Ignoring):
    """The filters of one load on one rank. Without any, nothing is ignored and every name stays.

    Raises:
        InvalidArgument: options that are no filters, or that use one saved tensor for two live ones.
    """

    def __init__(self, options: LoadOptions) -> None:
        self.renaming: Renaming = Renaming(options.key_mapping or {}, options.prefix)
        self.renaming.validate()
        self._renames = bool(self.renaming)
        self._has_shards = False
        super().__init__(options.ignore_keys, _BESIDE_THE_MODEL if options.loads_weights_only else ())

    def __bool__(self) -> bool:
        return self._renames or super().__bool__()

    def know_base_names(self, live_to_base: Mapping[str, str], saved: Collection[str]) -> None:
        """From now on, look up a live name that is not ``saved`` under its base name, if that is saved.

        ``key_mapping`` takes precedence.
        """
        mapping = self.renaming.key_mapping
        prefix = self.renaming.prefix
        renamed = {
            live: prefix + base
            for live, base in live_to_base.items()
            if live not in mapping and prefix + live not in saved and prefix + base in saved
        }
        if renamed:
            self.renaming = Renaming({**renamed, **mapping}, prefix)

    def know_shards(self) -> None:
        """From now on, a weight that is left out keeps its ZeRO-1 shard, too.

        The next step would otherwise write a loaded shard into the weight.
        """
        self._has_shards = True

    def renamed(self, options: LoadOptions) -> LoadOptions:
        """Return the options, with live names in place of saved ones."""
        names = options.saved_param_names
        if names is None:
            return options
        live = [[[self.renaming.live(name) for name in group] for group in stage] for stage in names]
        return replace(options, saved_param_names=live)

    def refuse_collisions(self, names: Names) -> None:
        """Raise InvalidArgument if two of the live ``names`` would be loaded from one saved tensor."""
        if self.renaming:
            self.renaming.refuse_collisions(self.of_model(list(names)), self._aliases)

    def ignores(self, name: str) -> bool:
        return super().ignores(name) or (self.is_selective and self._ignores_weight_of(name))

    def keeps(self, loaded: Collection[str]) -> Callable[[str], bool]:
        """Return the predicate for state that the optimizer keeps, once the model's names ``loaded`` have been loaded.

        A ZeRO-1 shard that is left out follows the weights that it is a copy of.
        """
        if not self.is_selective:
            return self.ignores
        followed = {f"optim/{alias}/{MASTER_WEIGHTS}" for name in loaded for alias in self._aliases(name)}

        def follows(name: str) -> bool:
            # The parameter of a shard without a name is unknown: it is cut again if any weight was loaded.
            unnamed = name.startswith("optim/#") and name.endswith(f"/{MASTER_WEIGHTS}")
            return name in followed or (unnamed and bool(followed))

        return lambda name: self.ignores(name) and not follows(name)

    def kept(self, part: str, content: Mapping[Any, Any], saved: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return the live content that stays: keys that are left out by their names, or by their saved values."""
        return {
            key: value
            for key, value in content.items()
            if self.ignores_key(part, key, value) or (key in saved and self.ignores_key(part, key, saved[key]))
        }

    def _ignores_weight_of(self, name: str) -> bool:
        parameter = name.removeprefix("optim/").removesuffix(f"/{MASTER_WEIGHTS}")
        is_shard = self._has_shards and name == f"optim/{parameter}/{MASTER_WEIGHTS}"
        return is_shard and self.ignores_model(parameter)
