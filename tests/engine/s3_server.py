"""A server with the few calls of S3 that the store makes, in memory: tests have no other everywhere."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

NAMESPACE = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
PAGE_KEYS = 3
"""Keys in one page of a listing: few, so that listings have several."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    objects: dict[str, bytes]
    over = False
    """The server has ended: its open connections get no answer."""

    def parse_request(self) -> bool:
        """Read a request; return whether to answer it."""
        self.close_connection = self.over
        return not self.over and super().parse_request()

    def log_message(self, *arguments: object) -> None:
        """Write no log."""

    def _key(self) -> str:
        return unquote(urlsplit(self.path).path).split("/", 2)[2]

    def _query(self) -> dict[str, str]:
        return {name: values[0] for name, values in parse_qs(urlsplit(self.path).query, True).items()}

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"]))

    def _answer(self, status: int, body: bytes = b"", head: bool = False) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Last-Modified", formatdate(0, usegmt=True))
        self.send_header("ETag", '"tag"')
        self.end_headers()
        if not head:
            self.wfile.write(body)

    def do_PUT(self) -> None:
        self.objects[self._key()] = self._body()
        self._answer(200)

    def do_HEAD(self) -> None:
        data = self.objects.get(self._key())
        self._answer(200 if data is not None else 404, data or b"", head=True)

    def do_POST(self) -> None:
        assert "delete" in self._query(), self.path
        keys = re.findall(r"<Key>(.*?)</Key>", self._body().decode())
        for key in keys:
            self.objects.pop(key, None)
        deleted = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
        self._answer(200, f"<DeleteResult {NAMESPACE}>{deleted}</DeleteResult>".encode())

    def do_GET(self) -> None:
        query = self._query()
        if "list-type" not in query:
            data = self.objects.get(self._key())
            self._answer(200 if data is not None else 404, data or b"")
            return
        after = query.get("continuation-token") or ""
        keys = sorted(key for key in self.objects if key.startswith(query.get("prefix", "")) and key > after)
        page, rest = keys[:PAGE_KEYS], keys[PAGE_KEYS:]
        items = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(self.objects[key])}</Size>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>tag</ETag></Contents>"
            for key in page
        )
        more = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if rest else ""
        body = f"<ListBucketResult {NAMESPACE}><IsTruncated>{str(bool(rest)).lower()}</IsTruncated>{more}{items}"
        self._answer(200, f"{body}</ListBucketResult>".encode())


@contextmanager
def s3_server() -> Iterator[str]:
    """Serve one bucket; yield the endpoint."""
    handler = type("Handler", (_Handler,), {"objects": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        handler.over = True
        server.shutdown()
        server.server_close()
        thread.join()
