"""Kinds of files that are no checkpoints: formats of other programs, and what a failed download leaves. Pure."""

from __future__ import annotations

import re

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
    r"\.json": "a JSON text, without tensors",
    r"optim(izer(-\d{1,6}-of-\d{1,6})?)?\.safetensors": "an optimizer's tensors: pass the directory, with their "
    "optim.json or optimizer.json",
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
