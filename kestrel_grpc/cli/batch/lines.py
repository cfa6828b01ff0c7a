"""Reads records of `kestrel-grpc batch`, turns each into an HTTP request, and makes its output line.

A record is a line of JSON, a picture of a folder, or a row of a Parquet file. It is turned into the path and the
body of a request, whose fields the HTTP frontends define and check; this module only adds the image and the seed.
An output line leaves out all values that differ from run to run, so that a resumed run writes the same bytes as a
run without a break.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

from kestrel_client.images import is_on_server
from kestrel_grpc.calls.errors import describe
from kestrel_grpc.cli.common import PICTURE_SUFFIXES
from kestrel_grpc.frontends.http.output_json import to_json
from kestrel_grpc.frontends.rest.rendering import failure_body
from kestrel_grpc.frontends.rest.requests import ROUTES
from kestrel_grpc.images.data_urls import is_data_url
from kestrel_grpc.process.terminal import print_error
from kestrel_runtime.api.errors import InvalidRequest, Violation, did_you_mean

OWN_FIELDS = ("id", "skill", "image")
"""The fields of a line that are not fields of the skill's request."""
_OPENAI_FIELDS = ("custom_id", "method", "url", "body")
_OPENAI_METHOD = "POST"
_MAX_FILE_BYTES = 256 * 2**20
"""The largest image file, in bytes. Servers have lower limits; this limit keeps other large files out of memory."""
DIGEST_BYTES = 8
"""The length of the digest of a record, which is written in hexadecimal digits."""
_ROWS_AT_ONCE = 64
_NUM_SEEDS = 2**63
"""The number of seeds, from 0 on, that all routes accept."""
_MAX_PATH_CHARS = 1024
_PATH_WITHOUT_SKILL = "/v1/"
_IMAGE_FIELD, _IMAGES_FIELD = "image_url", "image_urls"
_PATH = re.compile(r"/v1/[A-Za-z0-9_/.-]+")
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]{40,}={0,2}\s*")
"""Matches the base64 of a picture. Shorter texts are names of files, since every picture has more bytes."""
_VARYING = frozenset(("request_id", "created", "cached_tokens", "prompt_tokens_details", "retry_after_seconds"))
"""The names in answers whose values differ from run to run, apart from times, whose names end with their unit."""
_UNITS_OF_TIME = ("_ms", "_s")


# Records


class InputUnusable(Exception):
    """The input cannot be read; the text says why."""


@dataclass(frozen=True, slots=True)
class Record:
    """Represents a record of the input.

    `number` counts from 1; `content` is a line, or the fields that were read already.
    """

    number: int
    digest: str
    content: bytes | Mapping[str, Any]


class Source(Protocol):
    """Yields the records of an input once, in order."""

    def __iter__(self) -> Iterator[Record]: ...

    def share_read(self) -> float | None:
        """The share of the input that has been read, from 0 to 1; None if its size is unknown."""
        ...


def open_source(path: Path) -> Source:
    """Opens a folder of pictures, a Parquet file, or a file of JSON lines. Raises `InputUnusable`."""
    try:
        if path.is_dir():
            return PictureFolder(path)
        return ParquetRows(path) if path.suffix.lower() == ".parquet" else JsonLines(path)
    except OSError as error:
        raise InputUnusable(f"{error.filename or path}: {error.strerror or error}") from error


class JsonLines:
    """Reads a file with a JSON object in each line, and skips empty lines."""

    def __init__(self, path: Path) -> None:
        """Opens the file. Raises OSError."""
        found = path.stat()
        self._path = path
        self._num_bytes = found.st_size if stat.S_ISREG(found.st_mode) else 0
        self._num_read_bytes = 0
        if self._num_bytes:
            path.open("rb").close()  # fails now rather than after the model was loaded

    def __iter__(self) -> Iterator[Record]:
        number = 0
        with self._path.open("rb") as file:
            for line in file:
                self._num_read_bytes += len(line)
                content = line.strip()
                if content:
                    number += 1
                    yield Record(number, _digest(content), content)

    def share_read(self) -> float | None:
        return self._num_read_bytes / self._num_bytes if self._num_bytes else None


