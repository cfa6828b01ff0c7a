"""A small hub on this machine: answers `huggingface_hub` over plain HTTP as the real one does.

Knows repositories, revisions, large-file redirects, ranges, and the hub's ways of saying no. Give its
`endpoint` to a process of its own as `HF_ENDPOINT`: the library reads that once, when it is imported.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Any, ClassVar, Self
from urllib.parse import unquote, urlsplit

from safetensors.torch import save_file
from torch import Tensor


def save_shards(folder: Path, tensors: dict[str, Tensor], num_shards: int) -> list[Path]:
    """Several files and their index, as the hub keeps large models."""
    names = sorted(tensors)
    shards = {
        f"model-{place + 1:05}-of-{num_shards:05}.safetensors": names[place::num_shards]
        for place in range(num_shards)
    }
    for file, members in shards.items():
        save_file({name: tensors[name].contiguous() for name in members}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, held in shards.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return [folder / file for file in shards]


@dataclass(frozen=True)
class Repository:
    """Files at one commit, which every name in `revisions` points at."""

    files: Mapping[str, bytes]
    revisions: tuple[str, ...] = ("main",)
    gated: bool = False

    @property
    def commit(self) -> str:
        digest = hashlib.sha1(usedforsecurity=False)
        for name in sorted(self.files):
            digest.update(name.encode() + self.files[name])
        return digest.hexdigest()


@dataclass
class Hub:
    """Serves `repositories` while it is entered. `downloads` lists each file whose bytes were asked for.

    Of a file in `broken_once`, the first answer stops halfway.
    """

    repositories: Mapping[str, Repository]
    broken_once: set[str] = field(default_factory=set)
    downloads: list[str] = field(default_factory=list)

    def __enter__(self) -> Self:
        handler = type("BoundHandler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        return self

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _RefusalError(Exception):
    def __init__(self, status: HTTPStatus, code: str) -> None:
        super().__init__(code)
        self.status = status
        self.code = code


class _Handler(BaseHTTPRequestHandler):
    hub: ClassVar[Hub]
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, format: str, *args: Any) -> None:
        """Tests read the client's output, not the server's."""

    def _answer(self, *, with_body: bool) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        try:
            match parts:
                case ["api", "models", org, name]:
                    self._send_info(f"{org}/{name}", "main")
                case ["api", "models", org, name, "revision", revision]:
                    self._send_info(f"{org}/{name}", revision)
                case ["api", "models", org, name, "tree", revision, *_]:
                    self._send_tree(f"{org}/{name}", revision)
                case [org, name, "resolve", revision, *path]:
                    self._send_file(f"{org}/{name}", revision, "/".join(path), with_body=with_body)
                case ["large", org, name, revision, *path]:
                    repository = self._repository(f"{org}/{name}", revision)
                    self._send_bytes("/".join(path), repository, with_body=with_body)
                case _:
                    raise _RefusalError(HTTPStatus.NOT_FOUND, "EntryNotFound")
        except _RefusalError as refusal:
            self.send_response(refusal.status)
            self.send_header("X-Error-Code", refusal.code)
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _repository(self, name: str, revision: str) -> Repository:
        repository = self.hub.repositories.get(name)
        if repository is None:
            raise _RefusalError(HTTPStatus.NOT_FOUND, "RepoNotFound")
        if revision not in (*repository.revisions, repository.commit):
            raise _RefusalError(HTTPStatus.NOT_FOUND, "RevisionNotFound")
        return repository

    def _send_info(self, name: str, revision: str) -> None:
        repository = self._repository(name, revision)
        siblings = [{"rfilename": file} for file in repository.files]
        self._send_json({"id": name, "sha": repository.commit, "siblings": siblings})

    def _send_tree(self, name: str, revision: str) -> None:
        files = self._repository(name, revision).files
        self._send_json(
            [{"type": "file", "path": file, "size": len(data), "oid": _etag(data)} for file, data in files.items()]
        )

    def _send_json(self, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _send_file(self, name: str, revision: str, path: str, *, with_body: bool) -> None:
        repository = self._repository(name, revision)
        if repository.gated:
            raise _RefusalError(HTTPStatus.FORBIDDEN, "GatedRepo")
        if path not in repository.files:
            raise _RefusalError(HTTPStatus.NOT_FOUND, "EntryNotFound")
        if not path.endswith((".safetensors", ".pt")):
            self._send_bytes(path, repository, with_body=with_body)
            return
        data = repository.files[path]  # large files live elsewhere, at an address of their own
        self.send_response(HTTPStatus.FOUND)
        self.send_header("Location", f"{self.hub.endpoint}/large/{name}/{revision}/{path}")
        self.send_header("X-Repo-Commit", repository.commit)
        self.send_header("X-Linked-Size", str(len(data)))
        self.send_header("X-Linked-ETag", f'"{_etag(data)}"')
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send_bytes(self, path: str, repository: Repository, *, with_body: bool) -> None:
        data = repository.files[path]
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        self.send_response(HTTPStatus.PARTIAL_CONTENT if start else HTTPStatus.OK)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(data) - start))
        self.send_header("ETag", f'"{_etag(data)}"')
        self.send_header("X-Repo-Commit", repository.commit)
        self.end_headers()
        if not with_body:
            return
        self.hub.downloads.append(path)
        if path in self.hub.broken_once:
            self.hub.broken_once.remove(path)
            self.wfile.write(data[start : start + len(data) // 2])
            self.close_connection = True
            return
        self.wfile.write(data[start:])


def _etag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
