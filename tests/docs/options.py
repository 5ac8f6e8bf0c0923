"""The tables of docs/options.md and docs/tiers.md: what each function takes, as signatures and docstrings say it.

``python -m tests.docs.options`` writes the tables anew, in the repository's root.
"""

import inspect
import re
from dataclasses import MISSING, fields
from importlib import import_module
from typing import Any

from nxd_ckpt.options.checkpointer_options import DirectoryOptions
from tests.docs.markdown import DOCS

DOCUMENTS = [DOCS / "options.md", DOCS / "tiers.md"]
ALIASES = ("path", "checkpoint_dir_str", "save_overwrite")
"""Other names for a parameter, which the text mentions."""

_TABLE = re.compile(r"^(<!-- (keywords|fields): ([\w.]+) -->\n)(?:\|.*\n)*", re.MULTILINE)
_SECTION = re.compile(r"^(?:Args|Attributes):\n((?: {4}.*\n?)*)", re.MULTILINE)
_ENTRY = re.compile(r"^ {4}(\w[\w, ]*): (.*(?:\n {5,}.*)*)", re.MULTILINE)


def rendered(text: str) -> str:
    """``text`` with the table after every mark."""
    return _TABLE.sub(lambda found: found[1] + _table(found[2], found[3]), text)


def _table(what: str, name: str) -> str:
    module, _, attribute = name.rpartition(".")
    named = getattr(import_module(module), attribute)
    rows = _fields(named) if what == "fields" else _keywords(named)
    return "".join(f"| {' | '.join(row)} |\n" for row in [("keyword", "default", "meaning"), ("---",) * 3, *rows])


def _fields(kind: type[Any]) -> list[tuple[str, str, str]]:
    meanings, named = _described(kind) | _help(kind), [field for field in fields(kind) if field.default != MISSING]
    return [_row(field.name, field.default, meanings[field.name]) for field in named]


def _help(kind: type[Any]) -> dict[str, str]:
    return {field.name: field.metadata["help"] for field in fields(kind) if "help" in field.metadata}


def _described(documented: Any) -> dict[str, str]:
    """Meanings of parameters and attributes, by its docstring."""
    section = _SECTION.search(inspect.cleandoc(documented.__doc__))
    entries = _ENTRY.findall(section[1]) if section else []
    return {name: " ".join(meaning.split()) for names, meaning in entries for name in names.split(", ")}


def _keywords(function: Any) -> list[tuple[str, str, str]]:
    """Those that are given by name only, and not in the table of what saves and loads share."""
    said, shared = _described(function), _help(DirectoryOptions)
    return [
        _row(one.name, one.default, said[one.name])
        for one in inspect.signature(function).parameters.values()
        if one.kind is one.KEYWORD_ONLY and one.name not in ALIASES and said[one.name] != shared.get(one.name)
    ]


def _row(name: str, default: Any, meaning: str) -> tuple[str, str, str]:
    return f"`{name}`", f"`{default!r}`", meaning.replace("``", "`").replace("|", "\\|").rstrip(".")


if __name__ == "__main__":
    for document in DOCUMENTS:
        document.write_text(rendered(document.read_text()))