class PictureFolder:
    """Reads the image files of a folder and its subfolders, by name. The id of each is its path in the folder.

    Skips hidden files and folders, whose names begin with a dot.
    """

    def __init__(self, folder: Path) -> None:
        """Lists the pictures. Raises `InputUnusable` if there is no picture, or OSError."""
        self.names: Sequence[str] = sorted(_pictures_in(folder))
        """The path of each picture in the folder."""
        self._folder = folder
        self._num_read = 0
        if not self.names:
            raise InputUnusable(f"{folder}: the folder holds no pictures ({', '.join(sorted(PICTURE_SUFFIXES))})")

    def __iter__(self) -> Iterator[Record]:
        for name in self.names:
            self._num_read += 1
            path = (self._folder / name).absolute()
            try:
                size = path.stat().st_size
            except OSError:  # the output line reports why the picture cannot be read
                size = None
            # A name of an old archive may not be UTF-8, and JSON has no bytes.
            id = os.fsencode(name).decode(errors="backslashreplace")
            yield Record(self._num_read, _digest(os.fsencode(f"{name} {size}")), {"id": id, "image": path})

    def share_read(self) -> float | None:
        return self._num_read / len(self.names)


def _pictures_in(folder: Path) -> Iterator[str]:
    """Yields the paths of image files relative to the folder. Reports a subfolder that cannot be read."""

    def report(error: OSError) -> None:
        if error.filename == os.fspath(folder):
            raise error
        print_error(f"{error.filename}: {error.strerror}; its pictures are left out")

    for place, folders, names in os.walk(folder, onerror=report):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if not name.startswith(".") and Path(name).suffix.lower() in PICTURE_SUFFIXES:
                yield (Path(place) / name).relative_to(folder).as_posix()


class ParquetRows:
    """Reads the rows of a Parquet file: columns are the fields of a line, and null is absent."""

    def __init__(self, path: Path) -> None:
        """Opens the file. Raises `InputUnusable` without pyarrow or for a file of another format, or OSError."""
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise InputUnusable(f"{path}: Parquet needs `pip install 'kestrel-grpc[parquet]'`") from error
        try:
            self._file = pyarrow.parquet.ParquetFile(path)
        except pyarrow.ArrowInvalid as error:
            raise InputUnusable(f"{path}: is no Parquet file") from error
        self._num_read = 0

    def __iter__(self) -> Iterator[Record]:
        from pyarrow import ArrowException

        try:
            for batch in self._file.iter_batches(batch_size=_ROWS_AT_ONCE):
                for row in batch.to_pylist():
                    self._num_read += 1
                    yield Record(self._num_read, _digest_of_row(row), row)
        except ArrowException as error:
            raise InputUnusable(f"the Parquet file is damaged behind row {self._num_read}") from error

    def share_read(self) -> float | None:
        num_rows = self._file.metadata.num_rows
        return self._num_read / num_rows if num_rows else None


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).hexdigest()


def _digest_of_row(row: Mapping[str, Any]) -> str:
    def plain(value: Any) -> str:
        return _digest(value) if isinstance(value, bytes) else str(value)

    return _digest(json.dumps(row, default=plain).encode())


# From a record to a request


@dataclass(frozen=True, slots=True)
class _ImageFile:
    """Stands for an image among the fields of a request, which is written in base64. `name` is its field of the
    line."""

    name: str
    content: bytes | Path

    def base64(self) -> str:
        """Returns the file. Raises `InvalidRequest` if it cannot be read, or is none."""
        try:
            data = self.content if isinstance(self.content, bytes) else _read_image(self.content, self.name)
        except OSError as error:
            raise InvalidRequest((Violation(self.name, f"cannot be read: {error.strerror}"),)) from None
        return base64.b64encode(data).decode()


