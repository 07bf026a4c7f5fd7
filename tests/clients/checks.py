"""Checks of a client against a live engine: each is a function; a script runs them and prints a line each."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

PROMPT = "Once upon a time"
NUMBERS = [1, 22]
SCHEMA = {"type": "object", "properties": {"n": {"enum": NUMBERS}}, "required": ["n"], "additionalProperties": False}
TOOL: Any = {"type": "function", "function": {"name": "count", "description": "Count.", "parameters": SCHEMA}}
AS_SCHEMA: Any = {"type": "json_schema", "json_schema": {"name": "number", "schema": SCHEMA, "strict": True}}
Check = Callable[[str], object]


def run(client: str, checks: list[Check]) -> None:
    """Run `checks` with the URL of the first argument, `http://HOST:PORT`; exit with 1 if one fails."""
    (url,) = sys.argv[1:]
    while get(url, "/ready")[0] != 200:
        time.sleep(0.5)
    failed = 0
    for check in checks:
        try:
            shown = check(url)
        except Exception:  # noqa: BLE001  # The other checks run all the same.
            traceback.print_exc(limit=-2)
            shown, failed = "FAILED", failed + 1
        print(f"{client}  {check.__name__:20} {'' if shown is None else shown}", flush=True)
    sys.exit(bool(failed))


def get(url: str, path: str) -> tuple[int, str]:
    """Return status and body of a GET."""
    address = urlsplit(url)
    connection = HTTPConnection(address.hostname or "", address.port or 80, timeout=10)
    connection.request("GET", path)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def open_requests(url: str) -> float:
    """Return the number of requests that the engine runs or keeps waiting."""
    _, text = get(url, "/metrics")
    names = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(names))


def until_idle(url: str) -> None:
    """Wait until the engine has no request: a client that left took its own along."""
    end = time.monotonic() + 5.0
    while open_requests(url):
        assert time.monotonic() < end, "a request is left in the engine"
        time.sleep(0.05)
