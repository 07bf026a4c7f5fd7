"""Errors of the API, in OpenAI's form."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

from ppengine.common.one_line import one_line

TEXT_MOST = 500
"""Most characters of an error's text: it may repeat input."""
Kind = Literal[
    "invalid_request_error", "authentication_error", "not_found_error", "rate_limit_error", "service_unavailable_error",
    "server_error",
]  # fmt: skip


class ErrorBody(msgspec.Struct, kw_only=True):
    """The reason of a refusal."""

    message: str
    type: Kind
    param: str | None = None
    code: str | None = None


class ErrorAnswer(msgspec.Struct, kw_only=True):
    """Body of an answer that is an error."""

    error: ErrorBody


class ApiError(Exception):
    """A request that is refused, with its HTTP status. `param` names the field at fault."""

    def __init__(
        self, status: int, kind: Kind, message: str, *, param: str | None = None, code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.retry_after_s = status, retry_after_s
        self.more_headers: dict[str, str] = {}
        self.body = ErrorBody(message=one_line(message, TEXT_MOST), type=kind, param=param, code=code)

    def rename(self, names: Mapping[str, str]) -> None:
        """Name the field at fault as `names` does, in `param` and at the beginning of the text."""
        field = self.body.param
        if field is not None and field in names:
            self.body.param = names[field]
            message = re.sub(rf"^{re.escape(field)}\b", names[field], self.body.message)
            self.body.message = one_line(message, TEXT_MOST)

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer."""
        found = {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}
        return found | self.more_headers | ({"www-authenticate": "Bearer"} if self.status == 401 else {})

    def encode(self) -> bytes:
        """Return the body."""
        return msgspec.json.encode(ErrorAnswer(error=self.body))


@contextlib.contextmanager
def naming(names: Mapping[str, str]) -> Iterator[None]:
    """Let errors name the fields of the client: `names` has them by their names in a chat."""
    try:
        yield
    except ApiError as error:
        error.rename(names)
        raise


def invalid(message: str, param: str | None = None) -> ApiError:
    """Return the refusal of a request that is wrong in itself."""
    return ApiError(400, "invalid_request_error", message, param=param)


def too_long(message: str, param: str) -> ApiError:
    """Return the refusal of a prompt that is longer than the model takes."""
    return ApiError(400, "invalid_request_error", message, param=param, code="context_length_exceeded")


def unavailable(message: str, retry_after_s: int = 1) -> ApiError:
    """Return the refusal of a request that may do later."""
    return ApiError(503, "service_unavailable_error", message, retry_after_s=retry_after_s)