@dataclass(frozen=True, slots=True)
class Template:
    """Holds the defaults of all lines. Raises ValueError for a skill that does not exist.

    `fields` are fields of the request. A line without a seed gets `seed` plus its number. Paths of images are
    relative to `folder`.
    """

    skill: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])
    seed: int = 0
    folder: Path = Path()

    def __post_init__(self) -> None:
        if self.skill is not None and self.skill not in ROUTES:
            hint = did_you_mean(self.skill, ROUTES)
            raise ValueError(f"--skill {self.skill}: must be one of {', '.join(ROUTES)}{hint}")

    def seed_of(self, record: Record) -> int:
        """Returns the seed of a line that has none."""
        return (self.seed + record.number) % _NUM_SEEDS


@dataclass(slots=True)
class Line:
    """Represents a record as a request: `path` and `body()` are to be sent, unless there are `violations`."""

    number: int
    id: str | int
    is_openai: bool
    path: str = ""
    fields: dict[str, Any] = field(default_factory=dict[str, Any])
    has_image: bool = False
    """True if the record names an image of its own."""
    reads_file: bool = False
    """True if `body` reads a file, which takes a while."""
    violations: list[Violation] = field(default_factory=list[Violation])

    @classmethod
    def read(cls, record: Record, template: Template) -> Self:
        """Parses a record; all faults are in `violations`, and none raises an error."""
        content = record.content
        if isinstance(content, bytes):
            content = _parsed(content)
        if content is None:
            line = cls(record.number, record.number, is_openai=False)
            line.violations.append(Violation("", "the line is not a JSON object in UTF-8"))
            return line
        given = {name: value for name, value in content.items() if value is not None}
        line = cls(record.number, record.number, is_openai="custom_id" in given or "body" in given)
        if line.is_openai:
            line._read_openai(given, template.seed_of(record))
        else:
            line._read_rest(given, template, template.seed_of(record))
        if line.fields.get("stream"):
            line._refuse("body.stream" if line.is_openai else "stream", "must be false: a line has a whole answer")
        return line

    @property
    def request_id(self) -> str:
        """The id of the request in the log of a server."""
        return f"batch-{self.number}"

    def body(self) -> bytes:
        """Returns the body of the request, as JSON.

        Raises `InvalidRequest` if a file of an image cannot be read.
        """
        return json.dumps(self.fields, default=_as_json).encode()

    def _refuse(self, name: str, description: str) -> None:
        self.violations.append(Violation(name, description))

    def _read_openai(self, given: Mapping[str, Any], seed: int) -> None:
        for name in given.keys() - set(_OPENAI_FIELDS):
            self._refuse(name, "is not a field of a line of OpenAI's batches")
        id, url, body = given.get("custom_id"), given.get("url"), given.get("body")
        if isinstance(id, str):
            self.id = id
        else:
            self._refuse("custom_id", "must be a text")
        if given.get("method", _OPENAI_METHOD) != _OPENAI_METHOD:
            self._refuse("method", f"must be {_OPENAI_METHOD}")
        if isinstance(url, str) and _PATH.fullmatch(url):
            self.path = url
        else:
            self._refuse("url", "must be a path such as /v1/chat/completions")
        if isinstance(body, Mapping):
            self.fields = {**body} if body.get("seed") is not None else {**body, "seed": seed}
        else:
            self._refuse("body", "must be an object")

    def _read_rest(self, given: Mapping[str, Any], template: Template, seed: int) -> None:
        id, skill, image = given.get("id"), given.get("skill", template.skill), given.get("image")
        if isinstance(id, str) or type(id) is int:
            self.id = id
        elif id is not None:
            self._refuse("id", "must be a text or a whole number")
        if skill is None:
            self._refuse("skill", "is required, in the line or by --skill")
        elif skill not in tuple(ROUTES):
            hint = did_you_mean(skill, ROUTES) if isinstance(skill, str) else ""
            self._refuse("skill", f"must be one of {', '.join(ROUTES)}{hint}")
        self.path = _PATH_WITHOUT_SKILL if skill is None else f"/v1/{skill}"
        self.has_image = image is not None
        fields = {name: value for name, value in given.items() if name not in OWN_FIELDS}
        self.fields = merged(template.fields, fields)
        settings = self.fields.get("settings", {})
        if isinstance(settings, Mapping) and settings.get("seed") is None:
            self.fields["settings"] = {**settings, "seed": seed}
        if image is not None:
            if _IMAGE_FIELD in self.fields:
                self._refuse("image", f"cannot be combined with {_IMAGE_FIELD}")
            self.fields[_IMAGE_FIELD] = self._image("image", image, template.folder)
        messages = self.fields.get("messages")
        if isinstance(messages, list):
            self.fields["messages"] = [
                self._message(f"messages[{index}]", message, template.folder)
                for index, message in enumerate(messages)
            ]

    def _message(self, name: str, message: Any, folder: Path) -> Any:
        """Returns a message of a conversation with its `images` in the field of the request."""
        images = message.get("images") if isinstance(message, Mapping) else None
        if images is None:
            return message
        fields = {name: value for name, value in message.items() if name != "images"}
        if _IMAGES_FIELD in fields:
            self._refuse(f"{name}.images", f"cannot be combined with {_IMAGES_FIELD}")
        if not isinstance(images, list):
            self._refuse(f"{name}.images", "must be a list")
            return fields
        found = [self._image(f"{name}.images[{index}]", image, folder) for index, image in enumerate(images)]
        return {**fields, _IMAGES_FIELD: found}

    def _image(self, name: str, image: Any, folder: Path) -> str | _ImageFile | None:
        """Returns an image for the fields of the request; None for one that is refused."""
        if isinstance(image, Mapping):  # the format of training sets of images in Parquet
            image = image.get("bytes") or image.get("path")
        if isinstance(image, bytes | Path):
            self.reads_file = self.reads_file or isinstance(image, Path)
            return _ImageFile(name, image)
        if not isinstance(image, str):
            self._refuse(name, "must be a text: a path, an address, a data URL, base64 or an image_id")
            return None
        if is_on_server(image) or is_data_url(image[:_MAX_PATH_CHARS].encode(errors="replace")):
            return image
        if (path := _file(folder, image)) is not None:
            self.reads_file = True
            return _ImageFile(name, path)
        if not _BASE64.fullmatch(image):
            self._refuse(name, f"there is no file {str(folder / image)[:_MAX_PATH_CHARS]}")
        return image


