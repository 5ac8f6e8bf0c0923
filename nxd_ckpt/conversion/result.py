"""The result of a conversion, or of a dry run, whatever its form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ConvertedTensor:
    """A tensor of the result.

    Attributes:
        name: its name there.
        dtype: torch's name.
        shape: its shape there; in a tag, on each rank of its pipeline stage.
        made_of: the source's tensors that it is made of.
        source_shape: whole shape of the one that it is made of; empty if there are several.
        pp_rank: its pipeline stage.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    made_of: tuple[str, ...]
    source_shape: tuple[int, ...] = ()
    pp_rank: int = 0


@dataclass(frozen=True)
class Converted:
    """The result of a conversion, or of a dry run.

    Attributes:
        source: path of the source.
        target: path of what is made.
        form: its form.
        writer: the program that wrote the source.
        nbytes: bytes of tensors that are written; of an archive, its bytes. Files that pass through unchanged do not
            count.
        topology: sizes dp, tp, pp and ep of a tag; None for other forms.
        files: bytes of each file, by name; empty for a tag and torch DCP.
        mapping: name of the mapping by which names were translated; None if they were not.
        step: number of steps of the run; None if it was not looked for, or not recorded.
        tensors: tensors of the result, where a mapping made them: "hf", and names="nxd".
        unknown: names in the source that no rule maps, each with the closest rules. Empty unless nothing was written.
        missing: tensors that the model should have but the source lacks. Empty unless nothing was written.
        left_out: descriptions of parts of the source that the result lacks.
    """

    source: str
    target: str
    form: str
    writer: str
    nbytes: int
    topology: Mapping[str, int] | None = None
    files: Mapping[str, int] = field(default_factory=dict, repr=False)
    mapping: str | None = None
    step: int | None = None
    tensors: tuple[ConvertedTensor, ...] = field(default=(), repr=False)
    unknown: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
