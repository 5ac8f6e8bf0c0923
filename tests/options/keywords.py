"""Types of keywords in nxd_ckpt/keywords.py: those that the signatures of functions with ``**options`` show.

``python -m tests.options.keywords`` writes them anew, in the repository's root.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import nxd_ckpt
from nxd_ckpt import Checkpointer, keywords
from nxd_ckpt.prune import prune_checkpoints

DOCUMENT = Path(keywords.__file__)
FUNCTIONS: list[Callable[..., Any]] = [
    function
    for function in (
        *(getattr(nxd_ckpt, name) for name in nxd_ckpt.__all__),
        *(*vars(Checkpointer).values(), prune_checkpoints),
    )
    if inspect.isfunction(function) and str(function.__annotations__.get("options")).startswith("Unpack[")
]
_MARK = "# ---- generated ----\n"


def own_parameters(function: Callable[..., Any]) -> list[str]:
    """The parameters of a function that are written out."""
    return [name for name in inspect.signature(inspect.unwrap(function)).parameters if name != "options"]


def rendered(text: str) -> str:
    """``text`` with the types after the mark."""
    kinds: dict[str, list[str]] = {}
    for function in FUNCTIONS:
        name = function.__annotations__["options"].removeprefix("Unpack[").removesuffix("]")
        own, shown = own_parameters(function), inspect.signature(function).parameters.values()
        entries = [f"    {one.name}: {one.annotation}\n" for one in shown if one.name not in own]
        assert kinds.setdefault(name, entries) == entries, f"{function.__qualname__} takes other keywords than {name}"
    for name in ("Load", "Save"):  # a Checkpointer's call, and the function of that name, which writes some out
        both = kinds[f"{name}Keywords"], kinds[f"{name}CheckpointKeywords"]
        kinds[f"Any{name}Keywords"] = [entry for entry in both[0] if entry in both[1]]
    classes: dict[str, str] = {}
    for name in sorted(kinds, key=lambda name: (len(kinds[name]), name)):
        classes[name] = _class(name, kinds[name], {other: kinds[other] for other in classes})
    return re.sub(f"{_MARK}.*", lambda _: _MARK + "\n\n".join(classes.values()), text, flags=re.S)


def _class(name: str, entries: Sequence[str], others: dict[str, list[str]]) -> str:
    """The class, which inherits those of ``others``, the largest first, that have nothing but entries of its own."""
    bases, left = [], list(entries)
    for other, its in reversed(others.items()):
        if {*its} <= {*left}:
            bases.append(other)
            left = [entry for entry in left if entry not in its]
    no_more = "    pass\n"
    return f"class {name}({', '.join(bases) or 'TypedDict'}, total=False):\n{''.join(left) or no_more}"


if __name__ == "__main__":
    DOCUMENT.write_text(rendered(DOCUMENT.read_text()))