def _as_json(value: object) -> str:
    return value.base64() if isinstance(value, _ImageFile) else str(value)


def fields_missing_in_all(source: Source, template: Template) -> tuple[str, ...]:
    """Returns the required fields that no record has; none if one record has all of them.

    Reads records until one has each of the fields. Raises the errors of the source.
    """
    missing: set[str] | None = None
    for record in source:
        line = Line.read(record, template)
        body = ROUTES.get(line.path.removeprefix("/v1/"))
        if line.is_openai:
            return ()
        if line.path == _PATH_WITHOUT_SKILL:
            lacks = {"skill"}
        elif body is not None:
            lacks = {name for name, item in body.model_fields.items() if item.is_required()} - line.fields.keys()
            if "objects" in body.model_fields and "objects" not in line.fields:
                lacks |= {"object"} - line.fields.keys()
            if line.has_image:
                lacks.discard(_IMAGE_FIELD)
        else:
            continue  # the line has another mistake
        missing = lacks if missing is None else missing & lacks
        if not missing:
            return ()
    return tuple(sorted("image" if name == _IMAGE_FIELD else name for name in missing or ()))


def _parsed(content: bytes) -> Mapping[str, Any] | None:
    """Returns the JSON object in a line; None if the line holds none."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _read_image(path: Path, name: str) -> bytes:
    """Returns the bytes of the regular file in the field `name`.

    Raises OSError, or `InvalidRequest` for any other file or one that is too large.
    """
    # Does not wait for the writer of a pipe, which may have the name of a picture.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise InvalidRequest((Violation(name, "is no regular file"),))
        data = file.read(_MAX_FILE_BYTES + 1) if found.st_size <= _MAX_FILE_BYTES else None
    if data is None or len(data) > _MAX_FILE_BYTES:
        raise InvalidRequest((Violation(name, f"is a file of more than {_MAX_FILE_BYTES} bytes"),))
    return data


def _file(folder: Path, name: str) -> Path | None:
    """Returns the regular file of this name, if there is one."""
    if len(name) > _MAX_PATH_CHARS:
        return None
    try:
        path = folder / name
        return path if path.is_file() else None
    except (OSError, ValueError):  # no name that a file can have
        return None


def merged(defaults: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields, with the defaults of absent fields, also within objects."""
    found = {**defaults, **fields}
    for name, value in defaults.items():
        own = fields.get(name)
        if isinstance(value, Mapping) and isinstance(own, Mapping):
            found[name] = {**value, **own}
    return found


