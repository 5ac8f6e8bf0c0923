"""A directory on a web server, through fsspec's ``http``: read-only.

Only the named server is asked: a redirect to another one is refused, and so is an answer that comes too slowly.

The names in a directory are the links of its index page. Times and versions are those that the server reports for each
file. If it reports no times, tags with a manifest can still be ordered.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from typing import Any, NoReturn
from urllib.parse import unquote

from nxd_ckpt.errors import CheckpointNotFound
from nxd_ckpt.storage.base import DirEntry, Writer
from nxd_ckpt.storage.fsspec_storage import FsspecStorage

_WITHOUT_RANGES = 64 * 2**20
"""Maximum bytes of a file from a server without range requests: it sends the whole file each time."""


_LONGEST, _SILENT = 50.0, 20.0
"""Maximum seconds of a whole answer, and between two of its bytes."""


async def http_client(**options: Any) -> Any:
    """Return fsspec's client: aiohttp's, with our limits.

    ``options`` are those of ``aiohttp.ClientSession``; a ``timeout`` among them overrides ours.
    """
    import aiohttp

    options.setdefault("timeout", aiohttp.ClientTimeout(total=_LONGEST, sock_connect=_SILENT, sock_read=_SILENT))
    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(_refuse_elsewhere)
    return aiohttp.ClientSession(trace_configs=[trace], **options)


async def _refuse_elsewhere(session: Any, context: Any, request: Any) -> None:
    """Raise `Elsewhere` before a redirect to another server is followed."""
    target = request.url.join(type(request.url)(request.response.headers.get("Location", "")))
    own = request.url
    is_made_safe = (own.scheme, own.port, target.scheme, target.port) == ("http", 80, "https", 443)
    if target.host != own.host or not (target.port == own.port or is_made_safe):
        where = target.host if target.host != own.host else f"{target.scheme}://{target.host}:{target.port}"
        raise Elsewhere(f"the server redirects to another one, {where}; if you trust it, pass a URL of {where} instead")


class Elsewhere(OSError):
    """A server answered that another one has the file."""


class HttpStorage(FsspecStorage):
    """A URL as a storage. Every write raises OSError: it is read-only."""

    def read_at(self, key: str, begin: int, end: int) -> bytes:
        data = super().read_at(key, begin, end)
        if len(data) <= end - begin:
            return data
        if len(data) > _WITHOUT_RANGES:
            raise OSError(
                f"{self.url}/{key}: the server answers no range requests, and sends all {len(data)} bytes each time; "
                "read from one that does (python's http.server does not), or copy the directory first"
            )
        return data[begin:end]

    def version(self, key: str) -> tuple[str, int]:
        info = self._info(key)
        return repr([info.get(header) for header in ("ETag", "Last-Modified", "size")]), self._size(key, info)

    def size(self, key: str) -> int:
        return self._size(key, self._info(key))

    def is_file(self, key: str) -> bool:
        try:
            self._info(key)
        except FileNotFoundError:
            return False
        return True

    def is_dir(self, key: str) -> bool:
        """Return whether it has an index page. Raises CheckpointNotFound if the root has none."""
        has_entries = bool(self.list(key))
        if not has_entries and not key:
            raise CheckpointNotFound(
                f"{self.url}: no such directory, or the server shows no index page of it, which lists its files; "
                "switch that on there, or read the checkpoint from an archive (nxd-ckpt pack), which needs none"
            )
        return has_entries

    def list(self, key: str = "") -> list[DirEntry]:
        directory = f"{self.path(key)}/"
        with self.doing(key):
            try:
                infos = self.fs.ls(directory, detail=True)
            except FileNotFoundError:
                return []
        links = [info["name"].removeprefix(directory) for info in infos if info["name"].startswith(directory)]
        # Other links lead elsewhere, or sort the page.
        names = {link for link in links if link.strip("/") and not set("?#/") & set(link.removesuffix("/"))}
        return sorted(DirEntry(unquote(name.removesuffix("/")), name.endswith("/")) for name in names)

    def time(self, key: str) -> float:
        modified = self._info(key).get("Last-Modified")
        return 0.0 if modified is None else parsedate_to_datetime(modified).timestamp()

    def write(self, key: str, data: bytes) -> None:
        self._refuse(key)

    def link_new(self, key: str, data: bytes) -> bool:
        self._refuse(key)

    def exchange(self, key: str, expected: bytes, data: bytes) -> bool:
        self._refuse(key)

    def create(self, key: str, nbytes: int) -> Writer:
        self._refuse(key)

    def remove(self, key: str) -> None:
        self._refuse(key)

    @contextlib.contextmanager
    def doing(self, key: str) -> Iterator[None]:
        """Run one operation; errors that would only repeat, after as long a time, are raised as permanent ones."""
        with super().doing(key):
            try:
                yield
            except Elsewhere as error:
                raise OSError(f"{self.url}/{key}: {error}") from None
            except (TimeoutError, asyncio.TimeoutError) as error:
                if type(error.__cause__ or error).__module__.startswith("aiohttp"):  # silent: it may answer again
                    raise
                raise OSError(
                    f"{self.url}/{key}: the server took more than {_LONGEST:.0f} s for one answer; if it is that slow, "
                    "pass storage_options={'client_kwargs': {'timeout': aiohttp.ClientTimeout(total=...)}}"
                ) from error

    def _refuse(self, key: str) -> NoReturn:
        raise OSError(errno.EROFS, "http is read-only here: write to a directory or a store", f"{self.url}/{key}")

    def _info(self, key: str) -> dict[str, Any]:
        """Return the server's report on a file. Raises FileNotFoundError for a directory."""
        with self.doing(key):
            try:
                info: dict[str, Any] = self.fs.info(self.path(key))
            except FileNotFoundError as error:  # fsspec's name for any failure
                cause = error.__cause__
                if isinstance(cause, Exception) and getattr(cause, "status", 0) not in (404, 410):
                    raise cause from None
                raise
            if info.get("url", "").endswith("/"):
                raise FileNotFoundError(key)
            return info

    def _size(self, key: str, info: dict[str, Any]) -> int:
        if info.get("size") is None:
            raise OSError(f"{self.url}/{key}: the server does not report the size of the file (Content-Length)")
        return int(info["size"])
