"""A server on loopback that speaks as much of the Hugging Face Hub's protocol as downloads need.

Models and datasets by revision, file trees, `resolve` with ETag, commit and byte ranges, the Hub's error codes, gated
repositories; on request it cuts a connection in the middle of a file. It advertises no Xet storage.
"""

from __future__ import annotations

import hashlib
import io
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest


@dataclass
class Repo:
    """A repository with one commit; `files` maps a path to its bytes."""

    files: dict[str, bytes]
    revisions: dict[str, str]  # branch or tag -> commit
    gated: bool = False
    token: str = ""  # that opens a gated repository

    @property
    def commits(self) -> set[str]:
        return set(self.revisions.values())


@dataclass
class Request:
    method: str
    path: str
    authorization: str | None
    byte_range: str | None


@dataclass
class Hub:
    """The server's content and what it was asked."""

    url: str = ""
    repos: dict[tuple[str, str], Repo] = field(default_factory=dict)  # ("models" or "datasets", "org/name")
    requests: list[Request] = field(default_factory=list)
    cuts: dict[str, list[int]] = field(default_factory=dict)  # file -> bytes sent before the next answers are cut off
    delays: dict[str, float] = field(default_factory=dict)  # file -> seconds before it is sent
    stop: threading.Event = field(default_factory=threading.Event)

    def add(self, kind: str, name: str, files: Mapping[str, bytes], *, commit: str = "", **settings: Any) -> str:
        """Publish a repository; returns its commit."""
        digest = hashlib.sha1("".join(f"{n}{len(b)}" for n, b in sorted(files.items())).encode()).hexdigest()
        commit = commit or digest
        self.repos[kind, name] = Repo(dict(files), {"main": commit}, **settings)
        return commit

    def downloads(self, file: str) -> list[Request]:
        """Every GET of a file by its name."""
        return [r for r in self.requests if r.method == "GET" and "/resolve/" in r.path and r.path.endswith("/" + file)]


class _Refused(Exception):
    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: Any) -> None:
        """Log no requests."""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path)
        headers = self.headers
        self.hub.requests.append(Request(self.command, path, headers.get("Authorization"), headers.get("Range")))
        body = self.rfile.read(int(headers.get("Content-Length") or 0))
        try:
            if path.startswith("/api/"):
                self._send_json(self._api(path, url.path, body))
            else:
                self._file(path, url.path)
        except _Refused as refused:
            self._send(refused.status, b"", {"X-Error-Code": refused.code, "X-Error-Message": refused.message})
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    do_HEAD = do_POST = do_GET

    def _repo(self, kind: str, name: str, revision: str) -> tuple[Repo, str]:
        repo = self.hub.repos.get((kind, name))
        if repo is None:
            raise _Refused(401, "RepoNotFound", "Repository not found")
        commit = revision if revision in repo.commits else repo.revisions.get(revision)
        if commit is None:
            raise _Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return repo, commit

    def _check_access(self, repo: Repo) -> None:
        """Refuse the files of a gated repository; what it is anyone may read, as on the Hub."""
        given = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if repo.gated and given != repo.token:
            raise _Refused(403 if given else 401, "GatedRepo", "Access to this repository is restricted.")

    def _api(self, path: str, quoted: str, body: bytes) -> Any:
        if path.count("/") < 4:
            raise _Refused(404, "EntryNotFound", f"no such call: {path}")
        _, _, kind, org, name, *rest = path.split("/")
        # A revision such as refs/pr/1 is quoted as one part.
        revision = unquote(quoted.split("/")[6]) if len(rest) > 1 else "main"
        inside = "/".join(unquote(part) for part in quoted.split("/")[7:])
        repo, commit = self._repo(kind, f"{org}/{name}", revision)
        verb = rest[0] if rest else "revision"
        if verb == "auth-check":
            self._check_access(repo)
            return {}
        if verb == "revision":
            siblings = [{"rfilename": file} for file in repo.files]
            return {"id": f"{org}/{name}", "sha": commit, "siblings": siblings, "private": False, "gated": repo.gated}
        if verb == "tree":
            recursive = parse_qs(urlsplit(self.path).query).get("recursive", ["False"])[0].lower() == "true"
            return _tree(repo, inside, recursive=recursive)
        if verb == "paths-info":
            asked = json.loads(body)["paths"] if body.startswith(b"{") else parse_qs(body.decode())["paths"]
            entries = {entry["path"]: entry for entry in _tree(repo, "", recursive=True)}
            return [entries[item] for item in asked if item in entries]
        raise _Refused(404, "EntryNotFound", f"no such call: {path}")

    def _file(self, path: str, quoted: str) -> None:
        parts = path.lstrip("/").split("/")
        kind = "models"
        if parts[0] == "datasets":
            kind, parts = "datasets", parts[1:]
        org, name, verb, *_ = parts
        if verb != "resolve":
            raise _Refused(404, "EntryNotFound", "Entry not found")
        offset = 5 if kind == "datasets" else 4
        revision = unquote(quoted.split("/")[offset])
        file = "/".join(unquote(part) for part in quoted.split("/")[offset + 1 :])
        repo, commit = self._repo(kind, f"{org}/{name}", revision)
        self._check_access(repo)
        if file not in repo.files:
            raise _Refused(404, "EntryNotFound", "Entry not found")
        self._send_file(file, repo.files[file], commit)

    def _send_file(self, file: str, content: bytes, commit: str) -> None:
        headers = {"ETag": f'"{_blob(content)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        status, first = 200, 0
        asked = self.headers.get("Range")
        if asked:
            begin, _, last = asked.removeprefix("bytes=").partition("-")
            first, status = int(begin), 206
            size = len(content)
            content = content[: int(last) + 1] if last else content
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{size}"
        if self.command == "GET" and self.hub.delays.get(file):
            self.hub.stop.wait(self.hub.delays[file])
        cuts = self.hub.cuts.get(file)
        if self.command == "GET" and cuts:
            sent = cuts.pop(0)
            self._head(status, len(content) - first, headers)
            self.wfile.write(content[first : first + sent])
            self.wfile.flush()
            self.close_connection = True
            return
        self._send(status, content[first:], headers)

    def _send_json(self, content: Any) -> None:
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, content: bytes, headers: Mapping[str, str]) -> None:
        self._head(status, len(content), headers)
        if self.command != "HEAD":
            self.wfile.write(content)

    def _head(self, status: int, length: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(length)}.items():
            self.send_header(name, value)
        self.end_headers()


