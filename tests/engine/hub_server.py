"""Both hubs on a port of this host, with the faults of networks and of hubs."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlencode, urlsplit

COMMIT = "c0ffee" * 6 + "c0de"


class Hub:
    """Files and behaviour of the server; a test changes them at any time."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.listed: dict[str, dict[str, Any]] = {}
        """Fields of a listing that are not true, by file."""
        self.cuts: list[int] = []
        """Bytes after which the next answers with a file break off."""
        self.whole = False
        """It sends whole files and ignores ranges."""
        self.hops = 0
        """Redirects before a file."""
        self.leads_to = ""
        """Address to which a file redirects at last, instead of its content."""
        self.requests: list[tuple[str, dict[str, str]]] = []
        """Path with its query, and headers, of every request."""

    def huggingface(self) -> dict[str, Any]:
        """Return a listing of Hugging Face."""
        siblings = []
        for name, data in self.files.items():
            git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            entry: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": git}
            if name.endswith((".safetensors", ".bin")):
                entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
            siblings.append(entry | self.listed.get(name, {}))
        return {"id": "org/model", "sha": COMMIT, "siblings": siblings}

    def modelscope(self) -> dict[str, Any]:
        """Return a listing of ModelScope."""
        files: list[dict[str, Any]] = [{"Name": "onnx", "Path": "onnx", "Type": "tree", "Size": 0, "Sha256": ""}]
        for name, data in self.files.items():
            entry = {"Name": name.rpartition("/")[2], "Path": name, "Type": "blob", "Size": len(data)}
            entry["Sha256"] = hashlib.sha256(data).hexdigest()
            files.append(entry | self.listed.get(name, {}))
        return {"Code": 200, "Message": "success", "Success": True, "Data": {"Files": files}}


@contextmanager
def served(hub: Hub) -> Iterator[str]:
    """Serve `hub`; yields its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            hub.requests.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
            parts = urlsplit(self.path)
            query = {key: values[0] for key, values in parse_qs(parts.query).items()}
            if parts.path == "/api/models/org/model/revision/main":
                self._json(hub.huggingface())
            elif parts.path == "/api/v1/models/org/model/repo/files":
                self._json(hub.modelscope())
            elif parts.path.startswith(begin := f"/org/model/resolve/{COMMIT}/"):
                self._file(unquote(parts.path.removeprefix(begin)), query)
            elif parts.path == "/api/v1/models/org/model/repo":
                self._file(query["FilePath"], query)
            else:
                self.send_error(404)

        def _json(self, data: dict[str, Any]) -> None:
            text = json.dumps(data).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def _file(self, name: str, query: dict[str, str]) -> None:
            hop = int(query.get("hop", 0))
            if hop < hub.hops or hub.leads_to:
                self.send_response(302)
                further = f"{urlsplit(self.path).path}?{urlencode({**query, 'hop': hop + 1})}"
                self.send_header("Location", further if hop < hub.hops else hub.leads_to)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            data = hub.files[name]
            asked = self.headers.get("Range", "")
            start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and not hub.whole else 0
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
            self.send_header("Content-Length", str(len(data) - start))
            self.end_headers()
            if hub.cuts:
                self.wfile.write(data[start : start + hub.cuts.pop(0)])
                self.close_connection = True
            else:
                self.wfile.write(data[start:])

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
