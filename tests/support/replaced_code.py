"""Code of functions, replaced in place: whoever holds a function holds the new one, and nothing is imported anew."""

import gc
from collections import Counter
from collections.abc import Iterator
from types import CodeType, FunctionType


def replace_code(before: CodeType, after: CodeType) -> None:
    """Give the functions of a module, compiled as ``before``, the code that they have in ``after``.

    Raises LookupError if no function of the module is found.
    """
    gc.unfreeze()  # what is frozen is in no list of objects
    codes = {code: place for place, code in _codes(before)}
    changed = {place: code for place, code in _codes(after) if code not in codes}
    functions = [
        one for one in gc.get_objects() if type(one) is FunctionType and one.__code__.co_filename == before.co_filename
    ]
    if not functions:
        raise LookupError(f"no function of {before.co_filename} is in this process")
    for function in functions:
        code = changed.get(codes.get(function.__code__, ("", 0)))
        if code is not None:
            function.__code__ = code


def _codes(module: CodeType) -> Iterator[tuple[tuple[str, int], CodeType]]:
    """Yield every code in it by its place: its name, with those of what it is in, and how often that came before."""
    times = Counter[str]()
    waiting = [("", module)]
    for at, code in waiting:
        name = f"{at}.{code.co_name}"
        yield (name, times[name]), code
        times[name] += 1
        waiting += [(name, each) for each in code.co_consts if isinstance(each, CodeType)]
