"""The contract keeps its own rules."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from kestrel_client.v1 import generation_pb2, vision_service_pb2

ROOT = Path(__file__).parents[2]


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


def test_the_contract_is_lint_clean_and_formatted() -> None:
    lint = _buf("lint")
    assert (lint.returncode, lint.stdout) == (0, "")
    difference = _buf("format", "--diff", "--exit-code")
    assert (difference.returncode, difference.stdout) == (0, "")


def test_a_field_without_a_comment_is_found(copy: Path) -> None:
    _edit(copy, "media.proto", "  // A region.\n", "")
    lint = _buf("lint", cwd=copy)
    assert lint.returncode != 0
    assert "media.proto" in lint.stdout


def test_a_change_that_breaks_callers_is_found(copy: Path) -> None:
    _edit(copy, "generation.proto", "optional int32 max_tokens = 3;", "optional int64 max_tokens = 3;")
    breaking = _buf("breaking", "--against", ROOT, cwd=copy)
    assert breaking.returncode != 0
    assert "max_tokens" in breaking.stdout


def test_a_new_field_breaks_nobody(copy: Path) -> None:
    _edit(copy, "media.proto", "  float y = 2;\n", "  float y = 2;\n  // New.\n  float z = 3;\n")
    breaking = _buf("breaking", "--against", ROOT, cwd=copy)
    assert (breaking.returncode, breaking.stdout) == (0, "")


@pytest.mark.parametrize("skill", ["Query", "Caption"])
def test_streaming_and_unary_twins_take_the_same_fields(skill: str) -> None:
    messages = vision_service_pb2.DESCRIPTOR.message_types_by_name
    twins = (messages[f"{skill}Request"], messages[f"Complete{skill}Request"])
    streaming, unary = (
        [(field.name, field.number, field.type, field.has_presence) for field in twin.fields] for twin in twins
    )
    assert streaming == unary


def test_every_scalar_whose_zero_means_something_has_presence() -> None:
    for name in ("QueryRequest", "CompleteQueryRequest", "PointRequest", "DetectRequest", "SegmentRequest"):
        for field in vision_service_pb2.DESCRIPTOR.message_types_by_name[name].fields:
            if field.name in {"reasoning", "max_objects"}:
                assert field.has_presence
    assert all(field.has_presence for field in generation_pb2.SamplingParams.DESCRIPTOR.fields)
