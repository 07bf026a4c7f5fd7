"""A backend behind a check of all that it returns and raises: it may come from any package, and be wrong."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from typing_extensions import TypeIs, override

from ppengine.common.call_page import CallPage
from ppengine.common.one_line import one_line
from ppengine.common.sizes import counted
from ppengine.store.backend import Backend, BackendError, BackendOptions, Layout, Usage

log = logging.getLogger("ppengine.store")

THREADS_MOST = 64
BYTES_MOST = 2**63
_MISTAKES = (LookupError, TypeError, AttributeError, NameError, AssertionError, NotImplementedError)
"""Exceptions of a mistake in the code of a backend, whose texts name neither call nor place."""


class CheckedBackend(Backend):
    """Passes all calls on. A wrong answer is a BackendError that names the method.

    `logged` has the methods whose first mistake is in the log, also those of an object before this one. Exceptions that
    would end a thread become one, too: SystemExit, a cancelled task, a panic of a library in Rust. Calls are
    noted in `calls` under the backend's `name`, as one may end the process.
    """

    def __init__(self, backend: Backend, logged: set[str], name: str, calls: CallPage) -> None:
        self._noted_name, self._calls = name, calls
        self._backend, self._name, self._logged = backend, type(backend).__name__, logged
        self.width = self._width()
        """Calls that may be under way at once."""

    @override
    def open(self, config: BackendOptions, layout: Layout) -> None:
        with self._call("open"):
            self._backend.open(config, layout)

    @override
    def find(self, keys: Sequence[str]) -> list[bool]:
        with self._call("find"):
            found: object = self._backend.find(keys)
        if not isinstance(found, (list, tuple)) or len(found) != len(keys):
            raise self._wrong("find", found, f"a list of {counted(len(keys), 'answer')}, one a key")
        return [bool(each) for each in found]

    @override
    def read(self, key: str, into: memoryview) -> int:
        with self._call("read", missing=True):
            length: object = self._backend.read(key, into)
        if not _is_count(length):
            raise self._wrong("read", length, "the length of the object")
        return length

    @override
    def write(self, key: str, data: memoryview) -> None:
        with self._call("write"):
            self._backend.write(key, data)

    @override
    def delete(self, keys: Sequence[str]) -> None:
        with self._call("delete"):
            self._backend.delete(keys)

    @override
    def usage(self) -> Usage:
        with self._call("usage"):
            usage: object = self._backend.usage()
        if not isinstance(usage, Usage) or not (_is_count(usage.used_bytes) or usage.used_bytes == -1):
            raise self._wrong("usage", usage, "a Usage with the bytes, or -1")
        if not _is_count(usage.evicted):
            raise self._wrong("usage", usage, "a Usage with the number of evicted objects")
        return usage

    @override
    def close(self) -> None:
        with self._call("close"):
            self._backend.close()

    def _width(self) -> int:
        threads: object = self._backend.threads
        if not _is_count(threads) or not 1 <= threads <= THREADS_MOST:
            raise BackendError(
                f"threads of {self._name} is {threads!r}; it must be a whole number, 1 to {THREADS_MOST}"
            )
        return threads

    @contextmanager
    def _call(self, method: str, missing: bool = False) -> Iterator[None]:
        """Let one call run; `missing`: a KeyError of it means that the object is not there."""
        try:
            with self._calls.call(method, self._noted_name):
                yield
        except BaseException as error:
            mistake = isinstance(error, _MISTAKES) and not (missing and isinstance(error, KeyError))
            if isinstance(error, Exception) and not mistake:
                raise
            text = f"{method} of {self._name} raised {type(error).__name__}: {one_line(str(error))}"
            self._log_once(method, text)
            raise BackendError(text) from error

    def _log_once(self, method: str, text: str) -> None:
        """Log the lines that led to a mistake, once for a method."""
        if method not in self._logged:
            self._logged.add(method)
            log.warning("%s", text, exc_info=True)

    def _wrong(self, method: str, answer: object, right: str) -> BackendError:
        found = counted(len(answer), "answer") if isinstance(answer, (list, tuple)) else one_line(repr(answer), 80)
        return BackendError(f"{method} of {self._name} returned {found}; right is {right}")


def _is_count(value: object) -> TypeIs[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < BYTES_MOST