def fields_of(texts: Iterable[str]) -> dict[str, Any]:
    """Parses `NAME=VALUE` texts as fields; a value is JSON, or else a text. Raises ValueError.

    `settings.seed=3` sets the field `seed` of the object `settings`.
    """
    found: dict[str, Any] = {}
    for text in texts:
        path, equals, value = text.partition("=")
        name, _, inner = path.partition(".")
        if not equals or not name:
            raise ValueError(f"--field {text}: must be NAME=VALUE, such as settings.max_tokens=32")
        if name in OWN_FIELDS:
            raise ValueError(f"--field {text}: {name} belongs to each line; see --skill")
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError):
            parsed = value
        found = merged(found, {name: {inner: parsed} if inner else parsed})
    return found


# From an answer to an output line


@dataclass(frozen=True, slots=True)
class OutputLine:
    """Represents a line of the output with its line feed. `is_failure` is True if its request has failed."""

    data: bytes
    is_failure: bool


def answer_line(line: Line, status: int, document: Mapping[str, Any]) -> OutputLine:
    """Returns the output line of an HTTP response to a line's request."""
    stable = without_varying_values(document)
    if not line.is_openai:
        return _written({"id": line.id, **stable}, is_failure=status != 200)
    response = {"status_code": status, "request_id": line.request_id, "body": stable}
    return _written(_openai(line, response, None), is_failure=status != 200)


def refusal_line(line: Line) -> OutputLine:
    """Returns the output line of a line that cannot be sent: it has `violations`."""
    body = failure_body(describe(InvalidRequest(tuple(line.violations))), line.request_id)
    if not line.is_openai:
        return _written({"id": line.id, **without_varying_values(body)}, is_failure=True)
    error = {"code": body["error"]["code"].lower(), "message": body["error"]["message"]}
    return _written(_openai(line, None, error), is_failure=True)


def id_of(data: bytes) -> Any:
    """Returns the id of the record that an output line answers; None for a text that is not an output line."""
    document = _parsed(data) or {}
    return document.get("custom_id") if "custom_id" in document else document.get("id")


def reason_of(data: bytes) -> str:
    """Returns the failure of an output line's request: its code, its message and its violations."""
    document = _parsed(data) or {}
    response = document.get("response")
    body = response.get("body") if isinstance(response, Mapping) else document
    error = (body.get("error") if isinstance(body, Mapping) else None) or document.get("error") or {}
    if not isinstance(error, Mapping):
        return str(error)
    code, message = str(error.get("code") or "").upper(), str(error.get("message") or "")
    return f"{code}: {message}" if code and message else code or message


def is_failure(data: bytes) -> bool:
    """Returns True if an output line, with or without its line feed, reports a failed request."""
    if b'"error":' not in data:
        return False
    document = _parsed(data) or {}
    response = document.get("response")
    has_failed = isinstance(response, Mapping) and response.get("status_code") != 200
    return has_failed or document.get("error") is not None


def without_varying_values(document: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an answer without ids of requests, times and values that depend on the contents of caches."""
    found = {
        name: value
        for name, value in document.items()
        if name not in _VARYING and not name.endswith(_UNITS_OF_TIME)
    }
    for name in ("metrics", "usage", "error"):
        if isinstance(found.get(name), Mapping):
            found[name] = without_varying_values(found[name])
    return found


def _openai(line: Line, response: Mapping[str, Any] | None, error: Mapping[str, Any] | None) -> dict[str, Any]:
    return {"id": f"batch_req_{line.number}", "custom_id": line.id, "response": response, "error": error}


def _written(document: Mapping[str, Any], *, is_failure: bool) -> OutputLine:
    return OutputLine(to_json(document) + b"\n", is_failure)