def _blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _tree(repo: Repo, folder: str, *, recursive: bool) -> list[dict[str, Any]]:
    prefix = f"{folder}/" if folder else ""
    inside = {path: content for path, content in repo.files.items() if path.startswith(prefix)}
    if folder and not inside:
        raise _Refused(404, "EntryNotFound", f"{folder} does not exist")
    entries: dict[str, dict[str, Any]] = {}
    for path, content in inside.items():
        parts = path.removeprefix(prefix).split("/")
        for depth in range(1, len(parts)):
            above = prefix + "/".join(parts[:depth])
            if recursive or depth == 1:
                entries[above] = {"type": "directory", "oid": "0" * 40, "size": 0, "path": above}
        if recursive or len(parts) == 1:
            entries[path] = {"type": "file", "oid": _blob(content), "size": len(content), "path": path}
    return list(entries.values())


@contextmanager
def serve_hub() -> Iterator[Hub]:
    """Run a server on a free port of loopback."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.stop.set()
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)


def folder_files(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder as a repository's: path -> bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def parquet_bytes(**columns: list[Any]) -> bytes:
    """Return a Parquet file of these columns."""
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer)
    return buffer.getvalue()


def dataset_card(**configs: Sequence[str]) -> bytes:
    """Return a README.md that names the splits of each configuration, at CONFIG/SPLIT.parquet."""
    lines = ["---", "configs:"]
    for config, splits in configs.items():
        lines += [f"- config_name: {config}", "  data_files:"]
        for split in splits:
            lines += [f"  - split: {split}", f"    path: {config}/{split}.parquet"]
    return "\n".join([*lines, "---", ""]).encode()


def use_hub(hub: Hub, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process and those it starts talk to the server alone and cache in `home`, without a token."""
    from huggingface_hub import constants

    for name in ("HF_HUB_CACHE", "HF_TOKEN", "HF_HUB_OFFLINE", "HUGGING_FACE_HUB_TOKEN", "HF_DATASETS_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HOME", str(home))
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + template[template.index("/{repo_id}") :])
    monkeypatch.setattr(constants, "HF_HOME", str(home))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def go_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set HF_HUB_OFFLINE for this process and those it starts."""
    from huggingface_hub import constants

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
