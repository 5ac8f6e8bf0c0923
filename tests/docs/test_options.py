"""docs/options.md is true: its tables are what functions take, and no function is left out."""

from __future__ import annotations

import inspect

import pytest

import nxd_ckpt
from nxd_ckpt import convert
from tests.docs.markdown import prose
from tests.docs.options import ALIASES, DOCUMENT, rendered

pytestmark = [pytest.mark.plain, pytest.mark.once]


def test_tables_are_what_functions_take() -> None:
    """Names, defaults and meanings. `python -m tests.docs.options` brings them up to date."""
    text = DOCUMENT.read_text()
    assert rendered(text) == text


def test_every_function_with_options_is_there() -> None:
    """Saving, loading, opening and each tool; and other names for a parameter are mentioned."""
    tools = [f"convert.{name}" for name in convert.__all__ if inspect.isfunction(getattr(convert, name))]
    functions = [*tools, *(name for name in nxd_ckpt.__all__ if name in ("save_checkpoint", "load_checkpoint"))]
    text = DOCUMENT.read_text()
    assert [] == [name for name in functions if f"<!-- keywords: nxd_ckpt.{name} -->" not in text]
    assert [] == [name for name in ALIASES if f"`{name}=`" not in prose(DOCUMENT)]
