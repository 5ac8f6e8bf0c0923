"""Hugging Face files of a model without its head, by the names of the model with the head. Reads headers only."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from nxd_ckpt.core.mapping import ModelMapping
from nxd_ckpt.formats.tensors import Assembly, TensorStub
from nxd_ckpt.hugging_face.mapped_directory import HuggingFaceTensors


class HeadedTensors:
    """The tensors of ``directory`` by their names in the rules of ``mapping``.

    transformers omits the base model's prefix if it saves that alone, as in openai-community/gpt2, and loads such files
    into the model with the head too.
    """

    def __init__(self, directory: HuggingFaceTensors, mapping: ModelMapping) -> None:
        self._directory, self._mapping = directory, mapping

    @property
    def where(self) -> str:
        return self._directory.where

    @property
    def names(self) -> list[str]:
        return sorted(self._in_files)

    def tensor(self, name: str, tied: Mapping[str, str] | None = None) -> TensorStub | Assembly:
        in_files = {name: self._in_files.get(kept, kept) for name, kept in (tied or {}).items()}
        return self._directory.tensor(self._in_files.get(name, name), in_files)

    @cached_property
    def _in_files(self) -> dict[str, str]:
        """Names in files, by name in the rules."""
        names, prefix = self._directory.names, self._mapping.base_prefix
        if any(name.startswith(prefix) for name in names):
            return {name: name for name in names}
        return {name if self._mapping.has_tensor(name) else prefix + name: name for name in names}
