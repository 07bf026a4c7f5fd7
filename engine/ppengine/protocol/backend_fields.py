"""Fields of a backend of KV tiers with their limits, as a profile and `store add` have them, and its place to show."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from msgspec import Meta

BackendName = Annotated[
    str,
    Meta(
        pattern=r"\A[a-z0-9][a-z0-9_-]{0,31}\Z",
        description="1 to 32 small letters, digits, '_' and '-', with no sign first",
    ),
]
BackendKind = Annotated[
    str, Meta(pattern=r"\A[a-z][a-z0-9_]{0,31}\Z", description="1 to 32 small letters, digits and '_'")
]
URL_MOST = 4096
BackendUrl = Annotated[str, Meta(max_length=URL_MOST)]
QuotaGib = Annotated[float, Meta(gt=0, le=2**20)]
TimeoutMs = Annotated[int, Meta(ge=1, le=600_000)]
WritePolicy = Literal["always", "reused", "evicted"]

_USER = re.compile(r"\A([a-zA-Z][a-zA-Z0-9+.-]*://)([^?#]*)@", re.DOTALL)
_CUT = re.compile(r"\A([a-zA-Z][a-zA-Z0-9+.-]*://)[^?#]*[?#].*@", re.DOTALL)
"""A password with such a sign, which a reader of URLs takes for the end of the server, or one within an option."""
_SECRET = re.compile(r"(?i)pass|secret|token|key|credential|signature|\bsig\b|auth")


def without_secrets(url: str) -> str:
    """Return a place without its password, and without options in whose names a secret is suspected."""
    if found := _CUT.match(url):
        return f"{found[1]}..."
    if found := _USER.match(url):
        user = found[2].partition(":")[0]
        url = f"{found[1]}{user}{'@' if user else ''}{url[found.end() :]}"
    head, mark, query = url.partition("?")
    if not mark or "://" not in head:
        return url
    kept = [each for each in re.split("[&;]", query) if not _SECRET.search(each.partition("=")[0])]
    return f"{head}?{'&'.join(kept)}" if kept else head
