"""Hugging Face files by the names in a mapping's rules: of a model without its head, wrapped, or in a larger one.

Reads headers only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property

from nxd_ckpt.core.mapping import ModelMapping
from nxd_ckpt.core.renaming import NOT_LIVE, Renaming
from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.errors import KeyMismatch
from nxd_ckpt.formats.tensors import Assembly, TensorStub
from nxd_ckpt.hugging_face.mapped_directory import HuggingFaceTensors
from nxd_ckpt.live.dtensor import plain_names

_TEXT_MODELS = (
    ({"language_model.model.": "model.", "language_model.lm_head.": "lm_head."}, "language_model.model."),
    ({"model.language_model.": "model.", "lm_head.": "lm_head."}, "model.language_model."),
)
"""Beginnings of the names of text models in multimodal ones, as transformers wrote them; the second shows which."""


class RenamedTensors:
    """The tensors of ``directory`` by their names in the rules of ``mapping``.

    transformers omits the base model's prefix if it saves that alone, as in openai-community/gpt2, and loads such files
    into the model with the head too. In a multimodal model, the text model has a prefix. ``renaming`` says names in
    files otherwise.

    Raises KeyMismatch if ``renaming`` names nothing in the files.
    """

    def __init__(self, directory: HuggingFaceTensors, mapping: ModelMapping, renaming: Renaming | None = None) -> None:
        self._directory, self._mapping, self._renaming = directory, mapping, renaming or Renaming()
        self._renaming.validate()
        if self._renaming:
            self._refuse_nothing(self._plain)

    @property
    def where(self) -> str:
        return self._directory.where

    @property
    def names(self) -> list[str]:
        return sorted(self._in_files)

    @cached_property
    def left_out(self) -> tuple[str, ...]:
        """Tensors of the files that are not the text model's."""
        return tuple(sorted({*self._directory.names}.difference(self._in_files.values())))

    def tensor(self, name: str, tied: Mapping[str, str] | None = None) -> TensorStub | Assembly:
        in_files = {name: self._in_files.get(kept, kept) for name, kept in (tied or {}).items()}
        return self._directory.tensor(self._in_files.get(name, name), in_files)

    @cached_property
    def _in_files(self) -> dict[str, str]:
        """Names in files, by name in the rules."""
        names, prefix = self._renamed, self._mapping.base_prefix
        if any(name.startswith(prefix) for name in names):
            return names
        return {name if self._mapping.has_tensor(name) else prefix + name: file for name, file in names.items()}

    @property
    def _renamed(self) -> dict[str, str]:
        """Names in files, by name in the rules, except the prefix of the base model."""
        plain, renaming = self._plain, self._renaming
        if renaming:
            live = {renaming.live(name): file for name, file in plain.items()}
            return {name: file for name, file in live.items() if not name.startswith(NOT_LIVE)}
        for beginnings, first in _TEXT_MODELS:
            inside = [name for name in plain if name.startswith(first)]
            if inside and not self._mapping.has_tensor(inside[0]):
                return {
                    new + name.removeprefix(old): file
                    for name, file in plain.items()
                    for old, new in beginnings.items()
                    if name.startswith(old)
                }
        return plain

    @cached_property
    def _plain(self) -> dict[str, str]:
        """Names in files, by name without wrappers, such as torch.compile's; those that rules have stay."""
        plain = plain_names(self._directory.names, self.where)
        has = self._mapping.has_tensor
        return {in_file if name != in_file and has(in_file) else name: in_file for name, in_file in plain.items()}

    def _refuse_nothing(self, names: Collection[str]) -> None:
        prefix, absent = self._renaming.prefix, sorted({*self._renaming.key_mapping.values()}.difference(names))
        if absent:
            raise KeyMismatch(f"{self.where}: key_mapping= names {first_of(absent)}, which it does not hold")
        if prefix and not any(name.startswith(prefix) for name in names):
            raise KeyMismatch(f"{self.where}: no name begins with prefix={prefix!r}; there are {first_of(names)}")
