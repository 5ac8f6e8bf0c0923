"""Running a script or module as ``__main__`` in this process."""

from __future__ import annotations

import builtins
import os
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from types import CodeType, ModuleType
from typing import Any


def run(command: Sequence[str]) -> None:
    """Run ``SCRIPT ARGS``, or ``-m MODULE ARGS``, as ``python SCRIPT`` and ``python -m MODULE`` would.

    Not by runpy, which takes ``__main__`` away when the program returns: exit hooks may still need it.
    """
    main: Any = ModuleType("__main__")
    main.__builtins__ = builtins
    main.__cached__ = None
    if command[0] == "-m":
        sys.argv = [*command[1:]]
        _import_from(os.getcwd())
        code = _prepare_module(main, command[1])
        sys.argv[0] = main.__file__
    else:
        sys.argv = [*command]
        _import_from(os.path.dirname(os.path.realpath(command[0])))
        code = _prepare_script(main, os.path.abspath(command[0]))
    sys.modules["__main__"] = main
    exec(code, vars(main))


def _import_from(directory: str) -> None:
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = directory


def _prepare_script(main: Any, path: str) -> CodeType:
    """Give ``main`` the attributes of a script's module; return its code."""
    main.__file__ = path
    main.__loader__ = SourceFileLoader("__main__", path)
    code: CodeType = main.__loader__.source_to_code(main.__loader__.get_data(path), path)
    return code


def _prepare_module(main: Any, name: str) -> CodeType:
    """Give ``main`` the attributes of the module ``name``, or of the package's ``__main__``; return its code."""
    spec: Any = find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = find_spec(f"{name}.__main__")
    code: CodeType | None = spec and spec.loader.get_code(spec.name)
    if code is None:
        raise ModuleNotFoundError(f"no module {name!r} that can be run", name=name)
    main.__spec__ = spec
    main.__loader__ = spec.loader
    main.__package__ = spec.parent
    main.__file__ = spec.origin
    main.__cached__ = spec.cached
    return code
