"""``copy_checkpoint``: a whole tag as it is, between any two places."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Executor, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass

from typing_extensions import Unpack

from nxd_ckpt.commit.publication import Publication, copy_publication
from nxd_ckpt.commit.session import Session, open_session
from nxd_ckpt.coordination.agreement import SingleProcessAgreement
from nxd_ckpt.core.names import tensors_dirs
from nxd_ckpt.core.option_classes import takes
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.core.units import bytes_of
from nxd_ckpt.errors import CheckpointError, as_checkpoint_errors
from nxd_ckpt.options.tags import CopyKeywords, CopyOptions
from nxd_ckpt.output.cp_files import Brought, FileCopy, files_to_copy
from nxd_ckpt.output.host_copies import HostCopies
from nxd_ckpt.output.locations import locate_input, locate_output
from nxd_ckpt.output.pace import Pace
from nxd_ckpt.output.source import open_source
from nxd_ckpt.output.tag_file import TagFile
from nxd_ckpt.storage.progress import report, watched
from nxd_ckpt.storage.urls import StrPath
from nxd_ckpt.tag.directory import list_tags
from nxd_ckpt.tag.opened import OpenTag


@dataclass(frozen=True)
class Copy:
    """What a copy did: how many of the tag's ``files`` were ``copied``, ``linked``, or ``kept`` from an earlier try.

    The markers that make the tag visible are not counted. ``copied_nbytes`` of all ``nbytes`` were written.
    """

    source: str
    target: str
    files: int
    nbytes: int
    copied: int = 0
    linked: int = 0
    kept: int = 0
    copied_nbytes: int = 0


@as_checkpoint_errors()
@takes(CopyOptions)
def copy_checkpoint(src: StrPath, dst: StrPath, **options: Unpack[CopyKeywords]) -> Copy:
    """Make ``dst``, a tag, an exact copy of the tag ``src``. Both may be directories or URLs.

    Keywords are the fields of :class:`~nxd_ckpt.options.tags.CopyOptions`.

    Every file is verified on the way: those of a tag of ours by its indexes, those of neuronx_distributed's by the
    digests that they carry. The copy becomes visible at once, when all of it is durable; one that is interrupted goes
    on when it is started again: files that are there and equal their digests are kept. Extra memory: 16 MiB for each
    file that is being copied.

    The manifest is the same to the last byte: the copy is the same save, of the same attempt, at the same time. So it
    stands among other tags where the original would, and is the latest only if it was saved after them. A tag without
    manifest keeps the time of its marker, except on a store, which dates it anew.

    Args:
        src: a tag's directory, or its URL.
        dst: the tag that is made. Its name may be another.

    Raises:
        InvalidArgument: ``dst`` must stay as it is, or is ``src``.
        CheckpointNotFound: no such tag, or an incomplete one.
        CorruptCheckpoint: a file is not what was saved; nothing becomes visible.
        TagReplaced: ``src`` was removed, or saved anew, while it was copied; nothing becomes visible.
        DirectoryInUse: a live job saves to the directory that holds ``dst``.
    """
    chosen = CopyOptions(**options)
    chosen.validate()
    limit = chosen.max_bytes_per_second
    rate = None if limit is None else bytes_of(limit, "max_bytes_per_second")
    started = time.monotonic()
    source = locate_input(src, chosen.storage_options)
    target = locate_output(dst, source, chosen.overwrite, chosen.written_with)
    opened = open_source(source)
    with opened.guarded():
        files = files_to_copy(opened)
    planned = Copy(source.path, target.path, len(files), sum(file.nbytes for file in files))
    if chosen.dry_run:
        return planned
    storage = target.open(chosen.durable)
    with closing(open_session(storage, Topology(), SingleProcessAgreement(), None, chosen.timeout)) as session:
        pace, saved = Pace(rate), None if opened.manifest is None else opened.manifest.attempt
        publication = copy_publication(session, target.name, chosen.overwrite, saved)
        with (
            watched("copy", planned.nbytes, lambda: pace.nbytes, chosen.progress),
            ThreadPoolExecutor(chosen.num_workers, "nxd_ckpt-copy") as threads,
            opened.guarded(verified=True),
        ):
            brought = copy_files(opened, files, publication, session, pace, threads, hard_links=chosen.hard_links)
    done = Copy(
        planned.source,
        planned.target,
        planned.files,
        planned.nbytes,
        copied=brought.count(Brought.COPIED),
        linked=brought.count(Brought.LINKED),
        kept=brought.count(Brought.KEPT),
        copied_nbytes=sum(file.nbytes for file, how in zip(files, brought, strict=True) if how is Brought.COPIED),
    )
    report("copied", f"{source.path} to {target.path}", done.copied_nbytes, started)
    return done


def copy_files(
    opened: OpenTag,
    files: Sequence[TagFile],
    publication: Publication,
    session: Session,
    pace: Pace,
    threads: Executor,
    *,
    hard_links: bool = False,
    readers: Executor | None = None,
    hosts: HostCopies | None = None,
) -> list[Brought]:
    """Bring all files of the tag ``opened``, and make it visible; how each file came.

    Each of the ``threads`` brings one file at a time. ``readers`` read ahead for them, at least as many; without them
    each file has a thread of its own for that. ``hosts`` bring what they hold, as far as they can.
    """
    order_time = _order_time(opened, files)
    publication.begin(session)
    folder = publication.folder
    bringing = FileCopy(
        opened,
        session.storage,
        folder,
        hard_links=hard_links,
        progress=pace.moved,
        readers=readers,
        hosts=hosts,
        confirm=session.confirm,
    )
    for name in bringing.surplus(files):
        bringing.remove(name)
    if hosts is not None:
        session.storage.make_dir(folder)  # by it they see that it is the same place
        files = hosts.side_by_side(files)
    brought = _bring_all(bringing, files, threads, pace)
    for directory in tensors_dirs(file.name for file in files):
        session.storage.make_dir(f"{folder}/{directory}")
    for directory in _directories(files):
        session.storage.sync_dir(f"{folder}/{directory}" if directory else folder)
    if opened.manifest is None:  # no digest tells its files from those of a later save
        opened.require_unchanged()
    session.require()
    try:
        publication.publish(session, order_time, [file.name for file in files])
    except OSError as error:
        where = f"{session.storage.url}/{publication.tag}"
        raise CheckpointError(f"could not complete {where}: {type(error).__name__}: {error}") from error
    return brought


def _bring_all(bringing: FileCopy, files: Sequence[TagFile], threads: Executor, pace: Pace) -> list[Brought]:
    """How each came. After the first that fails, all stop, and no other is begun."""
    tasks = [threads.submit(bringing.bring, file) for file in files]
    try:
        for task in wait(tasks, return_when=FIRST_EXCEPTION).done:
            task.result()
        return [task.result() for task in tasks]
    except BaseException:
        pace.stop.set()
        for task in tasks:
            task.cancel()
        wait(tasks)
        raise


def _directories(files: Sequence[TagFile]) -> list[str]:
    """Every directory that a file lies in or below, inner ones first."""
    found = {""}
    for file in files:
        parent = file.name.rpartition("/")[0]
        while parent:
            found.add(parent)
            parent = parent.rpartition("/")[0]
    return sorted(found, key=len, reverse=True)


def _order_time(opened: OpenTag, files: Sequence[TagFile]) -> float:
    """When the tag was saved: for one of ours its manifest says it, else its marker, or what there is."""
    if opened.manifest is not None:
        return opened.manifest.order_time
    info = next((info for info in list_tags(opened.storage) if info.tag == opened.tag), None)
    # What NxD's converter wrote has no marker.
    return opened.storage.time(f"{opened.tag}/{files[0].name}") if info is None else info.order_time
