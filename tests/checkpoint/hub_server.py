"""A local server that speaks the Hub's API: model info, resolve with redirects to a second host, ranges; and fails."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


class Blob:
    """A file of which only the beginning is real: `size` bytes, zeros after `start`."""

    def __init__(self, start: bytes, size: int | None = None) -> None:
        self.start = start
        self.size = len(start) if size is None else size

    def read(self, begin: int, end: int) -> bytes:
        real = self.start[begin:end]
        return real + bytes(max(0, min(end, self.size) - begin - len(real)))


@dataclass
class Request:
    host: str
    path: str
    range: str | None
    token: str | None
    status: int
    #: Bytes of the body that the client's side took.
    sent: int = 0


class Repo:
    def __init__(self, commit: str, files: dict[str, Blob]) -> None:
        self.commit = commit
        self.files = files
        self.refs = {"main": commit, "v1.0": commit, "refs/pr/1": commit}
        self.private = self.gated = self.disabled = False


class FakeHub:
    """`repos` and `renamed` say what there is; `faults` maps a part of a path to faults, one for each request to come.

    A fault is a status, or a word that `info`, `resolve` or `blob` knows.
    """

    endpoint = storage = ""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Forget everything but the addresses."""
        self.repos: dict[str, Repo] = {}
        self.renamed: dict[str, str] = {}
        self.faults: dict[str, list[object]] = {}
        self.headers: dict[str, str] = {}
        self.token = "hf_good"
        self.requests: list[Request] = []

    def take_fault(self, path: str) -> object:
        with self.lock:
            for part, answers in self.faults.items():
                if part in path and answers:
                    return answers.pop(0)
        return None

    def sent(self) -> int:
        return sum(request.sent for request in self.requests)

    def of_kind(self, part: str) -> list[Request]:
        return [request for request in self.requests if part in request.path]


def _handler(hub: FakeHub, host: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Else each answer waits 40 ms for a delayed acknowledgement.
        disable_nagle_algorithm = True

        def log_message(self, *args: object) -> None:
            pass

        def answer(self, status: int, body: bytes = b"", cut: int | None = None, **headers: str) -> None:
            # Before anything is sent: a client follows a redirect as soon as it has the header.
            request = Request(host, self.path, self.headers.get("range"), self.headers.get("authorization"), status)
            with hub.lock:
                hub.requests.append(request)
            self.send_response(status)
            headers.setdefault("Content_Length", str(len(body)))
            for name, value in headers.items():
                if value:
                    self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            content = memoryview(body if cut is None else body[:cut])
            self.close_connection = cut is not None
            try:
                for at in range(0, len(content), 65_536):
                    # Before it is written: the client may be done before this thread goes on.
                    request.sent += len(content[at : at + 65_536])
                    self.wfile.write(content[at : at + 65_536])
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True

        def error(self, status: int, code: str = "", message: str = "", **headers: str) -> None:
            body = json.dumps({"error": message or code}).encode()
            self.answer(status, body, X_Error_Code=code, X_Error_Message=message, **headers)

        def do_GET(self) -> None:
            fault = hub.take_fault(self.path)
            if isinstance(fault, int):
                return self.error(fault, message="as ordered", **hub.headers)
            path = unquote(urlsplit(self.path).path)
            if host == "storage":
                return self.blob(path, fault)
            if path.startswith("/api/models/"):
                return self.info(path, fault)
            found = re.fullmatch(r"/(.+?)/resolve/([0-9a-f]{40})/(.+)", path)
            if found is None:
                return self.error(404)
            return self.resolve(*found.groups(), fault=fault)

        def repo(self, name: str) -> Repo | None:
            repo = hub.repos.get(name)
            token = self.headers.get("authorization")
            if token is not None and token != f"Bearer {hub.token}":
                self.error(401, message="Invalid credentials in Authorization header")
                return None
            if repo is None or (repo.private and token is None):
                self.error(401 if token is None else 404, "RepoNotFound", "Repository not found")
                return None
            if repo.disabled:
                self.error(403, message="Access to this resource is disabled.")
                return None
            return repo

        def info(self, path: str, fault: object) -> None:
            name, _, revision = path.removeprefix("/api/models/").partition("/revision/")
            if name in hub.renamed:
                target = self.path.replace(name, hub.renamed[name])
                return self.answer(307, Location=target)
            repo = self.repo(name)
            if repo is None:
                return None
            commit = repo.refs.get(revision or "main", revision)
            if commit != repo.commit:
                return self.error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            siblings = [{"rfilename": file, "size": blob.size} for file, blob in repo.files.items()]
            info = {"id": name, "sha": commit, "siblings": siblings, "private": repo.private, "tags": []}
            body = json.dumps(info).encode()
            if fault == "not json":
                body = b"<html>captive portal</html>"
            if fault == "not an object":
                body = b"[1]"
            if fault == "no commit":
                body = json.dumps({**info, "sha": "../../x"}).encode()
            return self.answer(
                200, body, cut=len(body) // 2 if fault == "cut" else None, Content_Type="application/json"
            )

        def resolve(self, name: str, commit: str, file: str, fault: object) -> None:
            repo = self.repo(name)
            if repo is None:
                return None
            if repo.gated:
                return self.error(403, "GatedRepo", f"Access to model {name} is restricted")
            if commit != repo.commit or file not in repo.files:
                return self.error(404, "EntryNotFound", "Entry not found")
            if file.endswith(".safetensors"):
                return self.answer(302, Location=f"{hub.storage}/{name}/{file}?signature=x")
            body = repo.files[file].start
            return self.answer(200, body, cut=len(body) // 2 if fault == "cut" else None, ETag='"small"')

        def blob(self, path: str, fault: object) -> None:
            owner, name, file = path[1:].split("/", 2)
            blob = hub.repos[f"{owner}/{name}"].files[file]
            found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
            if found is None or fault == "ignore range":
                end = min(blob.size, 50_000_000)
                return self.answer(200, blob.read(0, end), Content_Length=str(blob.size), cut=end)
            begin, end = int(found[1]), min(int(found[2]) + 1, blob.size)
            if begin >= blob.size:
                return self.error(416, Content_Range=f"bytes */{blob.size}")
            body, content_range = blob.read(begin, end), f"bytes {begin}-{end - 1}/{blob.size}"
            extra: dict[str, str] = {}
            cut = None
            if fault == "cut":
                cut = len(body) // 2
            elif fault == "short":
                body = body[:-1]
            elif fault == "long":
                body += b"x"
            elif fault == "shifted":
                content_range = f"bytes {begin + 1}-{end}/{blob.size}"
            elif fault == "no content-range":
                content_range = ""
            elif fault == "other size":
                content_range = f"bytes {begin}-{end - 1}/{blob.size + 1}"
            elif fault == "encoded":
                extra["Content_Encoding"] = "gzip"
            return self.answer(206, body, cut=cut, Content_Range=content_range, ETag='"large"', **extra)

    return Handler


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64


@contextmanager
def serve(hub: FakeHub) -> Iterator[FakeHub]:
    """Run the Hub and its storage on two ports of the loopback interface."""
    servers = [_Server(("127.0.0.1", 0), _handler(hub, host)) for host in ("hub", "storage")]
    hub.endpoint, hub.storage = (f"http://127.0.0.1:{server.server_port}" for server in servers)
    threads = [threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield hub
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
