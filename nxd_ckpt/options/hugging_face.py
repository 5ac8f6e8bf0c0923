"""Types of options about Hugging Face's models."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from nxd_ckpt.core.arguments import Kind, plain_mapping

MappingSpec = str | os.PathLike[str] | Annotated[Mapping[str, Any], Kind("a dict", plain_mapping)] | None
"""Name of a shipped mapping, path of a JSON or YAML file, the document itself, or None."""


Dtype = Literal["float32", "bfloat16", "float16"]

Release = Literal["0.3", "0.2.2"]
"""The releases of TorchTitan whose names are known."""
