"""User code that torch runs when a module or an optimizer is loaded: hooks, and methods of subclasses.

A load puts tensors straight into parameters and state, without torch's ``load_state_dict``. Everything else that it
would call is still called, in its order: modules that look at the state dict, or load it in their own way, get their
part; hooks for after a load run when everything is loaded.

Source for the order of calls: torch.nn.Module.load_state_dict and torch.optim.Optimizer.load_state_dict.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.errors import CheckpointError, IncompatibleState, KeyMismatch, ShapeMismatch
from nxd_ckpt.surroundings import as_called

_BENIGN = (
    "torch.nn.modules.",
    "torch.distributed.",
    "torch.nn.parallel.",
    "torch._dynamo.",
    "torch_xla.",
    "neuronx_distributed.",
)
"""Modules whose hooks and methods only do what our adapters do: old versions, gathering, resharding."""

_NOT_BENIGN = ("torch.nn.modules.lazy",)


class ModuleHooks:
    """Load hooks of a module and all its submodules."""

    def __init__(self, root: Any) -> None:
        modules = root.named_modules() if isinstance(root, torch.nn.Module) else ()
        self._modules: dict[str, torch.nn.Module] = {f"{name}." if name else "": module for name, module in modules}
        items = self._modules.items()
        self._subtrees = [prefix for prefix, module in items if _has_own(module._load_state_dict_pre_hooks)]
        self._seen_after = [prefix for prefix, module in items if _has_own(module._load_state_dict_post_hooks)]
        kinds = set(map(type, self._modules.values()))  # few, of many modules
        own = {kind for kind in kinds if not _is_benign(_definer(kind, "_load_from_state_dict"))}
        self._loading_own = {prefix for prefix, module in items if type(module) in own}

    def __bool__(self) -> bool:
        """Return whether any module sees, or changes, how it is loaded."""
        return bool(self._subtrees or self._loading_own)

    def owns(self, name: str) -> bool:
        """Return whether a module loads this name by itself, or a hook above the module may rename it."""
        return name.rpartition(".")[0] + "." * ("." in name) in self._loading_own or any(
            name.startswith(prefix) for prefix in self._subtrees
        )

    def may_change(self, name: str) -> bool:
        """Return whether a module loads this name by itself, or a hook that is called after a load sees it."""
        if not (self or self._seen_after):  # as for most models, whose names are many
            return False
        return self.owns(name) or any(name.startswith(prefix) for prefix in self._seen_after)

    def load(self, state: dict[str, Any], strict: bool) -> None:
        """Pass the modules their entries of ``state``: CPU tensors by name, for all names that `owns` accepts.

        Raises KeyMismatch or ShapeMismatch if a module refuses them.
        """
        problems = missing, unexpected, errors = list[str](), list[str](), list[str]()
        subtrees = self._subtrees
        tops = [tree for tree in subtrees if not any(tree != top and tree.startswith(top) for top in subtrees)]
        for prefix in tops:
            _load(self._modules[prefix], state, prefix, problems, with_submodules=True)
        for prefix in sorted(self._loading_own):
            if not any(prefix.startswith(top) for top in tops):
                _load(self._modules[prefix], state, prefix, problems, with_submodules=False)
        if errors:
            raise ShapeMismatch(f"the model refuses what was saved: {'; '.join(errors)[:2000]}")
        if strict and (missing or unexpected):
            raise KeyMismatch(
                f"the model does not take what was saved: missing {first_of(missing) or 'nothing'}, unexpected "
                f"{first_of(unexpected) or 'nothing'}; its own hooks were called"
            )

    def after_load(self, missing: list[str], unexpected: list[str]) -> None:
        """Call the hooks that torch calls after a load, those of inner modules first."""
        keys = torch.nn.modules.module._IncompatibleKeys(missing, unexpected)
        for module in _inner_first(self._modules[""]) if self._modules else ():
            for hook in module._load_state_dict_post_hooks.values():
                if not _is_benign(_home(hook)):
                    with as_called():
                        hook(module, keys)


def _inner_first(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    for child in module._modules.values():
        if child is not None:
            yield from _inner_first(child)
    yield module


def _load(
    module: torch.nn.Module,
    state: Mapping[str, Any],
    prefix: str,
    problems: tuple[list[str], ...],
    *,
    with_submodules: bool,
) -> None:
    """Load a module from the entries of ``state`` below ``prefix``; its hooks may change them for the submodules."""
    own = {name: value for name, value in state.items() if name.startswith(prefix)}
    with as_called():
        module._load_from_state_dict(own, prefix, {"version": module._version}, True, *problems)
    for name, child in module._modules.items() if with_submodules else ():
        if child is not None:
            _load(child, own, f"{prefix}{name}.", problems, with_submodules=True)


def _has_own(hooks: Mapping[int, Any]) -> bool:
    """Return whether there are hooks of users."""
    return bool(hooks) and not all(_is_benign(_home(hook)) for hook in hooks.values())


def own_root(model: Any) -> Any:
    """Return the model, or the wrapped one if its class saves or loads in its own way.

    Wrappers are torch.compile and data parallelism; their state dict leaves out the results of such a method.
    """
    inner = model
    while (name := _WRAPPED_AS.get(type(inner).__name__)) is not None and _is_benign(type(inner).__module__):
        inner = getattr(inner, name)
    if isinstance(inner, torch.nn.Module) and not all(
        _is_benign(_definer(type(inner), name)) for name in ("load_state_dict", "state_dict")
    ):
        return inner
    return model


def has_module_of(model: Any, home: str, name: str) -> bool:
    """Return whether a module of the model is of a class ``name`` from below the package ``home``."""
    is_loaded = home.removesuffix(".") in sys.modules  # else nothing can be of its classes
    kinds = set(map(type, model.modules())) if is_loaded and isinstance(model, torch.nn.Module) else ()
    bases = (base for kind in kinds for base in kind.__mro__)
    return any(base.__name__ == name and base.__module__.startswith(home) for base in bases)


def loads_as_a_whole(module: torch.nn.Module) -> bool:
    """Return whether the root's class has its own ``load_state_dict``, which torch's users call."""
    return not _is_benign(_definer(type(module), "load_state_dict"))


_WRAPPED_AS = {"OptimizedModule": "_orig_mod", "DataParallel": "module", "DistributedDataParallel": "module"}


def loads_itself(optimizer: Any) -> bool:
    """Return whether an optimizer's class loads in its own way, or hooks look at the state dict before a load."""
    own = [_definer(type(optimizer), name) for name in ("load_state_dict", "__setstate__")]
    pre = getattr(optimizer, "_optimizer_load_state_dict_pre_hooks", {})
    return bool(pre) or not all(home.startswith("torch.optim.") for home in own)


