"""Writing torch zip files of a tag's whole tensors: proved on the way, in bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from nxd_ckpt.convert.ahead import Ahead
from nxd_ckpt.convert.filling import WAVE
from nxd_ckpt.convert.shard_writer import read_run
from nxd_ckpt.convert.unsharded import UnshardedFile
from nxd_ckpt.formats.tensors import Assembly, iter_tensors
from nxd_ckpt.formats.torch_zip_writer import image_of
from nxd_ckpt.runtime.arena import Arena
from nxd_ckpt.runtime.save.planned_file import NamedTensor, PlannedFile
from nxd_ckpt.runtime.save.staging import Wave, contents_of, plan_waves, views_of
from nxd_ckpt.runtime.save.writing import WRITERS, FileWriter
from nxd_ckpt.runtime.tag.opening import OpenTag
from nxd_ckpt.runtime.tag.reading import LeafReader
from nxd_ckpt.storage.base import Storage


def planned(file: UnshardedFile) -> PlannedFile:
    """The file's layout. Raises UnsafePickle for what cannot be pickled."""
    named = [(item.name, leaf) for item in file.items for _, leaf in iter_tensors(item.value)]
    image = image_of(file.tree())
    storage_of = {id(leaf): number for number, leaf in enumerate(image.tensors)}
    tensors = (NamedTensor(name, storage_of[id(leaf)], leaf.dtype, leaf.shape, None) for name, leaf in named)
    return PlannedFile(file.key, image, tuple(tensors))


def write_torch_files(
    opened: OpenTag,
    files: Sequence[PlannedFile],
    storage: Storage,
    folder: str,
    progress: Callable[[int], None],
) -> None:
    """Write the files below ``folder``, durably. ``progress`` is called with the bytes written so far.

    Raises:
        DigestMismatch: what is read is not what was saved; names the tensor.
    """
    with ThreadPoolExecutor(WRITERS, "nxd_ckpt-writer") as threads:
        writer = FileWriter(storage, folder, files, progress, threads)
        try:
            for wave, views in _waves(opened, files):
                writer.write(wave, views)
            writer.finish()
        except BaseException:
            writer.abort()
            raise


def _waves(opened: OpenTag, files: Sequence[PlannedFile]) -> Iterator[tuple[Wave, list[memoryview]]]:
    names = [{tensor.storage: tensor.name for tensor in file.tensors} for file in files]

    def fill(reader: LeafReader, wave: Wave, arena: Arena) -> list[memoryview]:
        views = views_of(wave, arena)
        for span, view in zip(wave, views, strict=True):
            for number, start, stop, at in contents_of(files[span.file], span):
                leaf = Assembly.of(files[span.file].image.tensors[number])
                memory = view[at : at + stop - start]
                deque(read_run(reader, leaf, start, memory, names[span.file][number]), 0)
        reader.finish()
        return views

    with opened.reader() as reader:
        yield from Ahead(WAVE).filled(plan_waves(files, WAVE), partial(fill, reader))
