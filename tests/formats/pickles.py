"""Pickles by hand, opcode by opcode: what no pickler would write."""


def text(value: str) -> bytes:
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


def named(module: str, name: str) -> bytes:
    """GLOBAL, as protocol 2 names things."""
    return f"c{module}\n{name}\n".encode()


def stacked(module: str, name: str) -> bytes:
    """STACK_GLOBAL, as protocol 4 does: the name may be dotted, which walks attributes."""
    return text(module) + text(name) + b"\x93"


def called(function: bytes, *args: bytes) -> bytes:
    return function + b"(" + b"".join(args) + b"tR"


EMPTY_STORAGE = (
    b"((" + text("storage") + named("torch", "FloatStorage") + text("0") + text("cpu") + b"K\x01tQ"
)  # left on the stack as the first of a rebuild's arguments
