"""Tries to open a backend, and keeps why it is not open."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ppengine.common.call_page import CallPage
from ppengine.common.one_line import one_line
from ppengine.protocol.store_messages import BackendSpec
from ppengine.store.backend import Backend, BackendOptions, Layout
from ppengine.store.checked_backend import CheckedBackend

log = logging.getLogger("ppengine.store")

LONG_S = 20.0
"""Seconds after which an `open` that has not returned is a failure for operators. A large folder is read in less."""


class Opener:
    """Opens one backend. `make` makes a backend that is not open yet."""

    def __init__(
        self, spec: BackendSpec, layout: Layout, make: Callable[[], Backend], clock: Callable[[], float],
        calls: CallPage,
    ) -> None:  # fmt: skip
        self._calls = calls
        self._spec, self._layout, self._make, self._clock = spec, layout, make, clock
        self._begun: float | None = None
        """Time when the try under way began."""
        self._logged: set[str] = set()
        self.failure = ""
        """Error of the newest try that has ended; empty: there is none."""

    @property
    def error(self) -> str:
        """Why it is not open, in one line; empty: it is being opened."""
        begun = self._begun
        hangs = begun is not None and self._clock() - begun >= LONG_S
        return self.failure or (f"its open has not returned in {LONG_S:.0f} s" if hangs else "")

    def open(self) -> CheckedBackend | None:
        """Return the open backend; None: it failed, and `failure` says why."""
        spec = self._spec
        options = BackendOptions(spec.name, spec.url, spec.quota_bytes, spec.timeout_ms / 1000)
        self._begun = self._clock()
        try:
            with self._calls.call("open", spec.name):
                made = self._make()
            backend = CheckedBackend(made, self._logged, spec.name, self._calls)
            backend.open(options, self._layout)
        except BaseException as error:  # noqa: BLE001 - packages raise what they like, and one may leave the process
            text = error_text(error)
            if text != self.failure:
                log.warning("%s cannot be opened: %s", spec.name, text)
            self.failure = text
            return None
        finally:
            self._begun = None
        self.failure = ""
        return backend


def error_text(error: BaseException) -> str:
    """Return an exception in one line, without a full stop."""
    name, text = type(error).__name__, one_line(str(error)).rstrip(".")
    return (text or name) if isinstance(error, Exception) else f"{name}: {text}"
