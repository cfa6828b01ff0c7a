"""The contract keeps its own rules."""

import shutil
import subprocess
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2

from kestrel_client.v1 import engine_service_pb2, generation_pb2, image_service_pb2, media_pb2, vision_service_pb2

ROOT = Path(__file__).parents[2]
FILES: tuple[Any, ...] = tuple(
    module.DESCRIPTOR
    for module in (media_pb2, generation_pb2, vision_service_pb2, image_service_pb2, engine_service_pb2)
)

# Numbers below the highest of their message that no field has yet, and the fields that they are for. They cannot be
# `reserved` until then: a reserved number that is used later breaks the contract, as buf sees it.
PLANNED = {"SegmentRequest": {3: "max_objects"}, "StreamSegmentRequest": {3: "max_objects"}}
# In a result, `info` is last, and what is found comes before it.
INFO_NUMBER = 15


def _buf(*arguments: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    buf = Path(sysconfig.get_path("scripts")) / "buf"
    return subprocess.run([buf, *arguments], cwd=cwd, capture_output=True, text=True, check=False)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    shutil.copytree(ROOT / "proto", tmp_path / "proto")
    return tmp_path


def _edit(copy: Path, name: str, old: str, new: str) -> None:
    path = copy / "proto/kestrel/v1" / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_the_contract_is_lint_clean_and_formatted():
    lint = _buf("lint")
    assert (lint.returncode, lint.stdout) == (0, "")
    difference = _buf("format", "--diff", "--exit-code")
    assert (difference.returncode, difference.stdout) == (0, "")


def test_a_field_without_a_comment_is_found(copy: Path):
    _edit(copy, "media.proto", "  // A region.\n", "")
    lint = _buf("lint", cwd=copy)
    assert lint.returncode != 0
    assert "media.proto" in lint.stdout


def test_a_change_that_breaks_callers_is_found(copy: Path):
    _edit(copy, "generation.proto", "optional int32 max_tokens = 3;", "optional int64 max_tokens = 3;")
    breaking = _buf("breaking", "--against", ROOT, cwd=copy)
    assert breaking.returncode != 0
    assert "max_tokens" in breaking.stdout


def test_a_new_field_breaks_no_client(copy: Path):
    _edit(copy, "media.proto", "  float y = 2;\n", "  float y = 2;\n  // New.\n  float z = 3;\n")
    breaking = _buf("breaking", "--against", ROOT, cwd=copy)
    assert (breaking.returncode, breaking.stdout) == (0, "")


def test_a_reserved_number_cannot_be_used_later(copy: Path, tmp_path_factory: pytest.TempPathFactory):
    before = tmp_path_factory.mktemp("before")
    shutil.copytree(copy, before, dirs_exist_ok=True)
    _edit(before, "generation.proto", "message RequestOptions {\n", "message RequestOptions {\n  reserved 6;\n")
    breaking = _buf("breaking", "--against", before, cwd=copy)
    assert breaking.returncode != 0
    assert 'reserved range "[6]" on message "RequestOptions"' in breaking.stdout


def _gaps(descriptor: descriptor_pb2.DescriptorProto) -> set[int]:
    """Numbers below the highest that are neither used nor reserved."""
    used = {field.number for field in descriptor.field}
    reserved = {number for item in descriptor.reserved_range for number in range(item.start, item.end)}
    return set(range(1, max(used, default=0))) - used - reserved


def _enum_gaps(descriptor: descriptor_pb2.EnumDescriptorProto) -> set[int]:
    """The same, of an enum. Its reserved ranges include their end."""
    used = {value.number for value in descriptor.value}
    reserved = {number for item in descriptor.reserved_range for number in range(item.start, item.end + 1)}
    return set(range(max(used))) - used - reserved


def _contents() -> Iterator[descriptor_pb2.FileDescriptorProto]:
    for file in FILES:
        contents = descriptor_pb2.FileDescriptorProto()
        file.CopyToProto(contents)
        yield contents


def _messages() -> Mapping[str, descriptor_pb2.DescriptorProto]:
    found = {message.name: message for contents in _contents() for message in contents.message_type}
    nested = [name for name, message in found.items() if message.nested_type or message.enum_type]
    assert nested == [], "the gaps of nested types are not looked at"
    return found


def test_every_number_that_is_skipped_is_reserved_or_planned():
    gaps: dict[str, set[int]] = {}
    for name, message in _messages().items():
        storage = range(INFO_NUMBER) if message.field[-1:] and message.field[-1].name == "info" else ()
        gaps[name] = _gaps(message) - set(storage) - set(PLANNED.get(name, ()))
    gaps |= {enum.name: _enum_gaps(enum) for contents in _contents() for enum in contents.enum_type}
    assert {name: numbers for name, numbers in gaps.items() if numbers} == {}


def test_a_planned_number_is_used_by_its_field_or_by_none():
    messages = _messages()
    planned = {(name, number, field) for name, fields in PLANNED.items() for number, field in fields.items()}
    used = {(name, field.number, field.name) for name in PLANNED for field in messages[name].field}
    for message, number, name in planned - used:
        taken = [item for item in used if item[0] == message and (item[1] == number or item[2] == name)]
        assert taken == []


def test_a_gap_is_found_unless_it_is_reserved():
    message = descriptor_pb2.DescriptorProto()
    for number in (2, 6):
        message.field.add(number=number)
    message.reserved_range.add(start=4, end=5)
    assert _gaps(message) == {1, 3, 5}
    enum = descriptor_pb2.EnumDescriptorProto()
    for number in (0, 4):
        enum.value.add(number=number)
    enum.reserved_range.add(start=1, end=2)
    assert _enum_gaps(enum) == {3}


def test_info_is_the_last_field_of_every_result():
    numbers = [field.number for message in _messages().values() for field in message.field if field.name == "info"]
    assert numbers == [INFO_NUMBER] * 7


@pytest.mark.parametrize("skill", ["Query", "Caption"])
def test_streaming_and_unary_twins_take_the_same_fields(skill: str):
    messages = vision_service_pb2.DESCRIPTOR.message_types_by_name
    twins = (messages[f"{skill}Request"], messages[f"Complete{skill}Request"])
    streaming, unary = (
        [(field.name, field.number, field.type, field.has_presence) for field in twin.fields] for twin in twins
    )
    assert streaming == unary


def test_every_scalar_whose_zero_means_something_has_presence():
    for name in ("QueryRequest", "CompleteQueryRequest", "PointRequest", "DetectRequest", "SegmentRequest"):
        for field in vision_service_pb2.DESCRIPTOR.message_types_by_name[name].fields:
            if field.name in {"reasoning", "max_objects"}:
                assert field.has_presence
    sampling = generation_pb2.SamplingParams.DESCRIPTOR.fields
    assert all(field.has_presence for field in sampling if not field.is_repeated)