def has_own_state_dict(optimizer: Any) -> bool:
    """Return whether an optimizer's state dict may have another form than torch's: by its class, or by a hook."""
    hooks = getattr(optimizer, "_optimizer_state_dict_post_hooks", {})
    defined = any("state_dict" in vars(kind) for kind in type(optimizer).__mro__)
    return bool(hooks) or not defined or not _definer(type(optimizer), "state_dict").startswith("torch.optim.")


def shows_by_user_code(optimizer: Any) -> bool:
    """Return whether user code sees the state of an optimizer in a load, or when it is captured."""
    return has_post_hooks(optimizer) or has_own_state_dict(optimizer) or loads_itself(optimizer)


def has_post_hooks(optimizer: Any) -> bool:
    return bool(getattr(optimizer, "_optimizer_load_state_dict_post_hooks", {}))


def is_users_object(one: Any) -> bool:
    """Return whether an object with a state dict, such as a scheduler, is of a class that torch does not define."""
    methods = ("load_state_dict", "state_dict")
    return not isinstance(one, dict) and not all(_definer(type(one), name).startswith("torch.") for name in methods)


def call_post_hooks(optimizer: Any) -> None:
    """Call the hooks that torch calls after a load of an optimizer."""
    for hook in getattr(optimizer, "_optimizer_load_state_dict_post_hooks", {}).values():
        with as_called():
            hook(optimizer)


def keys_of_its_own(state: Mapping[str, Any], besides: Collection[str] = ()) -> list[str]:
    """Return the keys of an optimizer's state dict that are neither torch's nor in ``besides``."""
    return [str(key) for key in state if key not in ("state", "param_groups", *besides)]


def _definer(kind: type, name: str) -> str:
    """Return the module of the class that defines a method."""
    return next((base.__module__ for base in kind.__mro__ if name in vars(base)), "torch.optim.")


def _home(hook: Any) -> str:
    """Return the module that defines a hook."""
    hook = getattr(hook, "hook", hook)  # torch wraps those that take the module
    hook = getattr(hook, "func", hook)
    return str(getattr(hook, "__module__", None) or type(hook).__module__)


def _is_benign(home: str) -> bool:
    return f"{home}.".startswith(_BENIGN) and not home.startswith(_NOT_BENIGN)


def set_extra_state(module: torch.nn.Module, value: Any, name: str) -> None:
    """Give a module its extra state, which is called ``name`` in errors. Raises IncompatibleState if it takes none."""
    try:
        with as_called():
            module.set_extra_state(value)
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:
        why = f"set_extra_state() does not take what was saved ({type(error).__name__}: {error})"
        raise IncompatibleState(f"{name}: {why}") from error
