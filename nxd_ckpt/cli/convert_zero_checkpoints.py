"""``nxd_convert_zero_checkpoints``, as scripts call NxD's: its flags, and what its parser and it make of them."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from nxd_ckpt.cli import text
from nxd_ckpt.cli.main import main as run
from nxd_ckpt.cli.main import parsers
from nxd_ckpt.core.names import DONE, MANIFEST, MARKER, is_own, is_own_folder

_NAME = "nxd_convert_zero_checkpoints"
_COMMAND = "convert"


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``nxd-ckpt convert`` with NxD's command line, and return the exit code.

    As with NxD, flags may be abbreviated, flags that nobody knows are ignored (with a warning), an existing output is
    replaced, and ``--convert_to_full`` takes no heed of ``--dp_size``. Flags of ``nxd-ckpt convert`` are known.
    """
    parser = argparse.ArgumentParser(
        prog=_NAME,
        description="Unshard a ZeRO-1 optimizer, or shard it again for another data-parallel size: the command of "
        "neuronx-distributed, done by nxd-ckpt convert, whose flags it takes too. Replaces an existing output.",
    )
    parser.add_argument("--input_dir", required=True, help="a tag's directory or URL, or what a converter wrote")
    parser.add_argument("--output_dir", required=True, help="the tag that is made: a directory or URL")
    parser.add_argument("--num_workers", type=int, default=1, help="processes that convert (default: 1)")
    parser.add_argument("--dp_size", type=int, help="the new data-parallel size, with --convert_to_sharded")
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--convert_to_full", action="store_true", help="unshard")
    mode.add_argument("--convert_to_sharded", action="store_true", help="shard for --dp_size ranks")
    nxds, others = parser.parse_known_args(argv)
    words = [nxds.input_dir, nxds.output_dir, "--to", "tag", "--num-workers", str(nxds.num_workers), "--overwrite"]
    words += ["--optimizer-form", "zero1_full" if nxds.convert_to_full else "zero1"]
    ignored = parsers()[1][_COMMAND].parse_known_args([*words, *others])[1]
    passed_on = _without(others, ignored)
    if nxds.convert_to_sharded and nxds.dp_size is None:
        parser.error("--convert_to_sharded needs --dp_size, the new data-parallel size")
    if nxds.dp_size is not None and nxds.convert_to_full:
        ignored = [*ignored, "--dp_size", str(nxds.dp_size)]
    elif nxds.dp_size is not None:
        words += ["--dp", str(nxds.dp_size)]
    if ignored:
        print(f"{_NAME}: ignored, as by NxD: {text.printable(' '.join(ignored))}", file=sys.stderr)
    return _run_in_place_of_nxds(Path(nxds.output_dir), [_COMMAND, *words, *passed_on])


def _run_in_place_of_nxds(output: Path, words: Sequence[str]) -> int:
    """Run the command; what NxD's tool left in ``output`` is set aside, and comes back if the command fails.

    It writes no mark of a checkpoint, without which nothing else replaces a directory.
    """
    left = output / "optim"
    marked = any((output / mark).exists() for mark in (MARKER, DONE, MANIFEST))
    paths = [f"optim/{name}" for name in os.listdir(left)] if left.is_dir() and not marked else []
    if not paths or not all(is_own(path) or is_own_folder(path) for path in paths):
        return run(words)
    aside = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    code = 1
    left.rename(aside / "optim")
    try:
        code = run(words)
    finally:
        if code != 0:
            (aside / "optim").rename(left)
        shutil.rmtree(aside)
    return code


def _without(words: Sequence[str], some: Sequence[str]) -> list[str]:
    """Return ``words`` without those of ``some``, which come in the same order."""
    left = list(some)
    rest = []
    for word in words:
        if left and word == left[0]:
            del left[0]
        else:
            rest.append(word)
    return rest
