"""``nxd-ckpt prune``, ``rm``, ``pin`` and ``unpin``: remove tags by rules or name, and exempt tags from rules."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from typing import Any

from nxd_ckpt.cli import text
from nxd_ckpt.cli.command import Command, options_of
from nxd_ckpt.core import units
from nxd_ckpt.core.retention_rules import Best, Every, Last, Rule, Within
from nxd_ckpt.core.suggestions import first_of, listed
from nxd_ckpt.core.tags import latest
from nxd_ckpt.errors import CheckpointNotFound, InvalidArgument
from nxd_ckpt.options.execution import PruneOptions

_UNITS = {"d": "days", "h": "hours", "min": "minutes"}


def _run(args: argparse.Namespace) -> int:
    from nxd_ckpt.prune import prune_checkpoints

    if not args.retain:
        raise argparse.ArgumentTypeError("give rules: --last, --every, --best or --within")
    done = prune_checkpoints(args.dir, args.retain, **options_of(args, PruneOptions))
    document = {
        "directory": done.directory,
        "kept": [{"tag": tag, "because": list(why)} for tag, why in done.kept.items()],
        "removed": list(done.removed),
        "damaged": dict(done.damaged),
        "verified": list(done.verified),
        "unverified": dict(done.unverified),
        "dry_run": args.dry_run,
    }
    if args.json or done.damaged or done.unverified or not args.quiet:
        text.show(document, _lines(document, args.verify), as_json=args.json)
    return 1 if done.damaged else 0


def _lines(document: dict[str, Any], verify: bool | None) -> Iterator[str]:
    removed = len(document["removed"])
    verb = "would be" if document["dry_run"] else "is" if removed == 1 else "are"
    yield f"{document['directory']}: {units.count(removed, 'tag')} {verb} removed"
    damaged = document["damaged"]
    rows = [(tag, "goes", "") for tag in document["removed"]]
    for tag in document["kept"]:
        rows.append((tag["tag"], "stays", "damaged" if tag["tag"] in damaged else ", ".join(tag["because"])))
    yield from text.table(("TAG", "", "BECAUSE"), rows)
    for tag, why in damaged.items():
        yield f"problem: {why}. {tag} stays, and no rule counts it; nxd-ckpt rm removes it"
    read = document["verified"]
    if read:
        yield f"every digest matches in {first_of(read)}"
    doubts = document["unverified"]
    yield from (f"not verified: {doubt}" for doubt in doubts.values())
    unread = [tag["tag"] for tag in document["kept"] if tag["tag"] not in (*read, *damaged, *doubts)]
    if unread:
        advice = "no tag goes" if verify else "--verify reads all that stay, if any tag goes"
        yield f"not read, and may be damaged: {first_of(unread)}; {advice}"


def _best(text: str) -> Rule:
    metric, _, rest = text.partition(":")
    count, _, mode = rest.partition(":")
    return _rule(lambda: Best(metric, _count(count or "1"), mode or "min"))  # type: ignore[arg-type]


def _within(text: str) -> Rule:
    match = re.fullmatch(r"([0-9.]+) ?(d|h|min)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected a time such as 30min, 2h or 3d, found {text!r}")
    return _rule(lambda: Within(**{_UNITS[match[2]]: float(match[1])}))


def _count(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected a whole number, found {text!r}") from error


def _rule(make: Callable[[], Rule]) -> Rule:
    try:
        return make()
    except InvalidArgument as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s DIR RULE [RULE ...] [options]"
    rules = parser.add_argument_group("rules, of which at least one is needed")
    for flag, metavar, rule, about in (
        ("--last", "N", lambda text: _rule(lambda: Last(_count(text))), "keep the newest N tags"),
        (
            "--every",
            "STEPS",
            lambda text: _rule(lambda: Every(_count(text))),
            "keep the tags whose step, a number in the name, is a multiple of STEPS",
        ),
        (
            "--best",
            "METRIC[:N[:max]]",
            _best,
            "keep the N tags (default: 1) with the lowest METRIC that was passed to the save; with max the highest",
        ),
        ("--within", "TIME", _within, "keep the tags saved at most TIME before the newest: 30min, 2h, 3d"),
    ):
        rules.add_argument(flag, dest="retain", metavar=metavar, type=rule, action="append", help=about)
    parser.add_argument(
        "--no-verify", dest="verify", action="store_false", default=None, help="do not even read the newest tag first"
    )


PRUNE = Command(
    "prune",
    example="nxd-ckpt prune run1 --last 3 --every 1000 --dry-run",
    summary="remove the checkpoints that no rule keeps",
    description=(
        "Remove the complete tags in a directory that none of the given rules keeps. Pinned tags, the newest tag, and "
        "anything that is not a complete checkpoint always stay. A damaged tag does not count: a rule keeps an older "
        "one in its place. Before anything is removed, and in a dry run, every byte of the newest tag is read; "
        "--verify reads all tags that stay, --no-verify none. While a job that saves there is running, the command is "
        "refused, so it does not disturb the job."
    ),
    operands=(("DIR", "a checkpoint directory or URL"),),
    add_flags=_add_flags,
    options=PruneOptions,
    other_names={"--keep": "--last", "--num-kept-ckpts": "--last"},
    run=_run,
)


def _pin(args: argparse.Namespace) -> int:
    from nxd_ckpt.prune import pin_checkpoint

    directory, (tag,) = _named(args)
    pin_checkpoint(directory, tag, storage_options=args.storage_options)
    text.show({"tag": tag, "pinned": True}, [f"{tag} is pinned"], as_json=args.json)
    return 0


def _unpin(args: argparse.Namespace) -> int:
    from nxd_ckpt.prune import unpin_checkpoint
    from nxd_ckpt.tag.listing import directory_document

    directory, (tag,) = _named(args)
    was_pinned = unpin_checkpoint(directory, tag, storage_options=args.storage_options)
    if not was_pinned:
        tags = [tag["tag"] for tag in directory_document(directory, args.storage_options)["tags"]]
        if tag not in tags:
            raise CheckpointNotFound(f"{directory}: no tag {listed([tag], tags)}, pinned or not")
    line = f"{tag} is no longer pinned" if was_pinned else f"{tag} was not pinned"
    text.show({"tag": tag, "pinned": False, "was_pinned": was_pinned}, [line], as_json=args.json)
    return 0


def _named(args: argparse.Namespace) -> tuple[str, list[str]]:
    """Return the directory and the tags that are named: ``DIR TAG ...``, or their paths ``DIR/TAG ...``."""
    from nxd_ckpt.tag.listing import locate

    others = args.tag if isinstance(args.tag, list) else [args.tag][: args.tag is not None]
    directory, tag = locate(args.dir, None, args.storage_options)
    if tag is None:
        places = [locate(directory, other, args.storage_options) for other in others]
    else:
        places = [locate(path, None, args.storage_options) for path in (args.dir, *others)]
    tags = [tag for _, tag in places if tag is not None]
    if not tags:
        raise argparse.ArgumentTypeError(f"{directory} is a directory of tags: name a TAG in it")
    if len(tags) < len(places) or {place for place, _ in places} != {directory}:
        raise argparse.ArgumentTypeError("give one directory and tags in it, or the paths of tags in one directory")
    return directory, tags


def _rm(args: argparse.Namespace) -> int:
    from nxd_ckpt.prune import remove_alone
    from nxd_ckpt.storage.urls import open_storage
    from nxd_ckpt.tag.choosing import settled_tags

    directory, tags = _named(args)
    for dry_run in (True, False)[: 2 - args.dry_run]:  # what is refused is refused before the lease is taken
        done = remove_alone(
            directory, tags, pinned=args.pinned, dry_run=dry_run, storage_options=args.storage_options
        )
        if done.refused:
            gone = f"{', '.join(done.removed)} removed" if done.removed else "nothing was removed"
            raise InvalidArgument(f"{'; '.join(done.refused.values())}; {gone}")
    left = settled_tags(open_storage(directory, storage_options=args.storage_options))
    newest = latest(info for info in left if info.tag not in done.removed)
    document = {
        "directory": directory,
        "removed": list(done.removed),
        "latest": None if newest is None else newest.tag,
        "dry_run": args.dry_run,
    }
    text.show(document, _rm_lines(document), as_json=args.json)
    return 0


def _rm_lines(document: dict[str, Any]) -> Iterator[str]:
    removed = document["removed"]
    verb = "would be" if document["dry_run"] else "is" if len(removed) == 1 else "are"
    yield f"{document['directory']}: {', '.join(removed)} {verb} removed"
    is_now = "would be" if document["dry_run"] else "is"
    newest = document["latest"]
    yield f"  no complete tag {is_now} left" if newest is None else f"  {newest} {is_now} the latest tag"


RM = Command(
    "rm",
    example="nxd-ckpt rm run1 step_100 step_200",
    summary="remove checkpoints by name",
    description=(
        "Remove one tag or several: all of them or, if one is absent, pinned or no checkpoint, none. A tag may also be "
        "incomplete or damaged. While a job that saves there is running, the command is refused. A tag loses its name "
        "at once, and its files after that, so that no part of it is ever taken for a checkpoint."
    ),
    operands=(
        ("DIR", "a checkpoint directory or URL, or a tag in it"),
        ("TAG*", "which tags in it, by name or step; or the paths of more tags in the same directory"),
    ),
    switches={
        "--pinned": "remove pinned tags too",
        "--dry-run": "remove nothing, and show what would be removed",
    },
    run=_rm,
)

PIN = Command(
    "pin",
    example="nxd-ckpt pin run1 step_300",
    summary="keep a checkpoint, whatever retention says",
    description=(
        "Pin a complete tag: neither a job's retention nor prune removes it until it is unpinned. A pin belongs to "
        "the name, so a tag that is saved again stays pinned. A running job may save to the directory meanwhile."
    ),
    operands=(
        ("DIR", "a checkpoint directory or URL, or a tag in it"),
        ("TAG?", "which tag in it, by name or step"),
    ),
    run=_pin,
)

UNPIN = Command(
    "unpin",
    example="nxd-ckpt unpin run1 step_300",
    summary="let retention remove a pinned checkpoint again",
    description="Undo pin. The tag itself may be gone; a tag that is not pinned stays as it is.",
    operands=PIN.operands,
    run=_unpin,
)
