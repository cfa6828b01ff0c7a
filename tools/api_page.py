"""Generates docs/api.md from the descriptors of the contract and their comments: `python -m tools.api_page`."""

from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorProto

from kestrel_client.v1 import engine_service_pb2, generation_pb2, image_service_pb2, media_pb2, vision_service_pb2
from kestrel_grpc.frontends.grpc.reflection import CommentedFile
from tools.source import CHECKOUT

PAGE = CHECKOUT / "docs" / "api.md"
_FILES = (vision_service_pb2, image_service_pb2, engine_service_pb2, media_pb2, generation_pb2)
# Numbers of fields in descriptor.proto, of which the paths of comments are made.
_MESSAGE, _ENUM, _SERVICE, _FIELD, _VALUE, _METHOD = 4, 5, 6, 2, 2, 2
_FEW_LETTERS = 150
"""Rows of a table that are no longer together stand in each message that has them."""
_TYPES = {
    1: "double",
    2: "float",
    3: "int64",
    4: "uint64",
    5: "int32",
    8: "bool",
    9: "string",
    12: "bytes",
    13: "uint32",
}


def page() -> str:
    """Returns the whole page as Markdown."""
    files = [_file(module.DESCRIPTOR) for module in _FILES]
    services = [service.name for file in files for service in file.service]
    lines = [
        "# The gRPC API",
        "",
        "The contract `kestrel.v1`, generated from the comments of `proto/kestrel/v1` by",
        "`python -m tools.api_page`. The reasons of errors are in [errors.md](errors.md). `grpcurl describe` shows",
        "the same text from a server.",
        "",
        *(f"- [{name}](#{name.lower()})" for name in services),
        *(f"- [Messages of {file.name.rpartition('/')[2]}](#{_anchor(file)})" for file in files),
        "",
    ]
    for file in files:
        lines += _services(file)
    shown: dict[str, list[str]] = {}
    for file in files:
        lines += [f"## {_title(file)}", "", *_messages(file, shown), *_enums(file)]
    return "\n".join(lines).rstrip() + "\n"


def _title(file: FileDescriptorProto) -> str:
    return f"Messages of {file.name.rpartition('/')[2]}"


def _anchor(file: FileDescriptorProto) -> str:
    return "".join(letter for letter in _title(file).lower() if letter.isalnum() or letter in " _-").replace(
        " ", "-"
    )


def _file(descriptor: Any) -> FileDescriptorProto:
    file = FileDescriptorProto()
    CommentedFile(descriptor).CopyToProto(file)
    return file


def _comment(file: FileDescriptorProto, *path: int) -> str:
    """Returns the comment at a path of the descriptor, as paragraphs."""
    found = [place.leading_comments for place in file.source_code_info.location if tuple(place.path) == path]
    paragraphs = "".join(found).split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _services(file: FileDescriptorProto) -> Iterator[str]:
    for number, service in enumerate(file.service):
        yield from (f"## {service.name}", "", _comment(file, _SERVICE, number), "")
        yield from ("| Call | Request | Response | What it does |", "|---|---|---|---|")
        for index, method in enumerate(service.method):
            text = _comment(file, _SERVICE, number, _METHOD, index).replace("\n\n", " ")
            request = _named(method.input_type, method.client_streaming)
            response = _named(method.output_type, method.server_streaming)
            yield f"| `{method.name}` | {request} | {response} | {text} |"
        yield ""


def _named(full_name: str, is_stream: bool) -> str:
    name = full_name.rpartition(".")[2]
    return f"{'stream of ' if is_stream else ''}[{name}](#{name.lower()})"


def _messages(file: FileDescriptorProto, shown: dict[str, list[str]]) -> Iterator[str]:
    """Yields the messages of a file. Fields that several messages have are described once: `shown` has the rows."""
    for number, message in enumerate(file.message_type):
        yield from (f"### {message.name}", "", _comment(file, _MESSAGE, number), "")
        rows = [
            f"| `{field.name}` | {_type(message, field)} | {_field_text(file, number, index)} |"
            for index, field in enumerate(message.field)
        ]
        other, known = max(
            ((name, [row for row in rows if row in others]) for name, others in shown.items()),
            key=lambda pair: sum(map(len, pair[1])),
            default=("", []),
        )
        shown[message.name] = rows
        if sum(map(len, known)) > _FEW_LETTERS:
            names = ", ".join(row.split(" ")[1] for row in known)
            yield from (f"As in [{other}](#{other.lower()}): {names}.", "")
            rows = [row for row in rows if row not in known]
        if rows:
            yield from ("| Field | Type | What it is |", "|---|---|---|", *rows, "")


def _field_text(file: FileDescriptorProto, message: int, field: int) -> str:
    return _comment(file, _MESSAGE, message, _FIELD, field).replace("\n\n", " ").replace("|", "\\|")


def _type(message: Any, field: Any) -> str:
    if field.type_name.startswith(".kestrel"):
        kind = _named(field.type_name, False)
    else:
        kind = field.type_name.lstrip(".") or _TYPES[field.type]
    if field.label == field.LABEL_REPEATED:
        return f"list of {kind}"
    if field.proto3_optional:
        return f"{kind}, optional"
    return (
        f"{kind}, one of `{message.oneof_decl[field.oneof_index].name}`" if field.HasField("oneof_index") else kind
    )


def _enums(file: FileDescriptorProto) -> Iterator[str]:
    for number, enum in enumerate(file.enum_type):
        yield from (f"### {enum.name}", "", _comment(file, _ENUM, number), "")
        yield from ("| Value | Number | What it means |", "|---|---|---|")
        for index, value in enumerate(enum.value):
            text = _comment(file, _ENUM, number, _VALUE, index).replace("\n\n", " ")
            yield f"| `{value.name}` | {value.number} | {text} |"
        yield ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
