"""NxD's ``checkpoint_converter.py`` on top of nxd_ckpt; runs from a checkout, without installation.

``python tools/checkpoint_converter.py --convert_from_full_state --input_dir llama-hf --output_dir run/step_0 --tp_size
8 --qkv_linear True`` is ``nxd-ckpt import``; other modes are ``nxd-ckpt export`` and ``nxd-ckpt reshard``. Unlike NxD's
it streams, never runs what a pickle holds, and takes ``False`` for false.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nxd_ckpt.convert import export_checkpoint, import_checkpoint, reshard
from nxd_ckpt.core.heads import HARDWARE
from nxd_ckpt.errors import CheckpointError

MODES = {
    "convert_from_full_state": "a Hugging Face directory, .safetensors, .pt or .bin file becomes a tag",
    "convert_to_full_state": "a tag's model becomes a Hugging Face directory",
    "convert_from_xser": "a tag in xser files becomes one in plain files",
    "convert_to_xser": "a tag in plain files becomes one in xser files",
}
COUNTS = {
    "tp_size": "tensor-parallel size",
    "pp_size": "pipeline-parallel size",
    "ep_size": "expert-parallel size",
    "kv_size_multiplier": "how often each key-value head is kept",
    "virtual_pp_size": "chunks of the model on each pipeline rank; an output's, of an input files show it",
}
BOOLEANS = {
    "qkv_linear": "the model has GQAQKVColumnParallelLinear",
    "fuse_qkv": "and that is fused",
    "coalesce_qkv": "the model has one ColumnParallelLinear for q, k and v",
    "load_xser": "the input is in xser files: not needed, files show it",
    "save_xser": "write xser files",
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        _convert(args)
    except (CheckpointError, OSError) as error:
        print(f"checkpoint_converter: error: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Convert checkpoints: neuronx-distributed's converter, with its flags")
    parser.add_argument("--input_dir", required=True, help="what is converted: a directory, file or URL")
    parser.add_argument("--output_dir", required=True, help="what is made: a directory or URL")
    mode = parser.add_mutually_exclusive_group(required=True)
    for name, meaning in MODES.items():
        mode.add_argument(f"--{name}", action="store_const", const=name, dest="mode", help=meaning)
    parser.add_argument("--config", help="the model's config.json (default: the one in a Hugging Face input_dir)")
    parser.add_argument("--model_key", default="model", help="where a .pt file has its state dict (default: model)")
    for name, meaning in COUNTS.items():
        parser.add_argument(f"--{name}", type=int, default=1, help=f"{meaning} (default: 1)")
    parser.add_argument("--n_layers", type=int, help="not needed: the model shows it")
    for name, meaning in BOOLEANS.items():
        parser.add_argument(f"--{name}", type=_boolean, nargs="?", const=True, default=False, help=meaning)
    parser.add_argument("--hw_backend", choices=HARDWARE, default="trn1", help="the order of copies (default: trn1)")
    parser.add_argument("--model_style", choices=("hf", "megatron"), default="hf", help="the tag's names (default: hf)")
    return parser


def _convert(args: argparse.Namespace) -> None:
    names: dict[str, Any] = {"kv_size_multiplier": args.kv_size_multiplier, "hardware": args.hw_backend}
    if args.model_style == "megatron":
        names["mapping"] = "megatron_llama"
    if args.mode == "convert_from_full_state":
        import_checkpoint(
            args.input_dir,
            args.output_dir,
            dp=args.ep_size,
            tp=args.tp_size,
            pp=args.pp_size,
            ep=args.ep_size,
            virtual_pp=args.virtual_pp_size,
            config=args.config,
            qkv_linear=args.qkv_linear,
            fuse_qkv=args.fuse_qkv,
            coalesce_qkv=args.coalesce_qkv,
            use_xser=args.save_xser,
            model_key=args.model_key,
            progress=True,
            **names,
        )
    elif args.mode == "convert_to_full_state":
        export_checkpoint(_tag(args.input_dir), args.output_dir, config=args.config, progress=True, **names)
    else:
        reshard(_tag(args.input_dir), args.output_dir, use_xser=args.mode == "convert_to_xser", progress=True)


def _tag(path: str) -> str:
    """The tag itself: NxD's converter is given the directory ``model`` in it."""
    return path.rstrip("/").removesuffix("/model")


def _boolean(text: str) -> bool:
    values = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in values:
        raise argparse.ArgumentTypeError(f"expected True or False, found {text!r}")
    return values[text.lower()]


if __name__ == "__main__":
    sys.exit(main())
