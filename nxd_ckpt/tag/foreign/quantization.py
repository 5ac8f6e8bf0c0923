"""Quantization of the weights in Hugging Face's files: by config.json, tensors beside them, and dtypes.

Numbers of a quantized weight mean nothing without its scales. MXFP4 and FP8 are dequantized
(`tag.foreign.quantized_weights`); every other method is refused by name.

Sources: huggingface/transformers v4.57 and v5.24, ``src/transformers/quantizers``, and the formats of
compressed-tensors, AutoGPTQ, AutoAWQ, bitsandbytes and torchao.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.errors import MalformedFile, UnsupportedState
from nxd_ckpt.tag.foreign.quantized_weights import Block

QUANTIZATION = "quantization_config"
_SECTIONS = {QUANTIZATION: "an unnamed method", "compression_config": "compressed-tensors"}
_DEPTH = 4
"""Nesting depth of sections in config.json that are examined: text_config, and sections in it."""

_COMPANIONS = re.compile(
    r"(^|[._])(qweight|qzeros|g_idx|SCB|weight_format|quant_map|nested_absmax|nested_quant_map|absmax"
    r"|quant_state\.bitsandbytes__\w+|weight_(scale(_inv|_2)?|packed|shape|zero_point|g_idx|global_scale)"
    r"|(input|output|act|activation)_(scale(_inv)?|zero_point|global_scale)|[kvq]_scale|scale_inv|_qdata"
    r"|\w+_proj_(blocks|scales))$"
)
_OF_ACTIVATIONS = re.compile(r"\.((input|output|activation)_scale|input_scale_ub|[kvq]_scale)$")
_INTEGERS = ("int8", "uint8")
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Quantization:
    """FP8 weights, as config.json describes them. Plain data, because it is sent to worker processes.

    Attributes:
        suffix: what a weight's name has behind it in the name of its scales.
        blocks: blocks with a scale in common; several if groups of weights differ.
        dtype: dtype of the plain numbers.
        compressed: True for the numbers that compressed-tensors makes of weights.
    """

    suffix: str
    blocks: tuple[Block, ...]
    dtype: str
    compressed: bool = False

    def rounds_products_of(self, name: str) -> bool:
        """Return whether products are rounded to the scales' dtype; transformers does not do so for experts."""
        return self.compressed and ".experts." not in name

    def is_of_activations(self, name: str) -> bool:
        """Return whether the tensor is a scale of activations or of a key-value cache, which no plain model has."""
        return _OF_ACTIVATIONS.search(name) is not None


def quantization_of(config: Mapping[str, Any], where: str) -> Quantization | None:
    """Return how config.json says that weights are quantized; None without, and for MXFP4, whose names say it.

    Args:
        config: config.json; empty without one.
        where: the directory, for errors.

    Raises:
        UnsupportedState: naming the method, if weights of this method cannot be dequantized.
        MalformedFile: sizes of blocks that are none.
    """
    sections = list(_sections(config, _DEPTH))
    methods = sorted({method for method, _ in sections}.difference(_READABLE))
    if methods:
        raise UnsupportedState(
            f"{where}: config.json says that the weights are quantized by {' and '.join(methods)} "
            f"({QUANTIZATION}), which cannot be dequantized here; {_REMEDY}. If the files hold plain weights, remove "
            "that entry from config.json"
        )
    dtype = _dtype_of(config)
    source = f"{where}: config.json's {QUANTIZATION}"
    kinds = {_READABLE[method](section, dtype, source) for method, section in sections}
    if len(kinds) > 1:
        raise UnsupportedState(
            f"{where}: sections of config.json contradict each other about how weights are quantized; {_REMEDY}"
        )
    return next(iter(kinds), None)


