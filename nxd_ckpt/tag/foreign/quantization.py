"""Signs that weights in Hugging Face's files are quantized: in config.json, in tensors beside them, in dtypes.

Numbers of a quantized weight mean nothing without its scales. MXFP4 is dequantized (`tag.foreign.quantized`); every
other method is refused by name.

Sources: huggingface/transformers v4.57, ``src/transformers/quantizers``, and the formats of compressed-tensors,
AutoGPTQ, AutoAWQ, bitsandbytes and torchao.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.errors import UnsupportedState

QUANTIZATION = "quantization_config"
_SECTIONS = {QUANTIZATION: "an unnamed method", "compression_config": "compressed-tensors"}
_READABLE = ("mxfp4",)
_DEPTH = 4
"""Nesting depth of sections in config.json that are examined: text_config, and sections in it."""

_COMPANIONS = re.compile(
    r"(^|[._])(qweight|qzeros|g_idx|SCB|weight_format|quant_map|nested_absmax|nested_quant_map|absmax"
    r"|quant_state\.bitsandbytes__\w+|weight_(scale(_inv|_2)?|packed|shape|zero_point|g_idx|global_scale)"
    r"|(input|output|act|activation)_(scale(_inv)?|zero_point|global_scale)|[kvq]_scale|scale_inv|_qdata)$"
)
_INTEGERS = ("int8", "uint8")


def refuse_quantized(config: Mapping[str, Any], names: Iterable[str], where: str) -> None:
    """Refuse weights that only their quantizer can read.

    Args:
        config: config.json; empty without one.
        names: the tensors of the files, without those of MXFP4, which is supported.
        where: the directory, for errors.

    Raises:
        UnsupportedState: naming the method, or the tensors that reveal it.
    """
    methods = sorted({*_methods(config, _DEPTH)}.difference(_READABLE))
    if methods:
        raise UnsupportedState(
            f"{where}: config.json says that the weights are quantized by {' and '.join(methods)} "
            f"({QUANTIZATION}), which cannot be dequantized here; {_REMEDY}. If the files hold plain weights, remove "
            "that entry from config.json"
        )
    companions = sorted(name for name in names if _COMPANIONS.search(name))
    if companions:
        raise UnsupportedState(
            f"{where} holds {first_of(companions)}, which only quantized weights have, and config.json does not say "
            f"of which method; {_REMEDY}"
        )


def refuse_quantized_dtype(name: str, dtype: str, where: str) -> None:
    """Raise UnsupportedState for a model's tensor of a ``dtype`` that only quantized weights have."""
    if dtype.startswith(("float8", "float4")) or dtype in _INTEGERS:
        raise UnsupportedState(
            f"{where}: {name} is {dtype}, which is a quantized weight without the scale that it needs; {_REMEDY}"
        )


def without_quantization(config: Mapping[str, Any], depth: int = _DEPTH) -> dict[str, Any]:
    """Return config.json without its description of quantization, in sections such as text_config too."""
    return {
        key: without_quantization(value, depth - 1) if isinstance(value, Mapping) and depth else value
        for key, value in config.items()
        if key not in _SECTIONS
    }


_REMEDY = "dequantize the model with the program that quantized it (transformers: model.dequantize()), and use that"


def _methods(config: Mapping[str, Any], depth: int) -> Iterator[str]:
    """Yield the quantization methods that config.json, or a section of it, names."""
    for key, value in config.items():
        if key in _SECTIONS and value:
            yield _method(value, _SECTIONS[key])
        elif isinstance(value, Mapping) and depth:
            yield from _methods(value, depth - 1)


def _method(section: Any, default: str) -> str:
    if not isinstance(section, Mapping):
        return default
    if isinstance(section.get("quant_method"), str):
        return str(section["quant_method"]).lower()
    if isinstance(section.get("quantization_config"), Mapping):
        return _method(section["quantization_config"], default)
    if section.get("load_in_8bit") or section.get("load_in_4bit"):
        return "bitsandbytes"
    return str(section.get("quant_algo", default))
