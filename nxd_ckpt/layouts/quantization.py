"""Quantization of the weights in Hugging Face's files: by config.json, tensors beside them, and dtypes.

Numbers of a quantized weight mean nothing without its scales. MXFP4 and FP8 are read as if the files held the plain
numbers: these seem to be the content of a file of their own, which is computed where it is read, in parts of a few MiB.
Every other method is refused by name.

FP8: ``NAME`` holds the numbers, and ``NAME_scale_inv`` one scale for each block: a rectangle of each matrix, or the
whole tensor. Numbers times scales are the plain tensor, of the same shape.

MXFP4, as in openai/gpt-oss:

==================  ===================================================================
``NAME_blocks``     uint8 (experts, out, groups, 16): the numbers, two in each byte
``NAME_scales``     uint8 (experts, out, groups): one for the 32 numbers of a group
``NAME``            what transformers makes of both: bfloat16 (experts, 32 groups, out)
==================  ===================================================================

Sources: huggingface/transformers v4.57 and v5.24, ``src/transformers/quantizers`` and
``src/transformers/integrations/mxfp4.py``, and the formats of compressed-tensors, AutoGPTQ, AutoAWQ, bitsandbytes and
torchao.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from math import prod
from typing import Any

from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.errors import MalformedFile, UnsupportedState
from nxd_ckpt.formats.tensors import StorageSpan, TensorStub, contiguous_stride, itemsize
from nxd_ckpt.storage.base import Reader, Storage
from nxd_ckpt.storage.wrapper import StorageWrapper

GROUP = 32
"""Numbers of MXFP4 that share a scale."""
GROUP_NBYTES = GROUP // 2

NUMBERS = ("float8_e4m3fn", "float8_e5m2")
"""Dtypes of numbers of 8 bits that have scales beside them."""


@dataclass(frozen=True)
class BlockGrid:
    """Blocks of ``rows`` x ``columns`` elements of each matrix in a row-major tensor of ``shape``, which share a scale.

    The scales of a matrix are row-major too, and those of further matrices follow.
    """

    shape: tuple[int, ...]
    rows: int
    columns: int

    @property
    def counts(self) -> tuple[int, int]:
        """Blocks along both dimensions of a matrix; those at the edges may be cut off."""
        return -(-self.shape[-2] // self.rows), -(-self.shape[-1] // self.columns)

    @property
    def scales_shape(self) -> tuple[int, ...]:
        return (*self.shape[:-2], *self.counts)


_SCALES = ("float32", "bfloat16", "float16", "float8_e8m0fnu")
_SCALES_NBYTES = 16 * 2**20
"""Largest tensor of scales: a reader keeps it. With blocks of 128 x 128 it is that of 2**36 numbers or more."""
@dataclass(frozen=True)
class Fp8Weight:
    """The tensor ``name``, whose ``numbers`` have ``scales`` for each ``block``, or one for all of them.

    It is read as ``dtype``.

    Raises:
        MalformedFile: the scales are not those of such blocks.
        UnsupportedState: numbers or scales of another kind.
    """

    name: str
    numbers: TensorStub
    scales: TensorStub
    block: tuple[int, int] | None
    dtype: str

    def __post_init__(self) -> None:
        shape = self.numbers.shape
        scales = self.scales
        about = f"{self.name} is {self.numbers.dtype} {shape}, with scales {scales.dtype} {scales.shape}"
        if self.numbers.dtype not in NUMBERS:
            raise MalformedFile(
                f"{about}; expected FP8 numbers ({' or '.join(NUMBERS)}), because it has scales; the files mix those "
                "of two models, or of two versions of one"
            )
        is_plain = self.numbers.is_contiguous and scales.is_contiguous
        if len(shape) < 2 or scales.dtype not in _SCALES or scales.nbytes > _SCALES_NBYTES or not is_plain:
            raise UnsupportedState(
                f"{about}; expected at least two dimensions, and scales of {', '.join(_SCALES)} of at most "
                f"{_SCALES_NBYTES} bytes. Dequantize such a model with transformers, and save that"
            )
        expected = self.grid.scales_shape
        if scales.shape != expected and not (set(expected) == {1} and scales.shape in ((), (1,))):
            raise MalformedFile(
                f"{about}; expected scales {expected}, by the blocks that quantization_config says. The files and "
                "config.json are of two models, or the files mix two versions of one"
            )

    @property
    def grid(self) -> BlockGrid:
        shape = self.numbers.shape
        rows, columns = self.block or (max(shape[-2], 1), max(shape[-1], 1))
        return BlockGrid(shape, rows, columns)

    def stub(self, file: str) -> TensorStub:
        shape = self.numbers.shape
        span = StorageSpan(self.name, 0, self.numbers.numel * itemsize(self.dtype), None)
        return TensorStub(file, 0, self.dtype, shape, contiguous_stride(shape), span)


FP8_SCALES = "_scale_inv"
BLOCKS, SCALES = "_blocks", "_scales"
MXFP4_DTYPE = "bfloat16"
"""The dtype of MXFP4's plain numbers."""
@dataclass(frozen=True)
class Mxfp4Weight:
    """The tensor ``name``. Raises MalformedFile if its two parts do not match."""

    name: str
    numbers: TensorStub
    scales: TensorStub

    def __post_init__(self) -> None:
        *rows, nbytes = self.numbers.shape or (0,)
        fits = len(rows) == 3 and nbytes == GROUP_NBYTES and self.scales.shape == tuple(rows)
        if not fits or {self.numbers.dtype, self.scales.dtype} != {"uint8"}:
            raise MalformedFile(
                f"{self.name}{BLOCKS} is {self.numbers.dtype} {self.numbers.shape} and {self.name}{SCALES} "
                f"{self.scales.dtype} {self.scales.shape}; expected MXFP4, uint8 (experts, out, groups, "
                f"{GROUP_NBYTES}) and uint8 (experts, out, groups). Make bfloat16 weights of "
                "other kinds with transformers, and save those"
            )

    def stub(self, file: str) -> TensorStub:
        """Return the stub of the dequantized tensor in ``file``, where experts and outputs come before inputs."""
        experts, out, groups, _ = self.numbers.shape
        inner = groups * GROUP
        nbytes = prod((experts, out, inner)) * itemsize(MXFP4_DTYPE)
        span = StorageSpan(self.name, 0, nbytes, None)
        return TensorStub(file, 0, MXFP4_DTYPE, (experts, inner, out), (out * inner, 1, inner), span)


