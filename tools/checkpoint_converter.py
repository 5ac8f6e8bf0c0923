"""NxD's ``checkpoint_converter.py`` on top of nxd_ckpt; runs from a checkout, without installation.

``python tools/checkpoint_converter.py --convert_from_full_state --input_dir llama-hf --output_dir run/step_0 --tp_size
8 --qkv_linear True`` is ``nxd-ckpt convert --to tag --names nxd``; other modes are other forms. Unlike NxD's it
streams, never runs what a pickle holds, and takes ``False`` for false.

``--nxdt_yaml_config`` needs PyYAML, ``--hf_model_name`` huggingface_hub, which takes a token from the environment
(HF_TOKEN) or from ``huggingface-cli login``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nxd_ckpt import convert
from nxd_ckpt.cli.main import flags_of, message_of
from nxd_ckpt.core.heads import HARDWARE
from nxd_ckpt.errors import CheckpointError, InvalidArgument

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
    "pad_attn_heads": "query heads are padded to a multiple of the tensor-parallel size (trn1)",
    "load_xser": "the input is in xser files: not needed, files show it",
    "save_xser": "write xser files",
}
YAML_SIZES = {
    "num_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "hidden_size": "hidden_size",
    "vocab_size": "vocab_size",
}
"""What a YAML file of NxD Training calls config.json's sizes, below ``model``."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    if (args.input_dir is None) == (args.hf_model_name is None):
        parser.error("give --input_dir or --hf_model_name, one of the two")
    if args.hf_model_name is not None and args.mode != "convert_from_full_state":
        parser.error("--hf_model_name is for --convert_from_full_state")
    if args.i_tp_round_factor:
        parser.error(
            "--i_tp_round_factor pads the experts of DBRX, for which there is no mapping; with any other model NxD's "
            "own converter stops at it. Leave it out"
        )
    try:
        with tempfile.TemporaryDirectory() as scratch:
            _convert(args, Path(scratch))
    except (CheckpointError, OSError) as error:
        print(f"checkpoint_converter: error: {message_of(error, flags_of(parser))}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Convert checkpoints: neuronx-distributed's converter, with its flags")
    parser.add_argument("--input_dir", help="what is converted: a directory, file or URL")
    parser.add_argument("--hf_model_name", metavar="NAME", help="in its place: a model of the Hugging Face hub")
    parser.add_argument("--output_dir", required=True, help="what is made: a directory or URL")
    mode = parser.add_mutually_exclusive_group(required=True)
    for name, meaning in MODES.items():
        mode.add_argument(f"--{name}", action="store_const", const=name, dest="mode", help=meaning)
    parser.add_argument("--config", help="the model's config.json (default: the one in a Hugging Face input_dir)")
    parser.add_argument("--nxdt_yaml_config", metavar="PATH", help="NxD Training's YAML file, whose sizes count")
    parser.add_argument("--i_tp_round_factor", type=int, default=0, metavar="N", help="DBRX only, which has no mapping")
    parser.add_argument("--model_key", default="model", help="where a .pt file has its state dict (default: model)")
    for name, meaning in COUNTS.items():
        parser.add_argument(f"--{name}", type=int, default=1, help=f"{meaning} (default: 1)")
    parser.add_argument("--n_layers", type=int, help="not needed: the model shows it")
    for name, meaning in BOOLEANS.items():
        parser.add_argument(f"--{name}", type=_boolean, nargs="?", const=True, default=False, help=meaning)
    parser.add_argument(
        "--hw_backend", dest="hardware", choices=HARDWARE, default="trn1", help="the order of copies (default: trn1)"
    )
    parser.add_argument("--model_style", choices=("hf", "megatron"), default="hf", help="the tag's names (default: hf)")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output_dir")
    return parser


def _convert(args: argparse.Namespace, scratch: Path) -> None:
    model: dict[str, Any] = {
        "kv_size_multiplier": args.kv_size_multiplier,
        "hardware": args.hardware,
        "pad_attn_heads": args.pad_attn_heads,
        "config": args.config,
    }
    if args.nxdt_yaml_config is not None:
        config = _with_yaml(args.nxdt_yaml_config, args.config)
        model["config"] = scratch / "config.json"
        model["config"].write_text(json.dumps(config))
        # NxD Training does not name the architecture, and has these two.
        model["mapping"] = None if "model_type" in config else "mixtral" if "num_local_experts" in config else "llama"
    if args.model_style == "megatron":
        model["mapping"] = "megatron_llama"
    if args.mode == "convert_from_full_state":
        if args.hardware == "trn2" and args.kv_size_multiplier > 1:
            print(
                "checkpoint_converter: warning: key-value heads are written in the order of NxD's layers on trn2, "
                "which jobs and this tool read; NxD's own converter takes them for other heads",
                file=sys.stderr,
            )
        convert(
            args.input_dir or _downloaded(args.hf_model_name),
            args.output_dir,
            to="tag",
            names="nxd",
            dp=args.ep_size,
            tp=args.tp_size,
            pp=args.pp_size,
            ep=args.ep_size,
            virtual_pp=args.virtual_pp_size,
            qkv_linear=args.qkv_linear,
            fuse_qkv=args.fuse_qkv,
            coalesce_qkv=args.coalesce_qkv,
            use_xser=args.save_xser,
            model_key=args.model_key,
            overwrite=args.overwrite,
            progress=True,
            **model,
        )
    elif args.mode == "convert_to_full_state":
        convert(_tag(args.input_dir), args.output_dir, to="hf", overwrite=args.overwrite, progress=True, **model)
    else:
        convert(
            _tag(args.input_dir),
            args.output_dir,
            to="tag",
            use_xser=args.mode == "convert_to_xser",
            overwrite=args.overwrite,
            progress=True,
        )


def _with_yaml(path: str, config: str | None) -> dict[str, Any]:
    """config.json with the sizes of NxD Training's YAML file, which count as with NxD's converter."""
    try:
        import yaml
    except ImportError:
        raise InvalidArgument("--nxdt_yaml_config needs PyYAML: pip install pyyaml") from None
    try:
        model = yaml.safe_load(Path(path).read_text())["model"]
        sizes = {ours: model[theirs] for theirs, ours in YAML_SIZES.items() if theirs in model}
        if "moe" in model:
            sizes["num_local_experts"] = model["moe"]["num_experts"]
    except (yaml.YAMLError, KeyError, TypeError) as error:
        raise InvalidArgument(f"{path}: not a configuration of NxD Training: {error!r}") from error
    given = Path(config, "config.json") if config is not None and Path(config).is_dir() else config
    return {**({} if given is None else json.loads(Path(given).read_text())), **sizes}


def _downloaded(name: str) -> str:
    """The directory of a model of the Hugging Face hub, fetched unless it is in its cache."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise InvalidArgument("--hf_model_name needs huggingface_hub: pip install huggingface_hub") from None
    try:
        return str(snapshot_download(name, allow_patterns=["*.json", "*.safetensors"]))
    except (ValueError, OSError) as error:  # its own errors are of these classes
        raise InvalidArgument(f"--hf_model_name {name}: {error}") from error


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
