"""Options: a dataclass says what keywords a function takes, and signatures, help and type checkers all follow it."""

import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nxd_ckpt import Checkpointer, Tier, convert, load_checkpoint, save_checkpoint
from nxd_ckpt.core.option_classes import _OURS, fields_of
from nxd_ckpt.errors import InvalidArgument
from nxd_ckpt.options.execution import CopyOptions
from tests.docs.markdown import REPOSITORY
from tests.options.keywords import DOCUMENT, FUNCTIONS, rendered


def test_type_checkers_are_told_what_functions_take() -> None:
    """The names and types of signatures. `python -m tests.options.keywords` brings them up to date."""
    assert rendered(DOCUMENT.read_text()) == DOCUMENT.read_text()


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda one: one.__qualname__)
def test_help_shows_every_keyword(function: Callable[..., Any]) -> None:
    """Each parameter is described once under Args of the docstring."""
    arguments = inspect.cleandoc(function.__doc__ or "").partition("\nArgs:\n")[2].partition("\n\n")[0]
    described = ", ".join(re.findall(r"^    (\w[\w, ]*): ", arguments, re.MULTILINE)).split(", ")
    assert sorted({*inspect.signature(function).parameters} - {"self"}) == sorted(described)


def test_a_misspelt_keyword_is_refused(tmp_path: Path) -> None:
    """With the one that may have been meant, before anything is touched."""
    with pytest.raises(TypeError, match=r"^save_checkpoint\(\) .* 'overwite' \(did you mean 'overwrite'\?\)$"):
        save_checkpoint(tmp_path / "run", "t", {}, overwite=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^Checkpointer\(\) .* 'timout' \(did you mean 'timeout'\?\)$"):
        Checkpointer(tmp_path / "run", timout=60)  # type: ignore[call-arg]
    with pytest.raises(InvalidArgument, match=r"'verfy' \(did you mean 'verify'\?\); the options are strict, "):
        Checkpointer(tmp_path / "run").load("t", verfy=False)  # type: ignore[call-arg]
    assert not (tmp_path / "run").exists()


def _save(*arguments: Any, **options: Any) -> None:
    Checkpointer("x").save(*arguments, **options)


def _load(*arguments: Any, **options: Any) -> None:
    Checkpointer("x").load(*arguments, **options)


def _load_latest(*arguments: Any, **options: Any) -> None:
    Checkpointer("x").load_latest(*arguments, **options)


@pytest.mark.parametrize(
    ("function", "keyword", "advice"),
    [
        (Checkpointer, "dedup", r"\(pass dedup= to Checkpointer\.save\(\)\)"),
        (Checkpointer, "max_to_keep", r"\(did you mean 'num_kept_ckpts'\?\)"),
        (Checkpointer, "checkpoint_dir_str", r"\(did you mean 'path'\?\)"),
        (Tier, "max_to_keep", r"\(did you mean 'keep'\?\)"),
        (Checkpointer, "fallbck", r"\(pass fallback= to Checkpointer\.load\(\)\)"),
        (Checkpointer, "nothing_like_it", r"'nothing_like_it'$"),
        (_save, "save_top_k", r"\(did you mean retain=\[Last"),
        (_load, "every", r"\(pass every= to Checkpointer\(\)\); the options are strict, "),
        (_load_latest, "strct", r"\(did you mean 'strict'\?\)"),
        (_load_latest, "tag", r"\(pass tag= to Checkpointer\.load\(\)\)"),
        (save_checkpoint, "preemption", r"\(pass preemption= to Checkpointer\(\)\)"),
        (save_checkpoint, "fallback", r"\(pass fallback= to load_checkpoint\(\)\)"),
        (convert, "max_shard_size", r"\(did you mean 'size_per_shard'\?\)"),
        (convert, "retain", "'retain'$"),
        (save_checkpoint, "save_xser", r"\(did you mean 'use_xser'\?\)"),
        (_save, "asynchronous", r"\(did you mean 'async_save'\?\)"),
        (save_checkpoint, "sched", r"\(did you mean 'scheduler'\?\)"),
        (load_checkpoint, "shard", "'shard'$"),
        (load_checkpoint, "process_count", "'process_count'$"),
        (save_checkpoint, "use_safetensors", "'use_safetensors'$"),
    ],
)
def test_a_keyword_of_another_function_or_library_is_known(
    function: Callable[..., Any], keyword: str, advice: str
) -> None:
    """The error says which keyword takes its place, and which function has it."""
    with pytest.raises((TypeError, InvalidArgument), match=advice):
        function("absent", **{keyword: 1})


def test_keywords_of_other_libraries_stand_for_ours() -> None:
    ours = {name for function in FUNCTIONS for name in inspect.signature(function).parameters}
    assert {*_OURS.values()} <= ours


def test_options_of_a_class_come_before_those_of_its_bases() -> None:
    """What is special about a tool is what its help begins with."""
    names = [field.name for field in fields_of(CopyOptions)]
    assert ["num_workers", "max_bytes_per_second", "timeout", "overwrite"] == names[:4]


def test_flags_are_described_without_docstrings() -> None:
    command = [sys.executable, "-OO", "-m", "nxd_ckpt.cli", "convert", "--help"]
    outcome = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert re.search(r"^  --overwrite +replace an existing output once", outcome.stdout, re.MULTILINE)
