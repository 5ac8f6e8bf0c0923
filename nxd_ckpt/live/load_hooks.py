"""Code of a user's own that torch runs when a module or an optimizer is loaded: hooks, and methods of subclasses.

A load puts tensors straight into parameters and state, without torch's ``load_state_dict``. What that would call
besides copying tensors is called all the same, in its order: modules that look at the state dict, or load it in a way
of their own, are handed theirs; hooks that run afterwards run when everything is loaded.

Source for what is called when: torch.nn.Module.load_state_dict and torch.optim.Optimizer.load_state_dict.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.errors import KeyMismatch, ShapeMismatch

_BENIGN = (
    "torch.nn.modules.",
    "torch.distributed.",
    "torch.nn.parallel.",
    "torch._dynamo.",
    "torch_xla.",
    "neuronx_distributed.",
)
"""Where hooks and methods are defined that only do what our adapters do: old versions, gathering, resharding."""

_NOT_BENIGN = ("torch.nn.modules.lazy",)


class ModuleHooks:
    """The hooks of a module and all below it."""

    def __init__(self, root: Any) -> None:
        modules = root.named_modules() if isinstance(root, torch.nn.Module) else ()
        self._modules: dict[str, torch.nn.Module] = {f"{name}." if name else "": module for name, module in modules}
        self._subtrees = [prefix for prefix, module in self._modules.items() if _has_pre_hooks(module)]
        self._loading_own = {prefix for prefix, module in self._modules.items() if _loads_its_own_way(module)}

    def __bool__(self) -> bool:
        """True if any module sees, or changes, how it is loaded."""
        return bool(self._subtrees or self._loading_own)

    def owns(self, name: str) -> bool:
        """True for a name that a module loads by itself: of any module that may be renamed by a hook above it too."""
        return name.rpartition(".")[0] + "." * ("." in name) in self._loading_own or any(
            name.startswith(prefix) for prefix in self._subtrees
        )

    def load(self, state: dict[str, Any], strict: bool) -> None:
        """Hand the modules their entries of ``state``: of everything that `owns` says, CPU tensors by name.

        Raises KeyMismatch or ShapeMismatch where a module refuses them.
        """
        missing, unexpected, errors = list[str](), list[str](), list[str]()
        tops = [one for one in self._subtrees if not any(one != top and one.startswith(top) for top in self._subtrees)]
        for prefix in tops:
            own = {name: value for name, value in state.items() if name.startswith(prefix)}
            _load(self._modules[prefix], own, prefix, missing, unexpected, errors)
        for prefix in sorted(self._loading_own):
            if not any(prefix.startswith(top) for top in tops):
                own = {name: value for name, value in state.items() if name.startswith(prefix)}
                _load_own(self._modules[prefix], own, prefix, missing, unexpected, errors)
        if errors:
            raise ShapeMismatch(f"the model refuses what was saved: {'; '.join(errors)[:2000]}")
        if strict and (missing or unexpected):
            raise KeyMismatch(
                f"the model does not take what was saved: missing {first_of(missing) or 'nothing'}, unexpected "
                f"{first_of(unexpected) or 'nothing'}; its own hooks were called"
            )

    def after_load(self, missing: list[str], unexpected: list[str]) -> None:
        """Call the hooks that torch calls after a load, those of the inner modules first."""
        keys = torch.nn.modules.module._IncompatibleKeys(missing, unexpected)
        for module in _inner_first(self._modules[""]) if self._modules else ():
            for hook in _post_hooks(module):
                hook(module, keys)


def _inner_first(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    for child in module._modules.values():
        if child is not None:
            yield from _inner_first(child)
    yield module


def _load(
    module: torch.nn.Module, state: dict[str, Any], prefix: str, missing: list[str], unexpected: list[str],
    errors: list[str],
) -> None:  # fmt: skip
    """Load a module and all below it: a hook may change ``state`` for those that are below."""
    _load_own(module, state, prefix, missing, unexpected, errors)
    for name, child in module._modules.items():
        if child is not None:
            inner = f"{prefix}{name}."
            own = {key: value for key, value in state.items() if key.startswith(inner)}
            _load(child, own, inner, missing, unexpected, errors)


def _load_own(
    module: torch.nn.Module, state: dict[str, Any], prefix: str, missing: list[str], unexpected: list[str],
    errors: list[str],
) -> None:  # fmt: skip
    metadata = {"version": module._version}
    module._load_from_state_dict(state, prefix, metadata, True, missing, unexpected, errors)


def _has_pre_hooks(module: torch.nn.Module) -> bool:
    return any(not _is_benign(_home(hook)) for hook in module._load_state_dict_pre_hooks.values())


def _loads_its_own_way(module: torch.nn.Module) -> bool:
    return not _is_benign(_definer(type(module), "_load_from_state_dict"))


def _post_hooks(module: torch.nn.Module) -> list[Any]:
    return [hook for hook in module._load_state_dict_post_hooks.values() if not _is_benign(_home(hook))]


def own_root(model: Any) -> Any:
    """The model; inside of torch.compile and data parallelism, if its class is saved or loaded in a way of its own.

    A wrapper's state dict leaves out what such a method gives.
    """
    inner = model
    while (name := _WRAPPED_AS.get(type(inner).__name__)) is not None and _is_benign(type(inner).__module__):
        inner = getattr(inner, name)
    if isinstance(inner, torch.nn.Module) and not all(
        _is_benign(_definer(type(inner), name)) for name in ("load_state_dict", "state_dict")
    ):
        return inner
    return model


def loads_as_a_whole(module: torch.nn.Module) -> bool:
    """True for a root whose class has a ``load_state_dict`` of its own, which torch's users call."""
    return not _is_benign(_definer(type(module), "load_state_dict"))


_WRAPPED_AS = {"OptimizedModule": "_orig_mod", "DataParallel": "module", "DistributedDataParallel": "module"}


class OptimizerHooks:
    """The hooks of an optimizer, and the methods of its class that torch's ``load_state_dict`` involves."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    @property
    def loads_itself(self) -> bool:
        """True if its class loads in a way of its own, or hooks look at the state dict before."""
        own = [_definer(type(self._optimizer), name) for name in ("load_state_dict", "__setstate__")]
        pre = getattr(self._optimizer, "_optimizer_load_state_dict_pre_hooks", {})
        return bool(pre) or not all(home.startswith("torch.optim.") for home in own)

    def after_load(self) -> None:
        """Call the hooks that torch calls after a load."""
        for hook in getattr(self._optimizer, "_optimizer_load_state_dict_post_hooks", {}).values():
            hook(self._optimizer)


def keys_of_its_own(state: Mapping[str, Any], besides: Collection[str] = ()) -> list[str]:
    """The keys of an optimizer's state dict that torch's does not have, nor ``besides``."""
    return [str(key) for key in state if key not in ("state", "param_groups", *besides)]


def _definer(kind: type, name: str) -> str:
    """The module of the class that defines a method."""
    return next((one.__module__ for one in kind.__mro__ if name in vars(one)), "torch.optim.")


def _home(hook: Any) -> str:
    """The module that a hook is defined in."""
    hook = getattr(hook, "hook", hook)  # torch wraps those that take the module
    hook = getattr(hook, "func", hook)
    return str(getattr(hook, "__module__", None) or type(hook).__module__)


def _is_benign(home: str) -> bool:
    return f"{home}.".startswith(_BENIGN) and not home.startswith(_NOT_BENIGN)
