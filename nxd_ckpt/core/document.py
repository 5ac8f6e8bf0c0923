"""Parsing of what comes from disk: JSON in which nothing means two things, and the boundary of every parser.

Files that are no checkpoints are told what they are: formats of other programs, and what a failed download leaves.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from nxd_ckpt.core.limits import shown
from nxd_ckpt.errors import CheckpointError, HostExhausted, MalformedFile, UnreadableFormat
from nxd_ckpt.surroundings import gc_paused

HEAD = 64
"""Bytes at the beginning of a file that tell it."""

_KINDS = {
    rb"version https://git-lfs": "a Git LFS pointer, not the file itself: run git lfs pull in the clone",
    rb"\s*<(!doctype html|html|head|body)": "an HTML page, such as a login or an error: download the file again",
    rb"\s*<(\?xml|error)": "an XML document, such as a store's error: download the file again",
}
_JSON = {rb'\s*\{\s*["}]': "a JSON text, such as a server's error: download the file again"}
_GGUF = "a GGUF file of llama.cpp: transformers makes weights of it, with from_pretrained(..., gguf_file=)"
_HDF5 = "an HDF5 file, such as Keras writes: load it there, and save its arrays with safetensors"
_NUMPY = "a file of NumPy: save its arrays with safetensors.numpy.save_file"
_PACKED = "compressed, or an archive: unpack it. A tar is read if its name ends in .tar, .tar.gz, .tgz or the like"
_FORMATS = {
    rb"GGUF": _GGUF,
    rb"\x89HDF": _HDF5,
    rb"\x93NUMPY": _NUMPY,
    rb"\x80\x02\x8a\x0al\xfc\x9c": "the format before torch 1.6. Save it again: torch.save(torch.load(path), path)",
    rb"\x80[\x02-\x05]": "a pickle of Python: save its tensors with torch.save",
    rb"\x1f\x8b|BZh|\xfd7zXZ|\x28\xb5\x2f\xfd|7z\xbc\xaf|PK\x05\x06": _PACKED,
    rb"[\t\r\n -~]{1,%d}\Z" % HEAD: "a text, without tensors",
}
_BY_NAME = {
    r"\.gguf": _GGUF,
    r"\.(h5|hdf5|keras)": _HDF5,
    r"\.np[yz]": _NUMPY,
    r"\.onnx": "an ONNX model, for inference: pass the checkpoint that it was made of",
    r"\.(index|data-\d+-of-\d+|pb)": "a file of TensorFlow: save its variables with safetensors.tensorflow.save_file",
    r"\.msgpack": "a file of Flax: save its arrays with safetensors.flax.save_file",
    r"\.(zip|7z|gz|bz2|xz|zst|nemo)": _PACKED,
    r"adapter_model\.(safetensors|bin)": "a PEFT adapter, without its base model: merge it into that with peft "
    "(merge_and_unload), save the merged model, and use it",
    r"tp\d+_sharded_checkpoint\.safetensors": "one rank's part of a model of NxD inference: use the Hugging Face "
    "directory that it was made of",
    r"\.json": "a JSON text, without tensors",
    r"optim(izer(-\d{1,6}-of-\d{1,6})?)?\.safetensors": "an optimizer's tensors: pass the directory, with their "
    "optim.json or optimizer.json",
    r"mp_rank_\d+_optim_states\.pt": "a rank's optimizer of DeepSpeed, whose zero_to_fp32.py makes weights of all",
    r"model_optim_rng\.pt": "a rank's file of Megatron-LM, whose own converter writes Hugging Face's form",
}
"""Kinds by the end of a name, of files that are read by no name or beginning."""


def instead_of_data(start: bytes) -> str | None:
    """Return what a file is that begins so, and what to do; None if it may be data."""
    return _described(start, _KINDS | _JSON | _FORMATS)


def instead_of_json(start: bytes) -> str | None:
    """Return what a file is that begins so, and what to do; None if it may be JSON."""
    return _described(start, _KINDS)


def known_by_name(name: str) -> str | None:
    """Return what a file of that name is, and what to do; None if it may be a checkpoint."""
    return next((kind for end, kind in _BY_NAME.items() if re.search(rf"({end})\Z", name)), None)


def _described(start: bytes, kinds: dict[bytes, str]) -> str | None:
    return next((kind for pattern, kind in kinds.items() if re.match(pattern, start[:HEAD], re.IGNORECASE)), None)


plain: Callable[[Any], str] = json.JSONEncoder(separators=(",", ":"), allow_nan=False, default=dict).encode
"""Return any plain value as JSON; a mapping of any kind counts as a dict.

Raises ValueError for NaN and infinity, which JSON does not have.
"""


def whole(data: bytes) -> Any:
    """Parse a whole document.

    Raises ValueError or RecursionError if it is invalid, or has a name twice, since readers differ in which value they
    take.
    """
    with gc_paused():  # it would visit nested lists again and again
        return _decode(data.decode(json.detect_encoding(data), "surrogatepass"))


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        [(name, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{name!r:.80} is there twice")
    return values


_decode: Callable[[str], Any] = json.JSONDecoder(object_pairs_hook=_once_each).decode


def small(data: bytes, where: str) -> dict[str, Any]:
    """Parse a file that is one small JSON object. Raises MalformedFile, naming ``where``, for anything else."""
    try:
        fields = whole(data)
    except (ValueError, RecursionError) as error:
        raise MalformedFile(f"{where}: not valid JSON ({instead_of_json(data) or error})") from error
    if not isinstance(fields, dict):
        raise MalformedFile(f"{where}: expected a JSON object, found {shown(fields)}")
    return fields


_LONGEST = 300


@contextmanager
def parsing(where: str, what: str) -> Iterator[None]:
    """Wrap the parsing of ``where``, which should be ``what`` ("a torch file").

    Garbage collection pauses: parsers keep what they make, and it may be much. Errors of this package, and of the
    storage (OSError, EOFError), pass: they are not about the contents.

    Raises:
        MalformedFile: any other error, also nesting that is too deep for Python.
        HostExhausted: there was no memory left.
    """
    try:
        with gc_paused():
            yield
    except (CheckpointError, OSError, EOFError):
        raise
    except MemoryError as error:
        raise HostExhausted(
            f"{where}: the host has no memory left to read it; free some, or raise the limit (ulimit -v)"
        ) from error
    except Exception as error:
        # Hostile input can make parsers raise anything; a list of exceptions would never be complete.
        cause = f"{type(error).__name__}: {error}"[:_LONGEST]
        raise MalformedFile(f"{where}: not {what} ({cause}). Restore the file, or load another one") from error


@contextmanager
def as_written() -> Iterator[None]:
    """Context of parsing bytes that are those that were written, by their digest: what is refused is not damage."""
    try:
        yield
    except UnreadableFormat:
        raise
    except MalformedFile as error:
        raise UnreadableFormat(
            f"{error}. It cannot be read by this version of nxd_ckpt, but its bytes are those that were written"
        ) from error
