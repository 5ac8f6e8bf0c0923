"""What a load leaves out (:mod:`nxd_ckpt.live.ignoring`), and under which names it looks for the rest."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from nxd_ckpt.core.renaming import Renaming
from nxd_ckpt.live.ignoring import Ignoring, Names
from nxd_ckpt.live.state import MASTER_WEIGHTS
from nxd_ckpt.load.options import LoadOptions

_BESIDE_THE_MODEL = ("optim", "scheduler", "user_content", "rank_content")


class Filter(Ignoring):
    """The filters of one load on one rank. Without any, it ignores nothing and every name stays.

    Raises:
        InvalidArgument: options that are no filters, or that take one saved tensor for two live ones.
    """

    def __init__(self, options: LoadOptions) -> None:
        self.renaming = Renaming(options.key_mapping or {}, options.prefix)
        self.renaming.validate()
        self._renames = bool(self.renaming)
        self._has_shards = False
        super().__init__(options.ignore_keys, _BESIDE_THE_MODEL if options.load_weights_only else ())

    def __bool__(self) -> bool:
        return self._renames or super().__bool__()

    def know_base_names(self, live_to_base: Mapping[str, str], saved: Collection[str]) -> None:
        """From here on, a live name that is not among the ``saved`` ones is looked for under its base name, if that is.
        What ``key_mapping`` says counts more."""
        mapping, prefix = self.renaming.key_mapping, self.renaming.prefix
        found = {
            live: prefix + base
            for live, base in live_to_base.items()
            if live not in mapping and prefix + live not in saved and prefix + base in saved
        }
        if found:
            self.renaming = Renaming({**found, **mapping}, prefix)

    def know_shards(self) -> None:
        """From here on, a weight that is left out keeps its ZeRO-1 shard, too: the next step would write a loaded one
        into the weight."""
        self._has_shards = True

    def renamed(self, options: LoadOptions) -> LoadOptions:
        """The options, with live names in place of saved ones."""
        names = options.saved_param_names
        if names is None:
            return options
        live = [[[self.renaming.live(name) for name in group] for group in stage] for stage in names]
        return replace(options, saved_param_names=live)

    def refuse_collisions(self, names: Names) -> None:
        """Raise InvalidArgument if two of the live ``names`` would be loaded from one saved tensor."""
        wanted = (name for name in names if not self.ignores_model(name))
        self.renaming.refuse_collisions(wanted, self._aliases)

    def ignores(self, name: str) -> bool:
        return super().ignores(name) or (self.is_selective and self._ignores_weight_of(name))

    def keeps(self, loaded: Collection[str]) -> Callable[[str], bool]:
        """What the optimizer is to keep, when the model's names ``loaded`` have been.

        A ZeRO-1 shard that is left out follows the weights that it is a copy of.
        """
        followed = {f"optim/{alias}/{MASTER_WEIGHTS}" for name in loaded for alias in self._aliases(name)}

        def follows(name: str) -> bool:
            # Nobody knows whose shard one without a name is: it is cut anew if any weight was loaded.
            unnamed = name.startswith("optim/#") and name.endswith(f"/{MASTER_WEIGHTS}")
            return name in followed or (unnamed and bool(followed))

        return lambda name: self.ignores(name) and not follows(name)

    def kept(self, part: str, content: Mapping[Any, Any], saved: Mapping[Any, Any]) -> dict[Any, Any]:
        """What stays of live content: under keys that are left out by their names, or by what was saved there."""
        return {
            key: value
            for key, value in content.items()
            if self.ignores_key(part, key, value) or (key in saved and self.ignores_key(part, key, saved[key]))
        }

    def _ignores_weight_of(self, name: str) -> bool:
        parameter = name.removeprefix("optim/").removesuffix(f"/{MASTER_WEIGHTS}")
        is_shard = self._has_shards and name == f"optim/{parameter}/{MASTER_WEIGHTS}"
        return is_shard and self.ignores_model(parameter)
