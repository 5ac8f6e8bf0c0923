"""Commands that look for damage, and for a resume that would go wrong: ``verify``, ``doctor`` and ``selftest``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nxd_ckpt.cli import text
from nxd_ckpt.cli.command import Command, located, opening
from nxd_ckpt.core import units
from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.core.units import size
from nxd_ckpt.errors import CorruptCheckpoint
from nxd_ckpt.options.execution import OpenOptions

if TYPE_CHECKING:
    from nxd_ckpt.checkpoint import Checkpoint
    from nxd_ckpt.examine.doctor import Examination
    from nxd_ckpt.storage.urls import StorageOptions


def _run(args: argparse.Namespace) -> int:
    from nxd_ckpt.tag.listing import locate, tags_to_verify

    options = args.storage_options
    if not args.all:
        document = _verify(*locate(args.dir, args.tag, options), args)
        problems = document["problems"]
        lines = chain(_lines(document), _advice(document["directory"], options) if problems and document["tag"] else ())
    elif args.tag is not None:
        raise argparse.ArgumentTypeError("--all verifies every tag: leave out TAG")
    else:
        directory, single = locate(args.dir, None, options)
        tags = tags_to_verify(directory, options) if single is None else [single]
        documents = [_verify(directory, tag, args) for tag in tags]
        problems = [problem for document_of_tag in documents for problem in document_of_tag["problems"]]
        document = {"ok": not problems, "tags": documents}
        lines = chain(chain.from_iterable(map(_lines, documents)), _summary(documents))
    if args.json or problems or not args.quiet:
        text.show(document, lines, as_json=args.json)
    return 1 if problems else 0


def _verify(directory: str, tag: str | None, args: argparse.Namespace) -> dict[str, Any]:
    from nxd_ckpt.storage.fsspec_storage import without_password
    from nxd_ckpt.tag.verify import Verification, verify_checkpoint

    try:
        verification = verify_checkpoint(directory, tag, storage_options=args.storage_options, progress=not args.quiet)
    except CorruptCheckpoint as error:
        if not args.all:
            raise
        verification = Verification(tag or "", 0, 0, (str(error),))
    return {
        "directory": without_password(directory),
        "tag": verification.tag,
        "ok": not verification.problems,
        "verified_by": "index" if verification.ours else "zip",
        "files": verification.files,
        "nbytes": verification.nbytes,
        "verified_nbytes": verification.verified,
        "undigested_nbytes": verification.undigested,
        "problems": list(verification.problems),
        "guests": list(verification.guests),
    }


def _advice(directory: str, options: StorageOptions | None) -> Iterator[str]:
    from nxd_ckpt.storage.fsspec_storage import without_password
    from nxd_ckpt.storage.urls import open_storage
    from nxd_ckpt.tag.directory import holds_tags

    if holds_tags(open_storage(directory, storage_options=options)):  # else it is a model of others
        yield f"  nxd-ckpt verify --all {without_password(directory)} says which tags are undamaged, of which a load"
        yield "  with fallback=True takes the newest"


def _summary(documents: Sequence[dict[str, Any]]) -> Iterator[str]:
    readable = [document for document in documents if document["ok"]]
    undamaged = [document["tag"] for document in readable if _has_digests(document)]
    newest = f"; the newest is {undamaged[-1]}" if undamaged else ""
    others = len(readable) - len(undamaged)
    unknown = f"; {others} readable, and without digests that could show damage" if others else ""
    yield f"{len(undamaged)} of {units.count(len(documents), 'tag')} undamaged{newest}{unknown}"


def _has_digests(document: dict[str, Any]) -> bool:
    return bool(document["verified_nbytes"] or not document["nbytes"])


def _lines(document: dict[str, Any]) -> Iterator[str]:
    problems = document["problems"]
    where = "/".join(filter(None, (document["directory"], document["tag"])))
    if problems:
        state = f"DAMAGED, {units.count(len(problems), 'problem')}"
    elif _has_digests(document):
        state = "ok"
    else:
        state = "readable, and without digests that could show damage"
    yield f"{where}: {state}"
    yield from (f"  problem: {problem}" for problem in problems)
    if not document["files"]:
        yield "  no file was read"
        return
    read = f"{units.count(document['files'], 'file')}, {size(document['nbytes'])}"
    verified = document["verified_nbytes"]
    if document["verified_by"] == "index":
        only = "only " * bool(problems)
        yield f"  read {read}, and the index; {only}{size(verified)} are what nxd_ckpt wrote, byte for byte"
        if guests := document["guests"]:
            others = units.count(len(guests), "file")
            yield f"  not read: {others} of others, which nxd_ckpt has no digest of: {first_of(guests)}"
        return
    undigested = document["undigested_nbytes"]
    around = document["nbytes"] - verified - undigested
    contents = f"all {size(verified)} of contents" if document["ok"] and not undigested else size(verified)
    yield f"  read {read}; {contents} equal their digests"
    unverified = [f"{size(undigested)} of contents"] if undigested else []
    rest = "headers and padding" if document["ok"] else "headers, padding and what is damaged"
    yield f"  without a digest: {', '.join([*unverified, f'{size(around)} of {rest}'])}"


VERIFY = Command(
    "verify",
    example="nxd-ckpt verify run1",
    summary="verify that a checkpoint is what was written",
    description=(
        "Read every file of a complete tag and compare it with the recorded digests. For a tag of nxd_ckpt they cover "
        "every byte. Files of neuronx-distributed carry a CRC-32 for each tensor and each pickle: these are compared, "
        "files that others refer to must exist, and bytes without a digest are counted. Exit code 1 if there is a "
        "problem."
    ),
    operands=(
        ("DIR", "a checkpoint directory or URL, or a tag in it"),
        ("TAG?", "which one (default: the latest complete one)"),
    ),
    switches={"--all": "verify every complete tag in DIR, oldest first"},
    other_names={"--tag": "DIR TAG"},
    quiet=True,
    run=_run,
)


def _doctor(args: argparse.Namespace) -> int:
    from nxd_ckpt.checkpoint import open_checkpoint
    from nxd_ckpt.examine.doctor import examine_alone, examine_checkpoint
    from nxd_ckpt.tag.identity import of_latest

    if args.alone and args.before is not None:
        raise argparse.ArgumentTypeError("--alone examines one tag: leave out BEFORE")

    def examine() -> Examination:
        directory, tag, options = located(args.tag, args)
        after = open_checkpoint(directory, tag, **opening(args, options))
        progress = not args.quiet
        try:
            return examine_checkpoint(after, before=_open_before(args, after), progress=progress)
        except CorruptCheckpoint as error:  # of the tag before, which cannot be opened
            return examine_alone(after, error, progress=progress)

    examination = of_latest(True, examine)
    document = {"ok": bool(examination), **asdict(examination)}
    if args.json or examination.findings or not args.quiet:
        directory, _, options = located(args.tag, args)
        is_damaged = any(finding.kind == "files" for finding in examination.findings)
        lines = chain(_doctor_lines(document), _advice(directory, options) if is_damaged else ())
        text.show(document, lines, as_json=args.json)
    passed = not examination.findings if args.strict else bool(examination)
    return 0 if passed else 1


def _open_before(args: argparse.Namespace, after: Checkpoint) -> Checkpoint | None:
    """Open the tag before, unless there is none or --alone is given."""
    from nxd_ckpt.checkpoint import open_checkpoint
    from nxd_ckpt.tag.listing import tag_before

    directory, tag, options = located(args.tag if args.before is None else args.before, args)
    if args.before is None:
        tag = None if args.alone else tag_before(after.opened)
        if tag is None:
            return None
    return open_checkpoint(directory, tag, **opening(args, options))


_SHOWN = 3
"""Findings of one kind that are shown whole; of the others, what they are about."""


def _doctor_lines(document: dict[str, Any]) -> Iterator[str]:
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for finding in document["findings"]:
        groups.setdefault((finding["severity"], finding["kind"]), []).append(finding)
    for (severity, kind), group in groups.items():
        for finding in group[:_SHOWN]:
            what = finding["what"]
            yield f"{severity}: {what}: {finding['message'].removeprefix(f'{what}/')}"
        if len(group) > _SHOWN:
            more = first_of(finding["what"] for finding in group[_SHOWN:])
            yield f"{severity}: {units.count(len(group) - _SHOWN, 'more finding')} of {kind} (--json has all): {more}"
    yield from (f"not examined: {problem}" for problem in document["problems"])
    problems = sum(finding["severity"] == "problem" for finding in document["findings"])
    counts = {"problem": problems, "doubt": len(document["findings"]) - problems}
    findings = ", ".join(units.count(number, noun) for noun, number in counts.items() if number)
    yield f"{document['tag']}: {findings or 'ok'}"
    step = "" if document["step"] is None else f"step {document['step']}"
    if document["before"] is None:
        yield f"  {step or 'steps are not counted'}; examined by itself"
    else:
        was = "" if document["step_before"] is None else f" (step {document['step_before']})"
        yield f"  {step or 'steps are not counted'}; examined after {document['before']}{was}"
        if document["step"] is not None and document["step"] < (document["step_before"] or 0):
            yield "  (if the tags were named in the wrong order: as for diff, the earlier one is the first)"
    if any(kind == "files" for _, kind in groups):
        yield f"  no tensor was examined; nxd-ckpt verify {document['tag']} lists what is damaged"
    else:
        yield f"  {units.count(document['tensors'], 'tensor')}, {size(document['nbytes'])} were read"
    if not document["as_recorded"]:
        yield "  (names and cuts that you passed are not checked: exchanged names of equal shapes go unnoticed)"


DOCTOR = Command(
    "doctor",
    example="nxd-ckpt doctor run1",
    summary="check that a checkpoint can be resumed from, and was resumed correctly",
    description=(
        "Examine a tag: its values are finite, its ranks are of one step. And whether it continues the one before it: "
        "steps and weights moved, no part is missing. For a directory, its latest tag is compared with the one before. "
        "Everything is read and verified. Exit code 1 if there is a problem. Doubts, which may have an innocent "
        "reason, are only shown, unless --strict is given."
    ),
    operands=(
        ("BEFORE?", "an earlier tag (default: the one before TAG)"),
        ("TAG", "a tag, or a directory for its latest one; or their URL"),
    ),
    switches={
        "--alone": "examine the tag by itself, without the one before",
        "--strict": "exit with code 1 for doubts too",
    },
    options=OpenOptions,
    quiet=True,
    run=_doctor,
)


_REPORT = "nxd-ckpt-selftest.json"


def _selftest(args: argparse.Namespace) -> int:
    from nxd_ckpt.examine.selftest import page_lines, run_selftest

    if not 0 < args.size <= 2**40:
        raise argparse.ArgumentTypeError(f"--size must be more than 0 (MiB), found {args.size:g}")
    document = run_selftest(
        args.dir or ".",
        device=args.device,
        ranks=args.ranks,
        nbytes=int(args.size * 2**20),
        storage_options=args.storage_options,
        timeout=args.timeout,
    )
    if document is None:  # one rank of a torchrun: rank 0 shows the page
        return 0
    lines = [*page_lines(document), *_written(args.report, document)]
    text.show(document, lines, as_json=args.json, wide=True)
    return 0 if document["ok"] else 1


def _written(path: str, document: dict[str, Any]) -> list[str]:
    """Write the report and return what the page says of it."""
    try:
        Path(path).write_text(json.dumps(document, indent=2))
    except OSError as error:
        print(f"nxd-ckpt: warning: {path}: no report was written: {error.strerror}", file=sys.stderr)
        return []
    return [f"report, to attach to an issue: {path}"]


def _add_selftest_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="neuron, xla, cuda, cpu or another that torch knows (default: what is found)")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="ranks to start, 2 or more (default: 2)")
    parser.add_argument(
        "--size",
        type=float,
        default=256.0,
        metavar="MIB",
        help="MiB that each rank saves to measure speed; with few the speeds say little (default: 256)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="time after which what has not finished has failed (default: 300)",
    )
    parser.add_argument("--report", default=_REPORT, metavar="FILE", help=f"the report (default: {_REPORT})")


SELFTEST = Command(
    "selftest",
    example="nxd-ckpt selftest --device neuron /fsx/run1",
    summary="check that nxd_ckpt works on this hardware and storage",
    description=(
        "Train a small model on the device, on two ranks or more; save, kill, resume, load on the CPU, and compare; "
        "ask the storage for what it must promise; measure stall and speed beside a plain copy and plain files. It "
        "starts its ranks itself, or is started by torchrun (torchrun ... -m nxd_ckpt.cli selftest). All files are in "
        "a folder of DIR that is removed at the end. The report has versions, settings of Neuron and XLA, times and "
        "tracebacks, and no credentials. Exit code 0 if all is well, 1 if a check failed, 2 if nothing can be tested."
    ),
    operands=(
        ("DIR?", "the directory or URL to be tested, where checkpoints will be (default: the current directory)"),
    ),
    add_flags=_add_selftest_flags,
    run=_selftest,
    code_of_error=2,
)
