"""s3:// for infra/storage/store.py: conditional puts, streamed multipart uploads, ranged reads, and one layer of retries."""

import logging
import os
import random
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from typing import Any

from fsspec.asyn import sync

from infra.errors import BadInput, Transient
from infra.storage.backend import Buffer
from infra.storage.s3_faults import ConditionFailed, classify

_log = logging.getLogger(__name__)
ATTEMPTS = 6
FIRST_DELAY_S = 0.2
PART_BYTES = 16 * 2**20  # S3 takes at least 5 MiB a part and 10,000 parts: objects up to 160 GB
CONCURRENCY = 4


def connect() -> "S3":
    """The client for this process and today's environment: a fork or a changed secret gets a new one."""
    names = tuple(sorted((k, v) for k, v in os.environ.items() if k.startswith("AWS_")))
    with _CONNECTING:
        return _connect(os.getpid(), names)


_CONNECTING = threading.Lock()


@lru_cache(maxsize=4)
def _connect(pid: int, environment: tuple[tuple[str, str], ...]) -> "S3":
    return S3()


class S3:
    """The backend of s3://; paths are `bucket/key`."""

    def __init__(self) -> None:
        import s3fs

        self.fs = s3fs.S3FileSystem(
            use_listings_cache=False,  # another process writes what this one looks for
            skip_instance_cache=True,
            config_kwargs={"retries": {"total_max_attempts": 1}, "connect_timeout": 10, "read_timeout": 60},
        )
        self.fs.retries = 1  # `_retry` is the only layer that retries: three layers multiply to minutes

    def call(self, method: str, path: str, **arguments: Any) -> dict[str, Any]:
        """One S3 operation on `bucket/key`, retried."""
        bucket, _, key = path.partition("/")
        return _retry(path, lambda: self.fs.call_s3(method, Bucket=bucket, Key=key, **arguments))

    def read(self, path: str) -> Buffer:
        """The whole object, writable."""
        return self._get(path)[0]

    def _get(self, path: str) -> tuple[bytearray, str]:
        """The object and its ETag, of one moment: the object may be a pointer that others replace, or be put again."""
        for _ in range(ATTEMPTS):
            with suppress(ConditionFailed):  # between two of its ranges
                return self._get_once(path)
        raise Transient(f"s3://{path}: it was replaced again and again while it was read")

    def _get_once(self, path: str) -> tuple[bytearray, str]:
        bucket, _, key = path.partition("/")

        async def get(span: tuple[str, int] | None, **arguments: str) -> tuple[bytes | None, int, str]:
            reply = await self.fs._call_s3("get_object", Bucket=bucket, Key=key, **arguments)
            async with reply["Body"] as body:
                size = reply["ContentLength"]
                if span is not None and (got := (reply.get("ContentRange"), size)) != span:
                    raise ConnectionError(f"asked for {span[0]}, {span[1]} bytes; the reply is {got[0]}, {size} bytes")
                data = await body.read() if size <= PART_BYTES else None
                if data is not None and len(data) != size:
                    raise ConnectionError(f"read {len(data)} of {size} bytes")
                return data, size, reply["ETag"]

        def fetch(span: tuple[str, int] | None = None, **arguments: str) -> tuple[bytes | None, int, str]:
            return _retry(path, lambda: sync(self.fs.loop, get, span, **arguments))

        data, size, etag = fetch()
        if data is not None:
            return bytearray(data), etag
        # Several ranges at once fill a network link; each lands at its place, so nothing is held twice.
        whole = bytearray(size)
        view = memoryview(whole)

        def place(start: int) -> None:
            end = min(start + PART_BYTES, size)
            span = f"bytes {start}-{end - 1}/{size}", end - start
            view[start:end] = fetch(span, Range=f"bytes={start}-{end - 1}", IfMatch=etag)[0] or b""

        with ThreadPoolExecutor(CONCURRENCY) as pool:
            list(pool.map(place, range(0, size, PART_BYTES)))
        return whole, etag

    def size(self, path: str) -> int | None:
        """Bytes of the object, None when there is none."""
        try:
            return int(self.call("head_object", path)["ContentLength"])
        except FileNotFoundError:
            return None

    def open(self, path: str) -> "_Upload":
        """Begin an object; it appears when the upload is closed."""
        return _Upload(self, path)

    def put(self, path: str, data: bytes) -> None:
        """One put, over what may be there."""
        self.call("put_object", path, Body=data)

    def create(self, path: str, data: bytes) -> bool:
        """Put if absent (If-None-Match)."""
        for _ in range(ATTEMPTS):
            with suppress(FileNotFoundError):  # what was in the way is gone
                return self._put_if(path, data, IfNoneMatch="*")
        raise Transient(f"s3://{path}: it was written and deleted again and again")

    def replace(self, path: str, data: bytes, expected: bytes) -> bool:
        """Put if the object is `expected` (If-Match)."""
        try:
            data_now, etag = self._get(path)
            return bytes(data_now) == expected and self._put_if(path, data, IfMatch=etag)
        except FileNotFoundError:
            return False

    def _put_if(self, path: str, data: bytes, **condition: str) -> bool:
        # The reply to a put that won may be lost; its retry then meets our own object. The token tells.
        token = uuid.uuid4().hex
        try:
            self.call("put_object", path, Body=data, Metadata={"put": token}, **condition)
        except (FileExistsError, ConditionFailed):
            return self.call("head_object", path).get("Metadata", {}).get("put") == token
        return True

    def keys(self, path: str) -> list[str]:
        """Paths of all objects below a folder."""
        bucket, _, key = path.partition("/")
        found: list[str] = []
        page: dict[str, Any] = {"Prefix": f"{key}/" if key else ""}
        while True:
            # Not fs.find: where there is nothing below a folder it looks for an object of the folder's name.
            reply = _retry(path, lambda page=page: self.fs.call_s3("list_objects_v2", Bucket=bucket, **page))
            found += [f"{bucket}/{item['Key']}" for item in reply.get("Contents", []) if item["Key"][-1] != "/"]
            if not reply.get("IsTruncated"):
                return found
            page["ContinuationToken"] = reply["NextContinuationToken"]

    def folders(self, path: str) -> list[str]:
        """What the keys below a folder have up to their next slash."""
        bucket, _, key = path.partition("/")
        found: list[str] = []
        page: dict[str, Any] = {"Prefix": f"{key}/", "Delimiter": "/"}
        while True:
            reply = _retry(path, lambda page=page: self.fs.call_s3("list_objects_v2", Bucket=bucket, **page))
            found += [item["Prefix"][len(key) + 1 : -1] for item in reply.get("CommonPrefixes", [])]
            if not reply.get("IsTruncated"):
                return found
            page["ContinuationToken"] = reply["NextContinuationToken"]

    def delete(self, path: str) -> None:
        """Remove an object, or all below a folder."""
        self.abort(path)  # first: what ends meanwhile is found below
        for key in {path, *self.keys(path)}:
            self.call("delete_object", key)

    def uploads(self, path: str) -> list[str]:
        """Paths of objects below a folder whose upload in parts has not ended."""
        return [at for at, _ in self._uploads(path) if at != path]

    def abort(self, path: str) -> None:
        """Drop the parts of all unfinished uploads of an object, or below a folder."""
        for at, upload in self._uploads(path):
            with suppress(FileNotFoundError):  # it has ended
                self.call("abort_multipart_upload", at, UploadId=upload)

    def _uploads(self, path: str) -> list[tuple[str, str]]:
        bucket, _, key = path.partition("/")
        found: list[tuple[str, str]] = []
        page: dict[str, Any] = {"Prefix": key}
        while True:
            try:
                reply = _retry(path, lambda page=page: self.fs.call_s3("list_multipart_uploads", Bucket=bucket, **page))
            except BadInput as fault:  # a right of its own
                _log.warning("what uploads that died have left stays, and is billed: %s", fault)
                return found
            items = [(f"{bucket}/{item['Key']}", item["UploadId"]) for item in reply.get("Uploads", [])]
            found += [(at, upload) for at, upload in items if at == path or at.startswith(f"{path}/")]
            if not reply.get("IsTruncated"):
                return found
            page |= {"KeyMarker": reply["NextKeyMarker"], "UploadIdMarker": reply["NextUploadIdMarker"]}


