"""Objects in a Valkey or Redis server, with the client of the extra `valkey`.

Keys begin with `ppkv:`. Sizes and times of use of each part are a hash and a sorted set in the server, so engines that
share it count alike. Scripts keep them together with the objects. A cluster of servers is not supported, since a script
changes several keys.

A server with `maxmemory` may evict objects, and these keys as well. Its count of evicted keys says so, and then all
names are looked at, some at each call of `usage`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, cast
from urllib.parse import urlsplit

from redis import Redis
from redis.backoff import NoBackoff
from redis.connection import PythonRespSerializer
from redis.exceptions import OutOfMemoryError, ResponseError
from redis.retry import Retry
from typing_extensions import override

from ppengine.store.backend import Backend, BackendError, BackendOptions, Layout, Usage, server_of

PREFIX = "ppkv:"
READ_BYTES = 2**20
"""Bytes of one read from the socket. The client's own 64 KiB took a fifth longer."""
CUT_BYTES = 6000
"""Longer arguments are sent without a copy."""
BATCH = 256
"""Objects that one script deletes or looks at."""
LOOKS = 16
"""Batches that one call of `usage` looks at. A batch keeps the server busy for some 0.3 ms."""

# KEYS: object, uses, sizes, used, clock. ARGV: name, bytes.
_WRITE = """
local old = tonumber(redis.call('HGET', KEYS[3], ARGV[1]) or 0)
redis.call('SET', KEYS[1], ARGV[2])
redis.call('HSET', KEYS[3], ARGV[1], #ARGV[2])
redis.call('INCRBY', KEYS[4], #ARGV[2] - old)
redis.call('ZADD', KEYS[2], redis.call('INCR', KEYS[5]), ARGV[1])
"""
# KEYS: uses, sizes, used; behind them objects. ARGV: their names. Returns the number of those that were there.
_DELETE = """
local gone = 0
for place, name in ipairs(ARGV) do
    local size = redis.call('HGET', KEYS[2], name)
    redis.call('DEL', KEYS[3 + place])
    redis.call('ZREM', KEYS[1], name)
    if size then
        redis.call('HDEL', KEYS[2], name)
        redis.call('DECRBY', KEYS[3], size)
        gone = gone + 1
    end
end
return gone
"""
# KEYS: uses, sizes, used; behind them objects. ARGV: their names. Returns the number of those that are missing.
# EXISTS is no use of an object, unlike STRLEN: the server goes on to evict those that were not used for long.
_CHECK = """
local gone = 0
for place, name in ipairs(ARGV) do
    local known = redis.call('HGET', KEYS[2], name)
    if redis.call('EXISTS', KEYS[3 + place]) == 0 then
        redis.call('ZREM', KEYS[1], name)
        if known then
            redis.call('HDEL', KEYS[2], name)
            redis.call('DECRBY', KEYS[3], known)
        end
        gone = gone + 1
    elseif not known then
        local size = redis.call('STRLEN', KEYS[3 + place])
        redis.call('HSET', KEYS[2], name, size)
        redis.call('INCRBY', KEYS[3], size)
    end
end
return gone
"""
# KEYS: uses, sizes, used, clock. Makes those that are missing again, as far as the others have it.
_REPAIR = """
local there = redis.call('EXISTS', KEYS[1]) + redis.call('EXISTS', KEYS[2])
if there == 2 and redis.call('EXISTS', KEYS[3], KEYS[4]) == 2 then return end
local sum = 0
local found = redis.call('HGETALL', KEYS[2])
for place = 1, #found, 2 do
    sum = sum + found[place + 1]
    redis.call('ZADD', KEYS[1], 'NX', 0, found[place])
end
redis.call('SET', KEYS[3], sum)
local newest = redis.call('ZREVRANGE', KEYS[1], 0, 0, 'WITHSCORES')
redis.call('SETNX', KEYS[4], newest[2] or 0)
"""


