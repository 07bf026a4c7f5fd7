"""The two hubs: how each lists the files of a model, and the address of a file."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Protocol
from urllib.parse import quote, urlencode

import msgspec

from ppengine.hub.transfer import HubError, Transfer
from ppengine.protocol.error_text import one_line

_COMMIT = re.compile(r"[0-9a-f]{40}")
_Size = Annotated[int, msgspec.Meta(ge=0, le=2**50)]
_Files = msgspec.Meta(max_length=10_000)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a model. Its path is text of the hub: no part of a local path before it was checked."""

    path: str
    size: int
    sha256: str
    """Empty: the hub lists none."""
    git: str
    """Git's name of its content; empty: the hub lists none."""
    url: str


class Site(Protocol):
    """A hub."""

    title: str
    token: str
    """A token of the user; empty: none."""

    def files(self, transfer: Transfer, name: str, revision: str) -> list[RemoteFile]:
        """Return the files of the model `name`, as ORG/NAME. Raises HubError."""


class HuggingFace:
    """huggingface.co, or the mirror in HF_ENDPOINT. Addresses have the commit of the listing: they stay the same."""

    title = "Hugging Face"

    def __init__(self) -> None:
        self.token = os.environ.get("HF_TOKEN", "")
        self._endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"

    def files(self, transfer: Transfer, name: str, revision: str) -> list[RemoteFile]:
        """Return the files of a model, with the SHA-256 of large files and git's SHA-1 of small ones."""
        url = f"{self._endpoint}/api/models/{name}/revision/{quote(revision, safe='')}?blobs=true"
        found: _HfModel = transfer.listing(url, _HfModel)
        if not _COMMIT.fullmatch(found.sha):
            raise HubError(f"{name}: {self.title} lists no commit")
        return [
            RemoteFile(
                one.rfilename, one.size or 0, one.lfs.sha256 if one.lfs else "", "" if one.lfs else one.blobId or "",
                f"{self._endpoint}/{name}/resolve/{found.sha}/{quote(one.rfilename)}",
            )
            for one in found.siblings
        ]  # fmt: skip


class ModelScope:
    """modelscope.cn, or the address in MODELSCOPE_ENDPOINT."""

    title = "ModelScope"
    token = ""

    def __init__(self) -> None:
        self._endpoint = os.environ.get("MODELSCOPE_ENDPOINT", "").rstrip("/") or "https://www.modelscope.cn"

    def files(self, transfer: Transfer, name: str, revision: str) -> list[RemoteFile]:
        """Return the files of a model, all with their SHA-256."""
        base = f"{self._endpoint}/api/v1/models/{name}/repo"
        query = urlencode({"Revision": revision, "Recursive": "true"})
        found: _MsAnswer = transfer.listing(f"{base}/files?{query}", _MsAnswer)
        if found.Code != 200 or found.Data is None:
            raise HubError(f"{name}: {self.title} says: {one_line(found.Message, 120) or found.Code}")
        return [
            RemoteFile(
                one.Path, one.Size, one.Sha256 or "", "",
                f"{base}?{urlencode({'Revision': revision, 'FilePath': one.Path})}",
            )
            for one in found.Data.Files
            if one.Type != "tree"
        ]  # fmt: skip


SITES: dict[str, Callable[[], Site]] = {"huggingface": HuggingFace, "modelscope": ModelScope}
"""Hubs by `model.source`."""


class _HfLfs(msgspec.Struct):
    sha256: str


class _HfFile(msgspec.Struct):
    rfilename: str
    size: _Size | None = None
    blobId: str | None = None
    lfs: _HfLfs | None = None


class _HfModel(msgspec.Struct):
    sha: str
    siblings: Annotated[list[_HfFile], _Files]


class _MsFile(msgspec.Struct):
    Path: str
    Type: str = "blob"
    Size: _Size = 0
    Sha256: str | None = None


class _MsData(msgspec.Struct):
    Files: Annotated[list[_MsFile], _Files]


class _MsAnswer(msgspec.Struct):
    Code: int = 0
    Message: str = ""
    Data: _MsData | None = None
