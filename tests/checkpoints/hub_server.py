# SPDX-License-Identifier: Apache-2.0
"""A hub of repositories on this machine, models and data sets: what huggingface_hub asks of one, over plain HTTP."""

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@dataclass
class Hub:
    """Repositories by name, each with its files; those in ``gated`` are listed, but refused."""

    repositories: dict[str, dict[str, bytes]]
    gated: set[str] = field(default_factory=set)
    cut: set[str] = field(default_factory=set)  # files of which only the first half arrives
    asked: list[str] = field(default_factory=list)  # "name@revision/file" of each file that was sent
    revisions: set[str] = field(default_factory=set)  # "name@revision" of each repository that was listed
    url: str = ""

    def commit(self, name: str) -> str:
        return hashlib.sha1(name.encode()).hexdigest()


@contextlib.contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    with served_by(_handler(hub)) as hub.url:
        yield hub


@contextlib.contextmanager
def served_by(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address of a web server on this machine, which ends with the block."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            words = [unquote(word) for word in urlsplit(self.path).path.strip("/").split("/")]
            if words[0] == "datasets":
                words = words[1:]
            if words[0] == "api" and words[1] in ("models", "datasets"):
                self._describe("/".join(words[2:4]), words[4:])
            elif len(words) > 4 and words[2] == "resolve":
                self._send_file("/".join(words[:2]), words[3], "/".join(words[4:]))
            else:
                self._send(404, {})

        do_HEAD = do_GET

        def _describe(self, name: str, rest: list[str]) -> None:
            files = hub.repositories.get(name)
            if files is None:
                self._send(404, {"X-Error-Code": "RepoNotFound"})
                return
            hub.revisions.add(f"{name}@{rest[1] if len(rest) > 1 else 'main'}")
            if rest[:1] == ["tree"]:
                folder = "/".join([*rest[2:], ""]) if len(rest) > 2 else ""
                tree = [
                    {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for path, data in files.items()
                    if path.startswith(folder)
                ]
                if tree or not folder:
                    self._send_json(tree)
                else:
                    self._send(404, {"X-Error-Code": "EntryNotFound"})
                return
            siblings = [{"rfilename": path, "size": len(data), "blobId": "0"} for path, data in files.items()]
            self._send_json({"id": name, "modelId": name, "sha": hub.commit(name), "siblings": siblings})

        def _send_file(self, name: str, revision: str, path: str) -> None:
            data = hub.repositories.get(name, {}).get(path)
            if name in hub.gated:
                self._send(403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access to this repo is restricted"})
                return
            if data is None:
                self._send(404, {"X-Error-Code": "EntryNotFound"})
                return
            headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": hub.commit(name)}
            if self.command == "GET":
                hub.asked.append(f"{name}@{revision}/{path}")
                if path in hub.cut:  # the connection breaks in the middle of the file
                    self.send_response(200)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data[: len(data) // 2])
                    self.close_connection = True
                    return
            self._send(200, {**headers, "Content-Type": "application/octet-stream"}, data)

        def _send_json(self, tree: object) -> None:
            self._send(200, {"Content-Type": "application/json"}, json.dumps(tree).encode())

        def _send(self, status: int, headers: dict[str, str], data: bytes = b"") -> None:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

    return Handler
