"""A stand-in for the Hugging Face hub: a server on this machine that keeps repositories of models in memory."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

USER = "someone"


class Hub(ThreadingHTTPServer):
    """files: repository → path → bytes; private: repository → whether it is; token: the one that may write."""

    def __init__(self, token: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.token = token
        self.files: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def commit(self, name: str) -> str:
        """The hash of what a repository holds."""
        return hashlib.sha1(repr(sorted(self.files[name].items())).encode()).hexdigest()


@contextmanager
def serving(token: str) -> Iterator[Hub]:
    """A hub while the block runs."""
    with Hub(token) as hub:
        thread = threading.Thread(target=hub.serve_forever, daemon=True)
        thread.start()
        yield hub
        hub.shutdown()
        thread.join()


class Handler(BaseHTTPRequestHandler):
    """What uploading a folder and fetching a snapshot ask for."""

    server: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Authorization") != f"Bearer {self.server.token}":
            self._answer(403, {"error": f"may not write: {self.headers.get('Authorization')}"})
        elif self.path == "/api/repos/create":
            self._create(json.loads(body))
        elif self.path == "/api/validate-yaml":
            self._answer(200, {"warnings": [], "errors": []})
        elif self.path.endswith("/preupload/main"):
            files = [{"path": one["path"], "uploadMode": "regular"} for one in json.loads(body)["files"]]
            self._answer(200, {"files": [one | {"shouldIgnore": False} for one in files]})
        else:
            name = self.path.removeprefix("/api/models/").removesuffix("/commit/main")
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.files[name][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            commit = self.server.commit(name)
            self._answer(200, {"commitUrl": f"{self.server.url}/{name}/commit/{commit}", "commitOid": commit})

    def _create(self, wanted: dict[str, Any]) -> None:
        name = f"{wanted.get('organization') or USER}/{wanted['name']}"
        there = name in self.server.files
        if not there:
            self.server.files[name] = {}
            self.server.private[name] = bool(wanted.get("private")) or wanted.get("visibility") == "private"
        self._answer(409 if there else 200, {"url": f"{self.server.url}/{name}"})

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        name = "/".join(path.removeprefix("/api/models").split("/")[1:3])
        files = self.server.files.get(name)
        if files is None:
            self._answer(404, {"error": "Repository not found"})
        elif not path.startswith("/api/"):
            self._send(200, files[path.split("/", 5)[5]], self.server.commit(name))
        elif "/tree/" in path:
            kinds = [(file, len(data), hashlib.sha1(data).hexdigest()) for file, data in files.items()]
            self._answer(200, [{"type": "file", "path": file, "size": size, "oid": oid} for file, size, oid in kinds])
        else:
            found = {"id": name, "private": self.server.private[name], "sha": self.server.commit(name)}
            self._answer(200, found | {"siblings": [{"rfilename": file} for file in files]})

    def _answer(self, status: int, value: Any) -> None:
        self._send(status, json.dumps(value).encode())

    def _send(self, status: int, data: bytes, commit: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        if commit:
            self.send_header("X-Repo-Commit", commit)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Nothing: the test has its own output."""
