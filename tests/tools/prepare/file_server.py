# SPDX-License-Identifier: Apache-2.0
"""A web server with one file, which may break off, know no ranges, or change the file."""

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler

from tests.checkpoints.hub_server import served_by


@dataclass
class Served:
    """One file at ``url``; each answer ends after ``most`` bytes, where it is given."""

    content: bytes
    name: str = "archive.tar.gz"
    most: int | None = None
    has_ranges: bool = True
    has_length: bool = True
    starts: list[int] = field(default_factory=list)  # of the ranges that were asked for
    url: str = ""

    @property
    def version(self) -> str:
        return f'"{hashlib.sha1(self.content).hexdigest()}"'


@contextlib.contextmanager
def serve(served: Served) -> Iterator[Served]:
    with served_by(_handler(served)) as address:
        served.url = f"{address}/{served.name}"
        yield served


def _handler(served: Served) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._head(200, len(served.content))

        def do_GET(self) -> None:
            start = 0
            asked = self.headers.get("Range", "")
            fits = self.headers.get("If-Range", served.version) == served.version
            if served.has_ranges and asked and fits:
                start = int(asked.removeprefix("bytes=").rstrip("-"))
            served.starts.append(start)
            body = served.content[start:]
            self._head(206 if start else 200, len(body))
            self.wfile.write(body[: served.most])

        def _head(self, status: int, length: int) -> None:
            if not self.path.endswith(served.name):
                self.send_error(404)
                return
            self.send_response(status)
            self.send_header("ETag", served.version)
            if served.has_length:
                self.send_header("Content-Length", str(length))
            self.end_headers()

    return Handler
