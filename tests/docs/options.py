"""The tables of docs/options.md: what each function takes, as signatures and docstrings say it.

``python -m tests.docs.options`` writes the tables anew, in the repository's root.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import MISSING
from importlib import import_module
from typing import Any

from nxd_ckpt.core.option_classes import described, docs_of, fields_of
from nxd_ckpt.options.execution import ExecutionOptions
from tests.docs.markdown import DOCS

DOCUMENT = DOCS / "options.md"
ALIASES = ("path", "checkpoint_dir_str", "save_overwrite")
"""Other names for a parameter, which the text mentions."""

_TABLE = re.compile(r"^(<!-- (keywords|fields): ([\w.]+) -->\n)(?:\|.*\n)*", re.MULTILINE)


def rendered(text: str) -> str:
    """``text`` with the table after every mark."""
    return _TABLE.sub(lambda found: found[1] + _table(found[2], found[3]), text)


def _table(what: str, name: str) -> str:
    module, _, attribute = name.rpartition(".")
    named = getattr(import_module(module), attribute)
    rows = _fields(named) if what == "fields" else _keywords(named)
    return "".join(f"| {' | '.join(row)} |\n" for row in [("keyword", "default", "meaning"), ("---",) * 3, *rows])


def _fields(kind: type[Any]) -> list[tuple[str, str, str]]:
    order = sorted(fields_of(kind), key=list(kind.__dataclass_fields__.values()).index)
    return [_row(field.name, field.default, docs_of(kind)[field.name]) for field in order if field.default != MISSING]


def _keywords(function: Any) -> list[tuple[str, str, str]]:
    """Those that are given by name only, and not the same for all tools."""
    said, common = described(inspect.cleandoc(function.__doc__)), docs_of(ExecutionOptions)
    return [
        _row(one.name, one.default, said[one.name])
        for one in inspect.signature(function).parameters.values()
        if one.kind is one.KEYWORD_ONLY and one.name not in ALIASES and said[one.name] != common.get(one.name)
    ]


def _row(name: str, default: Any, meaning: str) -> tuple[str, str, str]:
    return f"`{name}`", f"`{default!r}`", meaning.replace("``", "`").replace("|", "\\|").rstrip(".")


if __name__ == "__main__":
    DOCUMENT.write_text(rendered(DOCUMENT.read_text()))
