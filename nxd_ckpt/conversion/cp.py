"""``copy_checkpoint``: an exact copy of a whole tag, between any two places."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace

from typing_extensions import Unpack

from nxd_ckpt.commit.publication import Publication, copy_publication
from nxd_ckpt.commit.session import Session, open_session_alone
from nxd_ckpt.core.names import folders_of, tensors_dirs
from nxd_ckpt.core.option_classes import options_of, takes
from nxd_ckpt.errors import CheckpointError, as_checkpoint_errors
from nxd_ckpt.keywords import CopyKeywords
from nxd_ckpt.options.execution import CopyOptions
from nxd_ckpt.output.cp_files import CopyMeans, CopyResult, FileCopy, HostCopies, TagFile, files_to_copy
from nxd_ckpt.output.locations import Location, leaving_none, locate_copy, locate_input
from nxd_ckpt.output.source import open_source
from nxd_ckpt.storage.progress import report, watched
from nxd_ckpt.storage.transfer import CopyPace
from nxd_ckpt.storage.urls import StrPath
from nxd_ckpt.tag.directory import list_tags
from nxd_ckpt.tag.opened import OpenTag


@dataclass(frozen=True)
class Copy:
    """The result of a copy: how many of the tag's ``files`` were ``copied``, or ``kept`` from before.

    The markers that make the tag visible do not count. ``copied_nbytes`` of all ``nbytes`` were written.
    """

    source: str
    target: str
    files: int
    nbytes: int
    copied: int = 0
    kept: int = 0
    copied_nbytes: int = 0


@as_checkpoint_errors
@takes(CopyOptions)
def copy_checkpoint(src: StrPath, dst: StrPath, **options: Unpack[CopyKeywords]) -> Copy:
    """Make ``dst``, a tag, an exact copy of the tag ``src``. Both may be directories or URLs.

    Every file is verified: files of our tags by the tag's indexes, files of neuronx_distributed by the digests in them.
    The copy becomes visible at once, when all of it is durable. An interrupted copy resumes when it is started again,
    and keeps files that equal their digests. Extra memory: 16 MiB for each file that is being copied. Keywords are the
    fields of `nxd_ckpt.options.execution.CopyOptions`.

    The manifest is the same to the last byte: the copy is the same save, of the same attempt, at the same time. So its
    order among other tags is the original's, and it is the latest only if it was saved after them. A tag without
    manifest keeps the time of its marker, except on a store, where it gets a new one.

    Args:
        src: a tag's directory, or its URL.
        dst: path or URL of the copy. Its name may differ.

    Raises:
        InvalidArgument: ``dst`` may not be replaced, is ``src``, or is a directory for tags: name the tag in it.
        CheckpointNotFound: no such tag, or an incomplete one.
        CorruptCheckpoint: a file changed since it was saved; nothing becomes visible.
        TagReplaced: ``src`` was removed, or saved again, while it was copied; nothing becomes visible.
        DirectoryInUse: a live job saves to the directory that holds ``dst``.
    """
    chosen = options_of(CopyOptions, options)
    started = time.monotonic()
    source = locate_input(src, chosen.storage_options)
    target = locate_copy(dst, source, chosen.overwrite, chosen.written_with)
    opened = open_source(source)
    with opened.guarded():
        files = files_to_copy(opened)
    planned = Copy(source.path, target.path, len(files), sum(file.nbytes for file in files))
    if chosen.dry_run:
        return planned
    with _session(target, chosen) as session:
        pace = CopyPace(chosen.max_bytes_per_second)
        saved = None if opened.manifest is None else opened.manifest.attempt
        publication = copy_publication(session, target.name, chosen.overwrite, saved)
        with (
            watched("copy", planned.nbytes, lambda: pace.nbytes, chosen.progress),
            ThreadPoolExecutor(chosen.num_workers, "nxd_ckpt-copy") as threads,
            opened.guarded(verified=True),
        ):
            means = CopyMeans(threads, pace)
            results = copy_files(opened, files, publication, session, means)
    outcomes = zip(files, results, strict=True)
    done = replace(
        planned,
        copied=results.count(CopyResult.COPIED),
        kept=results.count(CopyResult.KEPT),
        copied_nbytes=sum(file.nbytes for file, result in outcomes if result is CopyResult.COPIED),
    )
    report("copied", f"{source.path} to {target.path}", done.copied_nbytes, started)
    return done


@contextmanager
def _session(target: Location, chosen: CopyOptions) -> Iterator[Session]:
    """Hold the directory of the copy."""
    with leaving_none(target):
        storage = target.open(chosen.durable)
        with closing(open_session_alone(storage, chosen.timeout)) as session:
            yield session


def copy_files(
    opened: OpenTag,
    files: Sequence[TagFile],
    publication: Publication,
    session: Session,
    means: CopyMeans,
    hosts: HostCopies | None = None,
) -> list[CopyResult]:
    """Copy all files of the tag ``opened``, and make the copy visible; return the result for each file.

    ``hosts`` copy files on their disks themselves, if they can.
    """
    order_time = _order_time(opened, files)
    publication.begin(session)
    folder = publication.folder
    copier = FileCopy(opened, session.storage, folder, means, hosts, session.confirm)
    for name in copier.surplus(files):
        copier.remove(name)
    if hosts is not None:
        session.storage.make_dir(folder)  # it shows the hosts that this is the same directory
        files = hosts.side_by_side(files)
    results = _copy_all(copier, files, means)
    for directory in tensors_dirs(file.name for file in files):
        session.storage.make_dir(f"{folder}/{directory}")
    for directory in folders_of(file.name for file in files):
        session.storage.sync_dir(f"{folder}/{directory}" if directory else folder)
    if opened.manifest is None:  # no digest distinguishes its files from those of a later save
        opened.require_unchanged()
    session.require()
    try:
        publication.publish(session, order_time, [file.name for file in files])
    except OSError as error:
        where = f"{session.storage.url}/{publication.tag}"
        raise CheckpointError(f"could not complete {where}: {type(error).__name__}: {error}") from error
    return results


def _copy_all(copier: FileCopy, files: Sequence[TagFile], means: CopyMeans) -> list[CopyResult]:
    """Copy all files. After the first failure all threads stop, and no more files are begun."""
    tasks = [means.threads.submit(copier.copy, file) for file in files]
    try:
        for task in wait(tasks, return_when=FIRST_EXCEPTION).done:
            task.result()
        return [task.result() for task in tasks]
    except BaseException:
        means.pace.stop.set()
        for task in tasks:
            task.cancel()
        wait(tasks)
        raise


def _order_time(opened: OpenTag, files: Sequence[TagFile]) -> float:
    """Return the time of the save: from the manifest, otherwise from the marker or the first file."""
    if opened.manifest is not None:
        return opened.manifest.order_time
    info = next((info for info in list_tags(opened.storage) if info.tag == opened.tag), None)
    # Tags of NxD's converter have no marker.
    return opened.storage.time(f"{opened.tag}/{files[0].name}") if info is None else info.order_time
