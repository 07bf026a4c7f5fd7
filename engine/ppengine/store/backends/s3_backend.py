"""Objects in S3 or a server that speaks as it does, with the client of the extra `s3`.

`s3://BUCKET/PREFIX?endpoint=http://HOST:PORT&region=NAME`. Keys come from the environment (AWS_ACCESS_KEY_ID) or
from the role of the machine. The order of use is that of this process; at its start it is the order of writing.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar
from urllib.parse import parse_qs, urlsplit

import obstore
from obstore.exceptions import NotFoundError
from obstore.store import S3Store
from typing_extensions import override

from ppengine.store.backend import Backend, BackendError, BackendOptions, Layout, Usage, server_of
from ppengine.store.backends.s3_errors import plain_errors
from ppengine.store.lru_index import LruIndex

if TYPE_CHECKING:
    from obstore.store import S3Config

LIST_S = 600.0
"""Seconds after which the objects are listed again, for those of other engines."""
LIST_CHUNK = 1000
PART_BYTES = 64 * 2**20
"""Larger objects are sent in parts."""
_OPTIONS = {"endpoint", "region"}


class S3Backend(Backend):
    """One prefix of a bucket."""

    threads: ClassVar[int] = 8

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._index = LruIndex()
        self._evicted = 0
        self._listed = 0.0

    @override
    @plain_errors()
    def open(self, config: BackendOptions, layout: Layout) -> None:
        self._quota, self._parts = config.quota_bytes, layout.parts
        bucket, prefix, options = _parts(config.url)
        limit = timedelta(seconds=config.timeout_s)
        target: S3Config = {"region": options.get("region", "us-east-1")}
        if "endpoint" in options:
            target["endpoint"] = options["endpoint"]
        self._store = S3Store(
            bucket, prefix=prefix or None, config=target,
            client_options={"timeout": limit, "connect_timeout": limit, "allow_http": True},
            retry_config={"max_retries": 0, "retry_timeout": limit},
        )  # fmt: skip
        self._list()

    @override
    @plain_errors()
    def find(self, keys: Sequence[str]) -> list[bool]:
        async def look() -> list[bool]:
            return list(await asyncio.gather(*(self._there(key) for key in keys)))

        return asyncio.run(look())

    @override
    @plain_errors()
    def read(self, key: str, into: memoryview) -> int:
        try:
            result = obstore.get(self._store, key)
            size = int(result.meta["size"])
            if size <= len(into):
                data = memoryview(result.bytes())
                into[: len(data)] = data
                size = len(data)
        except (NotFoundError, FileNotFoundError):
            with self._lock:
                self._index.remove(key)
            raise KeyError(key) from None
        with self._lock:
            self._index.touch(key)
        return size

    @override
    @plain_errors()
    def write(self, key: str, data: memoryview) -> None:
        if len(data) > self._quota:
            raise BackendError(f"an object has {len(data)} bytes, the quota is {self._quota}")
        if time.monotonic() - self._listed > LIST_S:
            self._list()
        with self._lock:
            before = self._index.remove(key)
            self._index.put(key, len(data))
            chosen = self._index.oldest(0, self._quota)
        try:
            if chosen:
                self._drop(chosen)
                self._evicted += len(chosen)
            obstore.put(self._store, key, bytes(data), use_multipart=len(data) > PART_BYTES, chunk_size=PART_BYTES)
        except BaseException:
            with self._lock:
                self._index.remove(key)
                if before:
                    self._index.put(key, before)
            raise

    @override
    @plain_errors()
    def delete(self, keys: Sequence[str]) -> None:
        single = [key for key in keys if not key.endswith("/")]
        below = [name for key in keys if key.endswith("/") for name, _, _ in self._names(key)]
        if single or below:
            self._drop([*single, *below])

    @override
    def usage(self) -> Usage:
        return Usage(self._index.used_bytes, self._evicted)

    @override
    def close(self) -> None:
        self._index.replace([])

    async def _there(self, key: str) -> bool:
        try:
            await obstore.head_async(self._store, key)
        except (NotFoundError, FileNotFoundError):
            return False
        return True

    def _drop(self, keys: Sequence[str]) -> None:
        obstore.delete(self._store, list(keys))
        with self._lock:
            for key in keys:
                self._index.remove(key)

    def _names(self, prefix: str) -> Iterator[tuple[str, int, float]]:
        """Yield name, size and time of the objects below `prefix`."""
        for chunk in obstore.list(self._store, prefix, chunk_size=LIST_CHUNK):
            for meta in chunk:
                yield meta["path"], int(meta["size"]), meta["last_modified"].timestamp()

    def _list(self) -> None:
        """List the objects of this store's parts, as other engines may have changed them."""
        self._listed = time.monotonic()
        found = {name: (size, at) for part in self._parts for name, size, at in self._names(f"{part}/")}
        with self._lock:
            # Those that this process knows keep their order behind the others.
            known = [name for name in self._index.keys if name in found]
            strange = sorted(set(found) - set(known), key=lambda name: found[name][1])
            self._index.replace((name, found[name][0]) for name in (*strange, *known))


def _parts(text: str) -> tuple[str, str, dict[str, str]]:
    """Return bucket, prefix and options of a url. Raises BackendError, without what may be a secret."""
    try:
        url = urlsplit(text)
        options = {name: values[-1] for name, values in parse_qs(url.query).items()}
    except ValueError:
        url, options = urlsplit(""), {}
    # The client's errors would show the name and password of a server.
    known = set(options) <= _OPTIONS and "@" not in url.netloc + options.get("endpoint", "")
    if url.scheme != "s3" or not url.netloc or not known:
        form = "s3://BUCKET/PREFIX?endpoint=http://HOST:PORT&region=NAME"
        raise BackendError(f"url begins with {server_of(text)}; it must be {form}, without keys or other options")
    return url.netloc, url.path.strip("/"), options