class ValkeyBackend(Backend):
    """A server at `redis://HOST:PORT/DB`, `rediss://...` or `unix:///PATH`."""

    def __init__(self) -> None:
        self._client: Any = None
        self._evicted = 0
        self._looking = threading.Lock()
        self._dropped: int | None = -1
        """The server's count of evicted keys at the newest look; None: it does not say."""
        self._unseen: dict[str, int] = {}
        """Parts whose names are not all looked at since then, and how many were."""

    @override
    def open(self, config: BackendOptions, layout: Layout) -> None:
        self._quota, self._parts = config.quota_bytes, layout.parts
        try:
            _check(config.url)
            self._client = Redis.from_url(
                config.url, socket_timeout=config.timeout_s, socket_connect_timeout=config.timeout_s,
                retry=Retry(NoBackoff(), 0), protocol=2, socket_read_size=READ_BYTES,
                # hiredis would copy a shard into the command.
                command_packer=PythonRespSerializer(CUT_BYTES, _encode),
            )  # fmt: skip
        except ValueError:
            # Its text may have a piece of a password.
            form = "redis://HOST:PORT/DB, rediss://HOST:PORT/DB or unix:///PATH"
            escapes = "in a password, each of / # ? @ : % is written as %2F, %23, %3F, %40, %3A, %25"
            raise BackendError(f"url begins with {server_of(config.url)}; it must be {form}; {escapes}") from None
        self._client.ping()
        self._write = self._client.register_script(_WRITE)
        self._delete = self._client.register_script(_DELETE)
        self._check = self._client.register_script(_CHECK)
        self._repair = self._client.register_script(_REPAIR)

    @override
    def find(self, keys: Sequence[str]) -> list[bool]:
        pipeline = self._client.pipeline(transaction=False)
        for key in keys:
            pipeline.exists(PREFIX + key)
        return [bool(found) for found in pipeline.execute()]

    @override
    def read(self, key: str, into: memoryview) -> int:
        uses, _, _, clock = _books(key)
        data = cast("bytes | None", self._client.get(PREFIX + key))
        if data is None:
            self._forget_missing([key])
            raise KeyError(key)
        if len(data) <= len(into):
            into[: len(data)] = data
        self._client.zadd(uses, {key: self._client.incr(clock)}, xx=True)
        return len(data)

    @override
    def write(self, key: str, data: memoryview) -> None:
        if len(data) > self._quota:
            raise BackendError(f"an object has {len(data)} bytes, the quota is {self._quota}")
        self._make_room(key, len(data))
        try:
            self._write(keys=[PREFIX + key, *_books(key)], args=[key, data])
        except ResponseError as error:
            raise BackendError(_words(error)) from None

    @override
    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            if key.endswith("/"):
                self._remove([name for name in self._names(key) if name.startswith(key)])
            else:
                self._remove([key])

    @override
    def usage(self) -> Usage:
        with self._looking:
            self._look()
        return Usage(self._used(), self._evicted)

    @override
    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    # --- books ----------------------------------------------------------------------------------------------

    def _used(self) -> int:
        return sum(int(self._client.get(_books(f"{part}/")[2]) or 0) for part in self._parts)

    def _names(self, key: str) -> list[str]:
        """Return the names of all objects of the part of `key`, the least recently used first."""
        return [name.decode() for name in self._client.zrange(_books(key)[0], 0, -1)]

    def _look(self) -> None:
        """Look for objects that the server has evicted, if it has evicted any key since the look before.

        Keys that were used a moment ago are evicted last, so those of the books are touched.
        """
        books = [_books(f"{part}/") for part in self._parts]
        self._client.touch(*(key for each in books for key in each))
        if (dropped := self._dropped_keys()) != self._dropped:
            self._dropped, self._unseen = dropped, dict.fromkeys(self._parts, 0)
            for each in books:
                self._repair(keys=each)
        for _ in range(LOOKS):
            if not self._unseen:
                return
            part, first = next(iter(self._unseen.items()))
            names = self._client.zrange(_books(f"{part}/")[0], first, first + BATCH - 1)
            if names:
                self._unseen[part] += len(names) - self._forget_missing([name.decode() for name in names])
            else:
                del self._unseen[part]

    def _dropped_keys(self) -> int | None:
        try:
            return cast("int | None", self._client.info("stats").get("evicted_keys"))
        except ResponseError:  # The user of the URL may not ask.
            return None

    def _forget_missing(self, names: Sequence[str]) -> int:
        objects = [PREFIX + name for name in names]
        return int(self._check(keys=[*_books(names[0])[:3], *objects], args=list(names)))

    def _remove(self, names: Sequence[str]) -> int:
        gone = 0
        for first in range(0, len(names), BATCH):
            batch = names[first : first + BATCH]
            objects = [PREFIX + name for name in batch]
            gone += int(self._delete(keys=[*_books(batch[0])[:3], *objects], args=list(batch)))
        return gone

    def _make_room(self, key: str, size: int) -> None:
        """Delete the least recently used objects, of the part of `key` first, until `size` bytes have room."""
        had = int(self._client.hget(_books(key)[1], key) or 0)
        own = key.partition("/")[0]
        for part in (own, *(each for each in self._parts if each != own)):
            while (over := self._used() - had + size - self._quota) > 0:
                oldest = [name.decode() for name in self._client.zrange(_books(f"{part}/")[0], 0, 15)]
                chosen: list[str] = []
                for name in oldest:
                    if over > 0 and name != key:
                        chosen.append(name)
                        over -= int(self._client.hget(_books(name)[1], name) or 0)
                if not chosen:
                    break
                self._evicted += self._remove(chosen)


def _check(url: str) -> None:
    """Raise ValueError for an `@` behind the server: a password that is cut there would be taken for host and port."""
    parts = urlsplit(url)
    if parts.scheme != "unix" and "@" in parts.path + parts.query + parts.fragment:
        raise ValueError


def _books(key: str) -> tuple[str, str, str, str]:
    """Return the keys that describe the objects of a part: uses, sizes, used bytes, a count of uses."""
    part = key.partition("/")[0]
    uses, sizes, used, clock = (f"{PREFIX}{part}:{name}" for name in ("uses", "sizes", "used", "clock"))
    return uses, sizes, used, clock


def _encode(value: object) -> bytes | memoryview:
    """Return an argument of a command."""
    return value if isinstance(value, bytes | memoryview) else str(value).encode()


def _words(error: ResponseError) -> str:
    """Return the words of an error of a script. Servers put its name in front or behind, and a screen has no room."""
    text = str(error).rpartition(": -")[2].partition(" script: ")[0].rstrip(".")
    # The client takes this word for the class of the error, unless the name of the script is in front.
    lacks = isinstance(error, OutOfMemoryError) and not text.startswith("OOM ")
    return f"OOM {text}" if lacks else text
