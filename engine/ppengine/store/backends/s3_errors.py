"""Errors of the client of S3 in one line: call, server, cause. Its own texts are its objects, with times and names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from obstore.exceptions import BaseError

from ppengine.store.backend import BackendError

_CALL = re.compile(r"Error performing ([A-Z]+) (\w+://[^/?\s]*)\S* in [\d.]+[nµm]?s - (.*)", re.DOTALL)
_STATUS = re.compile(r"status code: (\d{3}[A-Za-z ]*)")
_FIELDS = re.compile(r"<(Code|Message)>([^<]*)<")
_CAUSE = re.compile(r'(?:message|error): "([^"]+)"')


@contextmanager
def plain_errors() -> Iterator[None]:
    """Turn errors of the client into BackendError."""
    try:
        yield
    except (BaseError, OSError) as error:
        raise BackendError(error_line(str(error))) from error


def error_line(text: str) -> str:
    """Return the text of an error as `PUT http://10.0.0.7:9000: Connection refused`."""
    said, _, debug = text.partition("Debug source:")
    call = _CALL.search(said)
    if call is None:
        return " ".join(said.split())
    method, server, why = call.groups()
    return f"{method} {server}: {_answer(why) or _cause(debug) or ' '.join(why.split())}"


def _answer(text: str) -> str:
    """Return the status and the words of a server; empty: it has not answered."""
    if (status := _STATUS.search(text)) is None:
        return ""
    fields = dict(_FIELDS.findall(text))
    words = [fields[name] for name in ("Code", "Message") if fields.get(name)]
    return ", ".join([status[1].strip(), *words])


def _cause(debug: str) -> str:
    """Return the innermost reason of a call without an answer; empty: none is known."""
    if found := _CAUSE.findall(debug):
        return str(found[-1])
    return "no answer in time" if "TimedOut" in debug else ""
