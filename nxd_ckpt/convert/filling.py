"""Filling the memory of files to be written with what other files hold: proved, in waves, read ahead of the writing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from nxd_ckpt.convert.ahead import Ahead
from nxd_ckpt.convert.inputs import Fill, Input
from nxd_ckpt.formats.tensors import Assembly, itemsize
from nxd_ckpt.runtime.arena import Arena
from nxd_ckpt.runtime.save.planned_file import PlannedFile
from nxd_ckpt.runtime.save.staging import Span, Wave, contents_of, plan_waves, views_of

WAVE = 32 * 2**20
"""Bytes that are read, and bytes that are written meanwhile: enough for any disk, and for a digest of every block."""


class Filling:
    """Fills planned files whose leaves stand for tensors of ``source``. Its two buffers are reused."""

    def __init__(self, source: Input) -> None:
        self._source = source
        self._ahead = Ahead(WAVE)

    def waves(self, files: Sequence[PlannedFile]) -> Iterator[tuple[Wave, list[memoryview]]]:
        """Each wave with its memory, filled; while the caller writes one, the next is read.

        Raises:
            DigestMismatch: what is read is not what was written; names the tensor.
        """
        with self._source.filler() as fill:
            yield from self._ahead.filled(plan_waves(files, WAVE), partial(self._fill, fill, files))

    def _fill(self, fill: Fill, files: Sequence[PlannedFile], wave: Wave, arena: Arena) -> list[memoryview]:
        views = views_of(wave, arena)
        names = {number: _names(files[number]) for number in {span.file for span in wave}}
        for span, view in zip(wave, views, strict=True):
            _fill_span(fill, files[span.file], names[span.file], span, view)
        return views


def _fill_span(fill: Fill, planned: PlannedFile, names: Mapping[int, str], span: Span, view: memoryview) -> None:
    for number, start, stop, at in contents_of(planned, span):
        leaf = Assembly.of(planned.image.tensors[number])
        size = itemsize(leaf.dtype)
        fill(leaf, start // size, stop // size, view[at : at + stop - start], names.get(number, planned.key))


def _names(planned: PlannedFile) -> dict[int, str]:
    """A tensor's name for each storage of the file."""
    return {tensor.storage: tensor.name for tensor in planned.tensors}
