"""A package index on a free port of this machine, in either of the forms that indexes speak."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal


class PackageIndex:
    """Serves one project with one file.

    Attributes:
        url: of the index, for `PIP_INDEX_URL`.
        requests: paths that were asked for.
        answer: what is sent for the file, made anew for each request; if it is short, the connection breaks off.
    """

    def __init__(self, project: str, file_name: str, content: bytes, form: Literal["json", "html"]) -> None:
        self.project, self.file_name, self.content, self.form = project, file_name, content, form
        self.answer: Callable[[], bytes] = lambda: content
        self.requests: list[str] = []
        self.url = ""

    def respond(self, handler: BaseHTTPRequestHandler) -> None:
        self.requests.append(handler.path)
        if handler.path == f"/simple/{self.project}/":
            kind, body = self._page()
            self._send(handler, 200, kind, body, len(body))
        elif handler.path == f"/files/{self.file_name}":
            self._send(handler, 200, "application/octet-stream", self.answer(), len(self.content))
        else:
            self._send(handler, 404, "text/plain", b"", 0)

    def _page(self) -> tuple[str, bytes]:
        address = f"../../files/{self.file_name}"
        if self.form == "html":
            link = f'<a href="{address}#sha256=00">{self.file_name}</a>'
            return "text/html; charset=utf-8", f"<!DOCTYPE html><html><body>{link}</body></html>".encode()
        page = {"files": [{"filename": self.file_name, "url": address, "hashes": {}}]}
        return "application/vnd.pypi.simple.v1+json", json.dumps(page).encode()

    @staticmethod
    def _send(handler: BaseHTTPRequestHandler, status: int, kind: str, body: bytes, announced: int) -> None:
        handler.send_response(status)
        handler.send_header("Content-Type", kind)
        handler.send_header("Content-Length", str(announced))
        handler.end_headers()
        handler.wfile.write(body)


@contextmanager
def serving(index: PackageIndex) -> Iterator[PackageIndex]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            index.respond(self)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the name that the base class has
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        index.url = f"http://127.0.0.1:{server.server_address[1]}/simple"
        try:
            yield index
        finally:
            server.shutdown()
            thread.join()
