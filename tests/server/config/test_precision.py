"""One switch for the number formats."""

from __future__ import annotations

import pytest

from kestrel_grpc.config.effective import effective_values
from kestrel_grpc.config.options import ServerConfig
from kestrel_grpc.config.precision import PRECISIONS, precision_line
from kestrel_runtime.api.config import EngineConfig


def formats(**options: str) -> tuple[str, str, str, str]:
    config = ServerConfig(**options).engine_config()  # pyright: ignore[reportArgumentType]
    return config.dtype, config.text_path, config.vision_path, config.kv_dtype


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        ("auto", ("auto", "auto", "auto", "auto")),
        ("float32", ("float32", "auto", "auto", "auto")),
        ("bfloat16", ("bfloat16", "auto", "auto", "auto")),
        ("float8", ("auto", "fused-float8", "calibrated-float8", "float8")),
    ],
)
def test_a_precision_sets_every_format(precision, expected):
    assert formats(precision=precision) == expected
    assert precision in PRECISIONS


def test_a_format_that_is_set_by_its_own_option_stays():
    found = formats(precision="float8", vision_path="fused-float8", dtype="bfloat16")
    assert found == ("bfloat16", "fused-float8", "fused-float8", "float8")


def test_the_log_says_what_was_chosen_and_why():
    line = precision_line(EngineConfig(), "auto")
    assert line.startswith("precision auto: bfloat16 on a GPU, else float32; float8 has to be asked for, since ")
    line = precision_line(EngineConfig(kv_dtype="float8"), "bfloat16")
    assert line == "precision bfloat16: bfloat16, as asked for; except --kv-dtype float8"


def test_the_listing_of_options_shows_what_a_precision_sets():
    lines = effective_values({"precision": "float8", "vision_path": "fused"}, {}).splitlines()
    shown = {line.split(" = ")[0]: line.rpartition("# ")[2] for line in lines}
    assert shown["text_path"] == "default; here fused-float8"
    assert shown["vision_path"] == "--vision-path"
