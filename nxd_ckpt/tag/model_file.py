"""One file with a whole Hugging Face model: safetensors, or a state dict that torch.save wrote. Only read."""

from __future__ import annotations

from nxd_ckpt.storage.base import Storage
from nxd_ckpt.tag.foreign.hugging_face_directory import HuggingFaceDirectory
from nxd_ckpt.tag.foreign.weight_files import WeightFiles


class WholeModelFile(HuggingFaceDirectory):
    """The model in ``file`` of ``storage``; torch.save wrote it unless the name ends in .safetensors.

    From a pickle only plain data is read. ``model_key`` is the key of the state dict, if the file holds more than that.

    Raises:
        MalformedFile: it is neither.
        UnsafePickle: it holds more than plain data.
    """

    def __init__(self, storage: Storage, file: str, model_key: str = "model") -> None:
        self._file = file
        super().__init__(storage, model_key=model_key)

    @property
    def where(self) -> str:
        return self.files.where(self._file)

    def _find(self) -> WeightFiles:
        return WeightFiles(dict.fromkeys(self._read(self._file), self._file), "its header")
