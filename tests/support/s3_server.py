"""An S3 server on 127.0.0.1 for tests and trials: moto's, made as strict as S3 where it is not, with counters.

::

    with S3Server() as server:
        server.make_bucket("bucket")
        storage = open_storage("s3://bucket/run", storage_options=server.options)

moto looks and then writes: here conditional requests go one at a time. It does not compare the CRC-32 of what arrives,
answers 500 for an upload that is gone, and copies and deletes objects whatever their ETag: here it refuses as S3 does.
Needs ``moto[s3]``, ``flask`` and ``flask-cors``.
"""

from __future__ import annotations

import base64
import io
import threading
import xml.etree.ElementTree as ET
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import parse_qs, quote, unquote
from xml.sax.saxutils import escape

Environ = dict[str, Any]
StartResponse = Callable[..., Any]


SMALLEST_PART = 5 * 2**20
"""Bytes of an upload's parts but the last: S3 takes no smaller ones."""

_NOTHING_DELETED = b"<DeleteResult></DeleteResult>"


class S3Server:
    """Start it with ``with``. ``requests`` counts by method, ``received`` and ``sent`` the bytes of objects by key."""

    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import create_backend_app
        from werkzeug.serving import WSGIRequestHandler, make_server

        quiet = type("Quiet", (WSGIRequestHandler,), {"log": lambda *_: None})
        self._app = create_backend_app("s3")  # without moto's dispatcher, which looks for the service at each request
        self._server = make_server("127.0.0.1", 0, self._serve, threaded=True, request_handler=quiet)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="s3-server", daemon=True)
        self._one_at_a_time = threading.Lock()
        self.address = ("127.0.0.1", self._server.server_port)
        self.requests: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()

    @property
    def options(self) -> dict[str, Any]:
        """``storage_options`` for this server."""
        return options_for(self.address)

    @property
    def environment(self) -> dict[str, str]:
        """The same as environment variables that boto3 looks at."""
        given = self.options
        return {
            "AWS_ACCESS_KEY_ID": given["key"],
            "AWS_SECRET_ACCESS_KEY": given["secret"],
            "AWS_ENDPOINT_URL_S3": given["endpoint_url"],
            "AWS_DEFAULT_REGION": given["client_kwargs"]["region_name"],
        }

    def make_bucket(self, name: str) -> None:
        self._client().create_bucket(Bucket=name)

    def put(self, bucket: str, key: str) -> None:
        """Make an empty object, without a request."""
        from moto.s3.models import s3_backends

        s3_backends["123456789012"]["aws"].put_object(bucket, key, b"")

    def keys(self, bucket: str) -> list[str]:
        """Names of the first 1,000 objects."""
        return [item["Key"] for item in self._client().list_objects_v2(Bucket=bucket).get("Contents", ())]

    def unfinished(self, bucket: str) -> list[str]:
        """Names of the objects that have a multipart upload under way."""
        return [item["Key"] for item in self._client().list_multipart_uploads(Bucket=bucket).get("Uploads", ())]

    def __enter__(self) -> S3Server:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _client(self) -> Any:
        import boto3

        given = self.options
        return boto3.client(
            "s3",
            aws_access_key_id=given["key"],
            aws_secret_access_key=given["secret"],
            endpoint_url=given["endpoint_url"],
            **given["client_kwargs"],
        )

    def _serve(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        method, key = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.requests[method] += 1
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        environ["wsgi.input"] = io.BytesIO(body)
        self.received[key] += len(body)
        digest = environ.get("HTTP_X_AMZ_CHECKSUM_CRC32")
        if digest and digest != base64.b64encode(zlib.crc32(body).to_bytes(4, "big")).decode():
            return _refuse(start_response, "400 Bad Request", "BadDigest")
        with self._one_at_a_time:
            query = parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True)
            if method == "POST" and "delete" in query:
                return [self._delete(environ, start_response, body, key.strip("/").partition("/")[0])]
            upload = query.get("uploadId")
            if upload and not self._has_upload(key, upload[0]):
                return _refuse(start_response, "404 Not Found", "NoSuchUpload")
            copied, etag = environ.get("HTTP_X_AMZ_COPY_SOURCE"), environ.get("HTTP_X_AMZ_COPY_SOURCE_IF_MATCH")
            if copied and etag and self._etag(copied) != etag:
                return _refuse(start_response, "412 Precondition Failed", "PreconditionFailed")
            reply = b"".join(self._app(environ, start_response))
        self.sent[key] += len(reply) if method == "GET" else 0
        return [reply]

    def _delete(self, environ: Environ, start_response: StartResponse, body: bytes, bucket: str) -> bytes:
        """Of the objects that the ``body`` names, delete those that still have the ETag that it names."""
        request = ET.fromstring(body)
        space = request.tag.partition("}")[0] + "}" if request.tag.startswith("{") else ""
        others = []
        for item in request.findall(f"{space}Object"):
            name, etag = item.findtext(f"{space}Key"), item.findtext(f"{space}ETag")
            if etag is not None and (there := self._etag(quote(f"{bucket}/{name}"))) is not None and there != etag:
                others.append(name)
                request.remove(item)
        left = ET.tostring(request, default_namespace=space.strip("{}") or None)
        environ.update({"wsgi.input": io.BytesIO(left), "CONTENT_LENGTH": str(len(left))})
        reply = b"".join(self._app(environ, lambda *_: None)) if request.findall(f"{space}Object") else _NOTHING_DELETED
        errors = "".join(
            f"<Error><Key>{escape(str(name))}</Key><Code>PreconditionFailed</Code><Message>ETag</Message></Error>"
            for name in others
        )
        reply = reply.replace(b"</DeleteResult>", f"{errors}</DeleteResult>".encode())
        start_response("200 OK", [("Content-Type", "application/xml"), ("Content-Length", str(len(reply)))])
        return reply

    @staticmethod
    def _etag(source: str) -> str | None:
        """Of the object that is to be copied; None where there is none."""
        from moto.s3.models import s3_backends

        bucket, _, key = unquote(source).lstrip("/").partition("/")
        found = [
            backends["aws"].get_object(bucket, key)
            for backends in s3_backends.values()
            if bucket in backends["aws"].buckets
        ]
        return next((one.etag for one in found if one is not None), None)

    @staticmethod
    def _has_upload(key: str, upload_id: str) -> bool:
        from moto.s3.models import s3_backends

        bucket = key.strip("/").partition("/")[0]
        return any(
            upload_id in backends["aws"].buckets[bucket].multiparts
            for backends in s3_backends.values()
            if bucket in backends["aws"].buckets
        )


def options_for(address: tuple[str, int]) -> dict[str, Any]:
    """``storage_options`` for a server, or a proxy before it, at (host, port)."""
    return {
        "key": "access",
        "secret": "not-so-secret",
        "endpoint_url": f"http://{address[0]}:{address[1]}",
        "client_kwargs": {"region_name": "us-east-1"},
    }


def error_body(code: str, **more: str) -> bytes:
    """What S3 sends with an error."""
    fields = "".join(f"<{name}>{value}</{name}>" for name, value in {"Code": code, "Message": code, **more}.items())
    return f'<?xml version="1.0" encoding="UTF-8"?><Error>{fields}</Error>'.encode()


def _refuse(start_response: StartResponse, status: str, code: str) -> Iterable[bytes]:
    body = error_body(code)
    start_response(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
    return [body]
