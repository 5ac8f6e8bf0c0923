"""Types of keywords in nxd_ckpt/keywords.py: those that the signatures of functions with ``**options`` show.

``python -m tests.options.keywords`` writes them anew, in the repository's root.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nxd_ckpt
from nxd_ckpt import Checkpointer, keywords
from nxd_ckpt.examine.resume_probe import ResumeProbe
from nxd_ckpt.prune import prune_checkpoints

DOCUMENT = Path(keywords.__file__)
FUNCTIONS: list[Callable[..., Any]] = [
    function
    for function in (
        *(getattr(nxd_ckpt, name) for name in nxd_ckpt.__all__),
        *(*vars(Checkpointer).values(), prune_checkpoints, ResumeProbe.check),
    )
    if inspect.isfunction(function) and str(function.__annotations__.get("options")).startswith("Unpack[")
]
_MARK = "# ---- generated ----\n"


def own_parameters(function: Callable[..., Any]) -> list[str]:
    """The parameters of a function that are written out."""
    return [name for name in inspect.signature(inspect.unwrap(function)).parameters if name != "options"]


def rendered(text: str) -> str:
    """``text`` with the types after the mark."""
    kinds: dict[str, str] = {}
    for function in FUNCTIONS:
        name = function.__annotations__["options"].removeprefix("Unpack[").removesuffix("]")
        own, shown = own_parameters(function), inspect.signature(function).parameters.values()
        entries = [f"    {one.name}: {one.annotation}\n" for one in shown if one.name not in own]
        kind = f"class {name}(TypedDict, total=False):\n{''.join(entries)}"
        assert kinds.setdefault(name, kind) == kind, f"{function.__qualname__} takes other keywords than {name}"
    classes = "\n\n".join(kind for _, kind in sorted(kinds.items()))
    return re.sub(f"{_MARK}.*", lambda _: _MARK + classes, text, flags=re.S)


if __name__ == "__main__":
    DOCUMENT.write_text(rendered(DOCUMENT.read_text()))
