"""What exports and imports have: how names and shapes are translated between Hugging Face and NxD."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from nxd_ckpt.cli import text
from nxd_ckpt.core.heads import HARDWARE

DTYPES = ("float32", "bfloat16", "float16")


def add_mapping(parser: argparse.ArgumentParser, job_keeps: str) -> None:
    """The options; ``job_keeps`` says who keeps each key-value head several times."""
    parser.add_argument(
        "--mapping",
        metavar="NAME",
        help="a shipped mapping (gpt_neox, llama, megatron_llama, mixtral, qwen2, qwen3) or a JSON file "
        "(default: by config.json)",
    )
    parser.add_argument(
        "--kv-size-multiplier",
        type=int,
        default=1,
        metavar="N",
        help=f"how often {job_keeps} each key-value head (default: 1)",
    )
    parser.add_argument(
        "--hw-backend", choices=HARDWARE, default="trn1", help="the order of those copies (default: trn1)"
    )
    parser.add_argument(
        "--pad-attn-heads",
        action="store_true",
        help="query heads are padded with zeros to a multiple of the tensor-parallel size (trn1)",
    )


def mapping_of(args: argparse.Namespace) -> dict[str, Any]:
    """The same as keyword arguments of the functions."""
    return {
        "mapping": args.mapping,
        "kv_size_multiplier": args.kv_size_multiplier,
        "hardware": args.hw_backend,
        "pad_attn_heads": args.pad_attn_heads,
    }


def hindrances(side: str, document: dict[str, Any]) -> Iterator[str]:
    """What a dry run says of names on that side that no rule maps, and of tensors that are missing."""
    if document["unknown"]:
        yield "no rule maps:"
        rules = document["unknown"].items()
        yield from text.table((side, "closest rules"), [(name, ", ".join(close)) for name, close in rules])
    if document["missing"]:
        yield f"missing, though every such model has them: {', '.join(document['missing'])}"
