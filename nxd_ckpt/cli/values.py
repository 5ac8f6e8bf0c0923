"""Short rendering of a checkpoint's values: they may be large, nested, or crafted to confuse a terminal."""

from __future__ import annotations

import math
import reprlib
from typing import TYPE_CHECKING, Any

from nxd_ckpt.formats.tensors import Assembly, TensorStub, dtype_name

if TYPE_CHECKING:
    import torch


class _Short(reprlib.Repr):
    """``repr`` of bounded length and depth; tensors and arrays by dtype and shape."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 2
        self.maxdict = 4
        self.maxlist = 6
        self.maxtuple = 6
        self.maxstring = self.maxother = 60

    def repr_Tensor(self, tensor: torch.Tensor, _: int) -> str:
        return f"tensor {dtype_name(tensor.dtype)} {list(tensor.shape)}"

    def repr_TensorStub(self, stub: TensorStub | Assembly, _: int) -> str:
        return f"tensor {stub.dtype} {list(stub.shape)}"

    repr_Assembly = repr_TensorStub

    def repr_ndarray(self, array: Any, _: int) -> str:
        return f"array {array.dtype} {list(array.shape)}"

    def repr_Namespace(self, namespace: Any, level: int) -> str:
        return f"Namespace of {self.repr_dict(vars(namespace), level)}"


_SHORT = _Short()


def short(value: Any) -> str:
    """Return one line, of at most a few hundred characters, for any plain data."""
    return _SHORT.repr(value)


def plain(value: Any) -> Any:
    """Return ``value`` itself if JSON can express it, else its `short` form."""
    if value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else short(value)


def content_document(content: Any) -> dict[str, Any]:
    """Describe user content: its type, and an entry for each key; a single entry without key if it is no dict."""
    items = content.items() if isinstance(content, dict) else [(None, content)]
    return {
        "type": type(content).__name__,
        "entries": [
            {
                "key": None if key is None else key if isinstance(key, str) else short(key),
                "type": "Tensor" if isinstance(value, (TensorStub, Assembly)) else type(value).__name__,
                "value": short(value),
            }
            for key, value in items
        ],
    }
