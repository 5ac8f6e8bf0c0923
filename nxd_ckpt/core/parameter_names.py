"""Names of a model's tensors: what wrappers and NxD's LoRA add to them, and their usual param groups. Pure.

In NxD's LoRA models a wrapped layer ``q_proj`` becomes the base's ``q_proj.base_layer`` and the adapter's
``q_proj.lora_A`` (rank, inputs) and ``q_proj.lora_B`` (outputs, rank).

Trainers put decayed parameters into the first param group, and norms and biases, or biases only, into the second, each
in the model's order; or all parameters into one group. An assignment counts if it fits the saved groups, in the number
and the shape of all parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from nxd_ckpt.errors import UnsupportedState

BASE_LAYER = ".base_layer"

CONFIG = "lora_config"
"""Key of the configuration in a state dict."""

EXTRA_STATE = "_extra_state"
"""End of the names of modules' extra state, which may be a dict: what ``get_extra_state()`` returns."""

_MARK = "lora_"

_WRAPPERS = frozenset(
    {"_orig_mod", "_fsdp_wrapped_module", "_fpw_module", "_checkpoint_wrapped_module", "_forward_module"}
)
"""Parts of a name that torch.compile, FSDP, activation checkpointing and Lightning put between module names."""


def is_extra_state(name: Any) -> bool:
    """Return whether this is a name of a module's extra state."""
    return isinstance(name, str) and name.endswith(EXTRA_STATE) and name.rpartition(".")[2] == EXTRA_STATE


def canonical(names: Iterable[str], where: str) -> dict[str, str]:
    """Map each of ``names`` without the names of wrappers, as in torch's ``get_model_state_dict``, to the name itself.

    Raises:
        UnsupportedState: two become equal.
    """
    wrapped: dict[str, str] = {}
    for name in names:
        plain = without_wrappers(name)
        if plain in wrapped:
            raise UnsupportedState(f"{where} holds both {wrapped[plain]} and {name}, which both become {plain!r}")
        wrapped[plain] = name
    return wrapped


def plain_names(names: Iterable[str], where: str) -> dict[str, str]:
    """Map each of ``names`` without the names of wrappers to the name itself.

    Unlike `canonical` it also leaves out ``module.``, which data parallelism puts before all names.

    Raises:
        UnsupportedState: two become equal.
    """
    plain = canonical(names, where)
    while plain and all(name.startswith("module.") for name in plain):
        plain = {name.removeprefix("module."): wrapped for name, wrapped in plain.items()}
    return plain


def without_wrappers(name: str) -> str:
    """Return a parameter's name without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def names_without_wrappers(live: Iterable[str], saved: Collection[str]) -> dict[str, str]:
    """Map each live name that is not ``saved`` to the saved name that differs only by names of wrappers.

    Wrappers are torch.compile, activation checkpointing, FSDP, Lightning and data parallelism, on either side, in any
    order. Names are left out that are already used for another one, or that match several.
    """
    live = set(live)
    saved = set(saved)
    lost = _by_plain_name(live - saved)
    spare = _by_plain_name(saved - live) if lost else {}
    return {
        names[0]: spare[plain][0] for plain, names in lost.items() if len(names) == 1 and len(spare.get(plain, ())) == 1
    }


def is_adapter(name: str) -> bool:
    """Return whether the name is an adapter's."""
    return _MARK in name


def without_base_layer(name: str) -> str:
    """Return a tensor's name before its layer was wrapped."""
    return name.replace(BASE_LAYER, "")


def _by_plain_name(names: Iterable[str]) -> dict[str, list[str]]:
    """Group the names by their form without any wrapper's; data parallelism calls the wrapped model ``module``."""
    by_plain_name: dict[str, list[str]] = {}
    for name in names:
        plain = ".".join(part for part in without_wrappers(name).split(".") if part != "module")
        by_plain_name.setdefault(plain, []).append(name)
    return by_plain_name


Shape = tuple[int, ...]

NOT_DECAYED = (("bias", "norm", "LayerNorm"), ("bias",), ())
"""Alternatives for the second group: a parameter is in it if its name contains one of the patterns."""


def grouped(
    parameters: Mapping[str, Shape | None], groups: Sequence[Sequence[Shape]], patterns: Iterable[str]
) -> list[list[str]] | None:
    """Return the names of each group, with names that contain one of ``patterns`` in the second; None if none fit.

    ``parameters`` are the model's, in order, with their shapes. ``groups`` are the shapes of the optimizer's state for
    each parameter; an empty shape fits any parameter.
    """
    later = [name for name in parameters if any(pattern in name for pattern in patterns)]
    first = [name for name in parameters if name not in set(later)]
    empty: list[list[str]] = [[] for _ in groups[2:]]
    names = [first, later, *empty][: len(groups)]

    def fit(names: Sequence[str], shapes: Sequence[Shape]) -> bool:
        expected = [parameters[name] for name in names]
        return len(names) == len(shapes) and all(
            shape is None or not saved or shape == saved for shape, saved in zip(expected, shapes, strict=True)
        )

    fits = sum(map(len, names)) == len(parameters) and all(map(fit, names, groups))
    return names if fits else None