def refuse_companions(names: Iterable[str], where: str) -> None:
    """Raise UnsupportedState if one of the tensors ``names`` is beside quantized weights only.

    ``names`` are without those that are read as parts of a weight.
    """
    companions = sorted(name for name in names if _COMPANIONS.search(name))
    if companions:
        raise UnsupportedState(
            f"{where} holds {first_of(companions)}, which only quantized weights have: no weight of that name is "
            f"there, or config.json does not say how it is quantized; {_REMEDY}"
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


def _sections(config: Mapping[str, Any], depth: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the descriptions of quantization in config.json, or in a section of it, each with its method's name."""
    for key, value in config.items():
        if key in _SECTIONS and value:
            section = value if isinstance(value, Mapping) else {}
            if isinstance(section.get(QUANTIZATION), Mapping):
                section = section[QUANTIZATION]
            yield _method(section, _SECTIONS[key]), section
        elif isinstance(value, Mapping) and depth:
            yield from _sections(value, depth - 1)


def _method(section: Mapping[str, Any], default: str) -> str:
    method = _method_name(section, default)
    problem = _other_compressed(section) if method == "compressed-tensors" else None
    return method if problem is None else f"{method} ({problem})"


def _method_name(section: Mapping[str, Any], default: str) -> str:
    if isinstance(section.get("quant_method"), str):
        return str(section["quant_method"]).lower()
    if section.get("load_in_8bit") or section.get("load_in_4bit"):
        return "bitsandbytes"
    return str(section.get("quant_algo", default))


def _dtype_of(config: Mapping[str, Any]) -> str:
    """Return the dtype that config.json, or a section of it, says the model has; bfloat16 without."""
    sections = [config, *(value for value in config.values() if isinstance(value, Mapping))]
    dtypes = (section.get(key) for section in sections for key in ("dtype", "torch_dtype"))
    return next((dtype for dtype in dtypes if dtype in _DTYPES), "bfloat16")


def _fine_grained(section: Mapping[str, Any], dtype: str, where: str) -> Quantization:
    """Describe the method "fp8": of DeepSeek and Qwen with blocks, of Mistral with a scale for each tensor."""
    block = section.get("weight_block_size")
    return Quantization("_scale_inv", (Block(None, None) if block is None else _block(block, where),), dtype)


def _rows(section: Mapping[str, Any], dtype: str, where: str) -> Quantization:
    """Describe FBGEMM's method: a scale for each row."""
    return Quantization("_scale", (_ROW,), dtype)


def _compressed(section: Mapping[str, Any], dtype: str, where: str) -> Quantization:
    """Describe weights of compressed-tensors, after `_other_compressed`."""
    blocks = []
    for weights in _weights(section):
        by_strategy = {"tensor": Block(None, None), "channel": _ROW}
        strategy = weights.get("strategy")
        blocks.append(by_strategy[strategy] if strategy in by_strategy else _block(weights["block_structure"], where))
    return Quantization("_scale", tuple(dict.fromkeys(blocks)), dtype, compressed=True)


def _mxfp4(section: Mapping[str, Any], dtype: str, where: str) -> None:
    return None


_ROW = Block(1, None)
_READABLE: Mapping[str, Callable[[Mapping[str, Any], str, str], Quantization | None]] = {
    "mxfp4": _mxfp4,
    "fp8": _fine_grained,
    "fbgemm_fp8": _rows,
    "compressed-tensors": _compressed,
}


def _weights(section: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return how compressed-tensors quantizes weights, for each group of layers."""
    groups = section.get("config_groups")
    groups = list(groups.values()) if isinstance(groups, Mapping) else []
    weights = [group.get("weights") if isinstance(group, Mapping) else None for group in groups]
    return [each if isinstance(each, Mapping) else {} for each in weights]


def _other_compressed(section: Mapping[str, Any]) -> str | None:
    """Return what is not FP8 with plain scales in a description of compressed-tensors; None if nothing is."""
    if section.get("format") not in ("float-quantized", "naive-quantized"):
        return f"format {section.get('format')}"
    weights = _weights(section)
    if not weights:
        return "no config_groups"
    for each in weights:
        numbers = each.get("type"), each.get("num_bits"), each.get("symmetric", True)
        if numbers != ("float", 8, True):
            return "{} of {} bits, symmetric: {}".format(*numbers)
        strategy = each.get("strategy")
        if strategy not in ("tensor", "channel", "block") or (strategy == "block" and "block_structure" not in each):
            return f"strategy {strategy}"
    others = [name for name in ("sparsity_config", "transform_config") if _is_used(section.get(name))]
    return others[0] if others else None


def _is_used(section: Any) -> bool:
    return bool(section) and not (isinstance(section, Mapping) and section.get("format") == "dense")


def _block(size: Any, where: str) -> Block:
    if not isinstance(size, list) or len(size) != 2 or not all(type(each) is int and each > 0 for each in size):
        raise MalformedFile(f"{where}: a block must have a number of rows and one of columns, found {size!r:.80}")
    return Block(*size)
