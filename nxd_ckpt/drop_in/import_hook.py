"""Work on modules right after their import, before other code sees them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_Imported = Callable[[str, ModuleType], None]


class ImportHook(MetaPathFinder):
    """A finder that calls ``imported`` with the name of each of the modules ``names``, and the module itself."""

    def __init__(self, names: Collection[str], imported: _Imported) -> None:
        self._names, self._imported = names, imported

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self._names:
            return None
        finders = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        found = (finder.find_spec(name, path, target) for finder in finders)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._imported)
        return spec


class _Loader(Loader):
    """The module's own loader, with ``imported`` called at the end."""

    def __init__(self, loader: Loader, imported: _Imported) -> None:
        self._loader, self._imported = loader, imported

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._imported(module.__name__, module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
