"""Where in a torch DCP state dict model and optimizer are."""

from __future__ import annotations

import argparse
from typing import Any


def add_keys(parser: argparse.ArgumentParser) -> None:
    """The options that say it."""
    for part, what in (("model", "the model"), ("optim", "the optimizer")):
        parser.add_argument(
            f"--{part}-key",
            default=part,
            metavar="KEY",
            help=f'the key of {what} in the state dict, "" for the state dict itself (default: {part})',
        )


def keys_of(args: argparse.Namespace) -> dict[str, Any]:
    """The same as keyword arguments of the functions."""
    return {"model_key": args.model_key, "optim_key": args.optim_key}