QuantizedWeight = Fp8Weight | Mxfp4Weight


class DequantizedStorage(StorageWrapper):
    """Storage that seems to hold a file of each added tensor, with its plain numbers."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self._weights: dict[str, tuple[QuantizedWeight, str, str]] = {}

    def add(self, key: str, numbers: str, scales: str, weight: QuantizedWeight) -> None:
        """Register ``key`` as the file of ``weight``, whose parts are in the files ``numbers`` and ``scales``."""
        self._weights[key] = weight, numbers, scales

    def open(self, key: str) -> Reader:
        if key not in self._weights:
            return self.inner.open(key)
        from nxd_ckpt.layouts.dequantizing import reader_of

        weight, numbers, scales = self._weights[key]
        return reader_of(weight, self.inner.open(numbers), self.inner.open(scales))

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        with closing(self.open(key)) as reader:
            reader.read_ranges([(offset, buffer)])


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
        block: rows and columns of a matrix that share a scale; None if all of a tensor do.
        dtype: dtype of the plain numbers.
    """

    block: tuple[int, int] | None
    dtype: str

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
    methods = sorted({method for method, _ in sections} - {"fp8", "mxfp4"})
    if methods:
        raise UnsupportedState(
            f"{where}: config.json says that the weights are quantized by {' and '.join(methods)} "
            f"({QUANTIZATION}), which cannot be dequantized here; {_REMEDY}. If the files hold plain weights, remove "
            "that entry from config.json"
        )
    source = f"{where}: config.json's {QUANTIZATION}"
    dtype = _dtype_of(config)
    kinds = {
        None if method == "mxfp4" else Quantization(_block(section, source), dtype) for method, section in sections
    }
    if len(kinds) > 1:
        raise UnsupportedState(
            f"{where}: sections of config.json contradict each other about how weights are quantized; {_REMEDY}"
        )
    return next(iter(kinds), None)


def refuse_companions(names: Iterable[str], where: str) -> None:
    """Raise UnsupportedState if one of the tensors ``names`` is beside quantized weights only.

    ``names`` are without those that are read as parts of a weight.
    """
    others = (name for name in names if not name.endswith(".weight"))  # which nearly all are
    companions = sorted(name for name in others if _COMPANIONS.search(name))
    if companions:
        raise UnsupportedState(
            f"{where} holds {first_of(companions)}, which only quantized weights have: no weight of that name is "
            f"there, or config.json does not say how it is quantized; {_REMEDY}"
        )


def refuse_quantized_dtype(name: str, dtype: str, where: str, is_fp8: bool = False) -> None:
    """Raise UnsupportedState for a model's tensor of a ``dtype`` that only quantized weights have.

    ``is_fp8`` says whether config.json has scales of FP8 beside it.
    """
    if dtype.startswith(("float8", "float4")) or dtype in _INTEGERS:
        scale = f"no file has {name}{FP8_SCALES}" if is_fp8 else f"config.json has no {QUANTIZATION}"
        raise UnsupportedState(
            f"{where}: {name} is {dtype}, which is a quantized weight without the scale that it needs ({scale}); "
            f"{_REMEDY}"
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


def _block(section: Mapping[str, Any], where: str) -> tuple[int, int] | None:
    """Return the block of the method "fp8": DeepSeek and Qwen have one, Mistral has a scale for each tensor."""
    size = section.get("weight_block_size")
    if size is None:
        return None
    if not isinstance(size, list) or len(size) != 2 or not all(type(each) is int and each > 0 for each in size):
        raise MalformedFile(f"{where}: a block must have a number of rows and one of columns, found {size!r:.80}")
    return size[0], size[1]
