"""Writing torch zip files of a tag's whole tensors: verified on the way, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from nxd_ckpt.convert.filling import filled
from nxd_ckpt.convert.unsharded import UnshardedFile
from nxd_ckpt.formats.tensors import iter_tensors
from nxd_ckpt.formats.torch_zip_writer import image_of
from nxd_ckpt.runtime.save.planned_file import NamedTensor, PlannedFile
from nxd_ckpt.runtime.save.writing import WRITERS, FileWriter
from nxd_ckpt.runtime.tag.opening import OpenTag
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
            with opened.reader() as reader:
                for [one] in filled(reader, [files]):
                    writer.write(one.wave, one.views)
            writer.finish()
        except BaseException:
            writer.abort()
            raise
