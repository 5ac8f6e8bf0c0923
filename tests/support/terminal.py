"""A terminal that nobody sits at."""

import io


class Terminal(io.StringIO):
    """Output, as if somebody watched."""

    def isatty(self) -> bool:
        return True
