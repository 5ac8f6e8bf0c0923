"""What all commands that write have: how they work, where the output goes, and what they say of it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from nxd_ckpt.cli import text
from nxd_ckpt.cli.storage_options import add_storage_options, nested
from nxd_ckpt.core.units import size

if TYPE_CHECKING:
    from nxd_ckpt.convert import Converted


def add_execution_options(parser: argparse.ArgumentParser, workers: str = "--num-workers", **output: str) -> None:
    """The options of conversions whose work can be shared; ``workers`` is how the one for processes is spelled, and
    ``output`` for :func:`add_output`."""
    parser.add_argument(workers, type=int, default=1, metavar="N", help="processes on this host (default: 1)")
    add_all_ranks(parser)
    add_output(parser, **output)


def add_all_ranks(parser: argparse.ArgumentParser) -> None:
    """Whether other processes, perhaps on other hosts, share the work."""
    parser.add_argument(
        "--all-ranks",
        action="store_true",
        help="share the work among all processes that torchrun started; each must run this same command",
    )


def add_output(
    parser: argparse.ArgumentParser,
    *,
    replaces: str = "an existing output, once the conversion has succeeded",
    dry_run: str = "say what would be made, and write nothing",
) -> None:
    """The options of every command that writes: where and how the output is made, and what is said of it."""
    parser.add_argument("--overwrite", action="store_true", help=f"replace {replaces}")
    parser.add_argument("--dry-run", action="store_true", help=dry_run)
    add_storage_options(parser, output=True)
    text.add_quiet(parser)
    text.add_json(parser)


def execution_options_of(args: argparse.Namespace) -> dict[str, Any]:
    """The same as keyword arguments of the conversions' functions."""
    return {"num_workers": args.num_workers, "all_ranks": args.all_ranks, **output_of(args)}


def output_of(args: argparse.Namespace) -> dict[str, Any]:
    """What :func:`add_output` added, likewise."""
    return {
        "overwrite": args.overwrite,
        "dry_run": args.dry_run,
        "storage_options": nested(args.storage_option),
        "output_options": nested(args.output_option),
        "progress": not args.quiet,
    }


def show_done(
    args: argparse.Namespace,
    done: Any,
    lines: Callable[[dict[str, Any]], Iterable[str]],
    *,
    is_well: bool = True,
    **more: Any,
) -> None:
    """Print what was written, or would be: the fields of ``done`` and ``more``, and ``lines`` of these for people.

    Nothing with --quiet, if all ``is_well``.
    """
    document = {**asdict(done), **more, "dry_run": args.dry_run}
    if args.json or not (args.quiet and is_well):
        text.show(document, lines(document), as_json=args.json)


def show_converted(args: argparse.Namespace, done: Converted) -> None:
    """The same of a conversion that has no more to say."""
    show_done(args, done, _converted)


def _converted(document: dict[str, Any]) -> Iterator[str]:
    sizes = "" if document["topology"] is None else f"{text.topology(document['topology'])}, "
    verb = "would be" if document["dry_run"] else "is"
    yield f"{document['source']} {verb} converted to {document['target']}: {sizes}{size(document['nbytes'])}"
