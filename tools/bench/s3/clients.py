"""Who takes part: each puts files from memory, and gets them into memory. Imports what it needs by itself."""

from __future__ import annotations

import io
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

import torch

from nxd_ckpt.formats.crc32 import crc32
from nxd_ckpt.formats.tensors import StorageSpan, TensorStub
from nxd_ckpt.layouts.files import TagFiles
from nxd_ckpt.tag.reading import LeafReader

BUCKET, REGION, KEY, SECRET = "bucket", "us-east-1", "access", "not-so-secret"
PART = 16 * 2**20
FILES_AT_ONCE = 4
"""Of clients that do one thing after the other in a file."""


class Client(Protocol):
    """Both methods return when all files are done, all of which have the same bytes and go from and into one memory."""

    def put(self, keys: Sequence[str], source: memoryview) -> None: ...

    def get(self, keys: Sequence[str], target: memoryview) -> None: ...


class Ours:
    """nxd_ckpt's storage as a save and a load use it: each part goes with its digest, the object is created on the
    condition that there is none, reads are pinned to one version, and the digest of what they bring is compared."""

    def __init__(self, port: int, digest: int) -> None:
        from nxd_ckpt.storage.urls import open_storage

        options = {"key": KEY, "secret": SECRET, "endpoint_url": _url(port), "client_kwargs": {"region_name": REGION}}
        self._storage = open_storage(f"s3://{BUCKET}", storage_options=options)
        self._digest = digest

    def put(self, keys: Sequence[str], source: memoryview) -> None:
        for key in keys:
            writer = self._storage.create(key, len(source))
            for at in range(0, len(source), PART):
                writer.write_at(at, source[at : at + PART])
            writer.close()

    def get(self, keys: Sequence[str], target: memoryview) -> None:
        count, tensor = len(target), torch.frombuffer(target, dtype=torch.uint8)
        with LeafReader(TagFiles(self._storage, ""), {}) as reader:
            for key in keys:
                stub = TensorStub(key, 0, "uint8", (count,), (1,), StorageSpan(key, 0, count, self._digest))
                reader.read_into(stub, tensor, key, compare=True)
            reader.finish()


class Boto3:
    """boto3's transfers with its own threads; its CRC-32 is awscrt's where that is installed."""

    def __init__(self, port: int, digest: int) -> None:
        import boto3

        self._client: Any = boto3.client(
            "s3", endpoint_url=_url(port), region_name=REGION, aws_access_key_id=KEY, aws_secret_access_key=SECRET
        )

    def put(self, keys: Sequence[str], source: memoryview) -> None:
        _side_by_side(lambda key: self._client.upload_fileobj(_Memory(source), BUCKET, key), keys)

    def get(self, keys: Sequence[str], target: memoryview) -> None:
        _side_by_side(lambda key: self._client.download_fileobj(BUCKET, key, _Memory(target)), keys)


class Boto3Crt:
    """boto3's transfers by the CRT, as ``preferred_transfer_client="crt"`` has them; that itself allows no endpoint
    without TLS, so it is put together here."""

    def __init__(self, port: int, digest: int) -> None:
        from botocore.credentials import Credentials
        from botocore.session import Session
        from s3transfer.crt import (
            BotocoreCRTCredentialsWrapper,
            BotocoreCRTRequestSerializer,
            CRTTransferManager,
            create_s3_crt_client,
        )

        provider = BotocoreCRTCredentialsWrapper(Credentials(KEY, SECRET)).to_crt_credentials_provider()
        client = create_s3_crt_client(REGION, provider, use_ssl=False)
        serializer = BotocoreCRTRequestSerializer(Session(), {"region_name": REGION, "endpoint_url": _url(port)})
        self._manager: Any = CRTTransferManager(client, serializer)

    def put(self, keys: Sequence[str], source: memoryview) -> None:
        for future in [self._manager.upload(_Memory(source), BUCKET, key) for key in keys]:
            future.result()

    def get(self, keys: Sequence[str], target: memoryview) -> None:
        for future in [self._manager.download(BUCKET, key, _Memory(target)) for key in keys]:
            future.result()


