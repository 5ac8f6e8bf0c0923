"""One file with a whole Hugging Face model: safetensors, or a state dict that torch.save wrote. Only read."""

from __future__ import annotations

from collections.abc import Mapping

from nxd_ckpt.errors import MalformedFile
from nxd_ckpt.formats.tensors import TensorStub
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.tag.foreign.hugging_face_directory import HuggingFaceDirectory


class WholeModelFile(HuggingFaceDirectory):
    """The model in ``file`` of ``storage``; torch.save wrote it unless the name ends in .safetensors.

    From a pickle only plain data is read. ``model_key`` is the key of the state dict, if the file holds more than that.

    Raises:
        MalformedFile: it is neither.
        UnsafePickle: it holds more than plain data.
    """

    def __init__(self, storage: Storage, file: str, model_key: str = "model") -> None:
        self._file, self._model_key = file, model_key
        super().__init__(storage)

    @property
    def where(self) -> str:
        return self.files.where(self._file)

    def _find_places(self) -> dict[str, str]:
        return dict.fromkeys(self._read(self._file), self._file)

    def _read(self, file: str) -> Mapping[str, TensorStub]:
        if file.endswith(".safetensors"):
            return super()._read(file)
        tree = self.files.tree(file)
        if isinstance(tree, dict) and isinstance(tree.get(self._model_key), dict):
            tree = tree[self._model_key]
        if not isinstance(tree, dict) or not all(isinstance(leaf, TensorStub) for leaf in tree.values()):
            raise MalformedFile(f"{self.where}: expected a state dict, all tensors, or one under {self._model_key!r}")
        return {str(name): leaf for name, leaf in tree.items()}
