"""A reference fixture from a checkpoint: what the plain path in float32 on the CPU computes and answers.

`kestrel-grpc verify` then holds any path to it. The plain path is itself held to the public reference by the
fixtures in `tests/golden`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.verify.recording import Call, Picture, call_of, query_call, record_expected, write_questions

MAX_TOKENS = 24
_MAX_OBJECTS = 4
_QUESTION = "What is the value of the tallest bar shown here?"
_OBJECT = "tallest bar"


def write_expected(folder: Path, images: Mapping[str, bytes], *, with_answers: bool = True) -> tuple[int, int]:
    """Write the images, by file name, and what the checkpoint makes of them; returns all calls and those kept.

    Without answers there are tensors alone, which is all that paths in short formats are compared with.
    """
    asked = _calls() if with_answers else []
    pictures = [Picture(name, data, _QUESTION, asked) for name, data in images.items()]
    text_only = [query_call("What is the value of the bar?"), query_call(_QUESTION)] if with_answers else []
    write_questions(folder, pictures, text_only, MAX_TOKENS)
    return record_expected(folder, EngineConfig(model=str(folder), device="cpu", dtype="float32"))


def _calls() -> list[Call]:
    refs = [[0.25, 0.75], [0.1, 0.2, 0.6, 0.9]]
    return [
        *(query_call(_QUESTION), query_call(_QUESTION, reasoning=True), query_call(_QUESTION, spatial_refs=refs)),
        *(call_of("caption", length=length) for length in ("short", "normal", "long")),
        call_of("point", object=_OBJECT, max_objects=_MAX_OBJECTS),
        call_of("detect", object=_OBJECT, max_objects=_MAX_OBJECTS),
        call_of("segment", object=_OBJECT),
        call_of("segment", object=_OBJECT, spatial_refs=refs[:1]),
    ]