class _Upload:
    """One put for a small object, a multipart upload with parallel parts for a big one."""

    def __init__(self, s3: S3, path: str):
        self._s3, self._path = s3, path
        self._buffer = bytearray()
        self._id: str | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._parts: list[Future[dict[str, Any]]] = []

    def write(self, data: Buffer) -> int:
        view = memoryview(data).cast("B")
        written = len(view)
        while len(self._buffer) + len(view) > PART_BYTES:
            room = PART_BYTES - len(self._buffer)
            self._buffer += view[:room]
            view = view[room:]
            self._send()
        self._buffer += view
        return written

    def _send(self) -> None:
        if self._id is None or self._pool is None:
            self._id = self._s3.call("create_multipart_upload", self._path)["UploadId"]
            self._pool = ThreadPoolExecutor(CONCURRENCY)
        if len(self._parts) >= CONCURRENCY:
            self._parts[-CONCURRENCY].result()  # bounds the memory to the parts in flight
        number, body, self._buffer = len(self._parts) + 1, bytes(self._buffer), bytearray()
        arguments = {"UploadId": self._id, "PartNumber": number, "Body": body}
        self._parts.append(self._pool.submit(self._s3.call, "upload_part", self._path, **arguments))

    def close(self) -> None:
        try:
            self._close()
        except BaseException:
            with suppress(Exception):  # parts of an unfinished upload are invisible, and billed
                self.abort()
            raise

    def _close(self) -> None:
        if self._id is None:
            self._s3.call("put_object", self._path, Body=bytes(self._buffer))
            return
        if self._buffer:
            self._send()
        parts = [{"PartNumber": i, "ETag": part.result()["ETag"]} for i, part in enumerate(self._parts, 1)]
        try:
            self._s3.call("complete_multipart_upload", self._path, UploadId=self._id, MultipartUpload={"Parts": parts})
        except FileNotFoundError:  # a retry after a lost reply: the upload is complete and its id is gone
            if self._s3.size(self._path) is None:
                raise
        self._end()

    def abort(self) -> None:
        self._end()
        if self._id is not None:
            self._s3.call("abort_multipart_upload", self._path, UploadId=self._id)

    def _end(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)


def _retry[T](path: str, call: Callable[[], T]) -> T:
    """Call until it succeeds or fails for a reason that time does not heal; `ATTEMPTS` times at most."""
    for attempt in range(ATTEMPTS):
        try:
            return call()
        except Exception as error:
            fault = classify(path, error)
            if fault is error:
                raise
            if not isinstance(fault, Transient) or attempt == ATTEMPTS - 1:
                raise fault from error
            time.sleep(FIRST_DELAY_S * 2**attempt * random.uniform(0.5, 1.0))
    raise AssertionError("unreachable")
