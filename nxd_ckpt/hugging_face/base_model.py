"""Hugging Face files of a model without its head, or of a wrapped one, by the names in rules. Reads headers only."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from nxd_ckpt.core.mapping import ModelMapping
from nxd_ckpt.formats.tensors import Assembly, TensorStub
from nxd_ckpt.hugging_face.mapped_directory import HuggingFaceTensors
from nxd_ckpt.live.dtensor import plain_names


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
        has, prefix = self._mapping.has_tensor, self._mapping.base_prefix
        names = self._plain_names()
        if any(name.startswith(prefix) for name in names):
            return names
        return {name if has(name) else prefix + name: in_file for name, in_file in names.items()}

    def _plain_names(self) -> dict[str, str]:
        """Names in files, by name without wrappers, such as torch.compile's; those that rules have stay."""
        plain = plain_names(self._directory.names, self.where)
        is_in_rules = self._mapping.has_tensor
        return {
            in_file if name != in_file and is_in_rules(in_file) else name: in_file for name, in_file in plain.items()
        }