class S3TorchConnector:
    """Amazon's connector for PyTorch, on the CRT by Mountpoint's client."""

    def __init__(self, port: int, digest: int) -> None:
        os.environ |= {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
        from s3torchconnector import S3ClientConfig, S3ReaderConstructor
        from s3torchconnector._s3client import S3Client

        config = S3ClientConfig(force_path_style=True)
        self._client: Any = S3Client(REGION, endpoint=_url(port), s3client_config=config)
        self._unbuffered = S3ReaderConstructor.range_based(buffer_size=0)

    def put(self, keys: Sequence[str], source: memoryview) -> None:
        def one(key: str) -> None:
            with self._client.put_object(BUCKET, key) as writer:
                for at in range(0, len(source), PART):
                    writer.write(source[at : at + PART])

        _side_by_side(one, keys)

    def get(self, keys: Sequence[str], target: memoryview) -> None:
        def one(key: str) -> None:
            reader = self._client.get_object(BUCKET, key, reader_constructor=self._unbuffered)
            assert reader.readinto(target) == len(target)

        _side_by_side(one, keys)


class Sockets:
    """The floor: the same parts and ranges over bare connections, with nothing but the headers that HTTP needs."""

    digests = False

    def __init__(self, port: int, digest: int) -> None:
        self._connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(FILES_AT_ONCE)]

    def put(self, keys: Sequence[str], source: memoryview) -> None:
        self._shared_out(partial(self._put, source), keys)

    def get(self, keys: Sequence[str], target: memoryview) -> None:
        self._shared_out(partial(self._get, target), keys)

    def _shared_out(self, act: Callable[[socket.socket, str], None], keys: Sequence[str]) -> None:
        def several(number: int) -> None:
            for key in keys[number::FILES_AT_ONCE]:
                act(self._connections[number], key)

        _side_by_side(several, range(FILES_AT_ONCE))

    def _put(self, source: memoryview, connection: socket.socket, key: str) -> None:
        for part in _parts(source):
            if self.digests:
                crc32(part)
            connection.sendall(f"PUT /{BUCKET}/{key} HTTP/1.1\r\nContent-Length: {len(part)}\r\n\r\n".encode())
            connection.sendall(part)
            assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")

    def _get(self, target: memoryview, connection: socket.socket, key: str) -> None:
        begin = 0
        for part in _parts(target):
            asked = f"bytes={begin}-{begin + len(part) - 1}"
            connection.sendall(f"GET /{BUCKET}/{key} HTTP/1.1\r\nRange: {asked}\r\n\r\n".encode())
            head, done = connection.recv(4096, socket.MSG_PEEK), 0
            connection.recv(head.index(b"\r\n\r\n") + 4)
            while done < len(part):
                done += connection.recv_into(part[done:])
            begin += done
            if self.digests:
                crc32(part)


class SocketsWithDigests(Sockets):
    """The same with the CRC-32 of each part."""

    digests = True


CLIENTS: dict[str, Callable[[int, int], Client]] = {
    "sockets": Sockets,
    "sockets, CRC-32": SocketsWithDigests,
    "nxd_ckpt": Ours,
    "boto3": Boto3,
    "boto3, CRT": Boto3Crt,
    "s3torchconnector": S3TorchConnector,
}
"""Each is made with the port of the server on 127.0.0.1, and the CRC-32 of every file."""


class _Memory(io.RawIOBase):
    """A file over memory, which is as long as the file. Copies what is asked for, once."""

    def __init__(self, view: memoryview) -> None:
        self._view, self._at = view, 0

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._view)}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        part = self._view[self._at : self._at + len(buffer)]
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)

    def read(self, size: int = -1) -> bytes:
        part = self._view[self._at :] if size is None or size < 0 else self._view[self._at : self._at + size]
        self._at += len(part)
        return bytes(part)

    def write(self, data: Any) -> int:
        self._view[self._at : self._at + len(data)] = data
        self._at += len(data)
        return len(data)


def _url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def _parts(view: memoryview) -> Iterator[memoryview]:
    for at in range(0, len(view), PART):
        yield view[at : at + PART]


def _side_by_side(act: Callable[[Any], None], items: Sequence[Any]) -> None:
    with ThreadPoolExecutor(FILES_AT_ONCE) as threads:
        list(threads.map(act, items))
