"""Offers the skills of the model to clients that can only set a model's name: `NAME:detect`, or the field `skill`.

The text of the last message is what a skill is asked about, and the answer is the JSON of the REST API.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Literal, get_args

from kestrel_grpc.frontends.http.bodies import Problems
from kestrel_grpc.frontends.http.fields import PLACEHOLDER
from kestrel_grpc.frontends.openai.conversation import Conversation
from kestrel_runtime.api.constraints import Constraint
from kestrel_runtime.api.requests import (
    CAPTION_LENGTHS,
    Caption,
    Detect,
    Gaze,
    Point,
    PointRef,
    Request,
    RequestOptions,
    Segment,
)
from kestrel_runtime.api.sampling_params import SamplingParams

Skill = Literal["query", "caption", "point", "detect", "segment", "gaze"]
SKILLS: tuple[str, ...] = get_args(Skill)
TEXT = "query"
"""The skill of a conversation, whose answer is a text."""
DESCRIPTION = (
    "What is asked of the image, as a model `NAME:SKILL` does: the text of the last message is the object, and the "
    "answer is JSON. `query`, the default, is a conversation."
)
_NUMBER = r"([0-9]*\.?[0-9]+)"
_PLACE = re.compile(rf"\s*[\[(]?\s*{_NUMBER}\s*,\s*{_NUMBER}\s*[\])]?\s*")


def split_skill(model: str, served: Collection[str]) -> tuple[str, str | None]:
    """Returns the name of a model and the skill behind it; None if there is none.

    `served` are the names of the served model, which may end like that.
    """
    name, mark, skill = model.rpartition(":")
    return (name, skill) if mark and skill in SKILLS and model not in served else (model, None)


def chosen_skill(model: str, field: str | None, served: Collection[str], problems: Problems) -> tuple[str, str]:
    """Returns the model of a request, and its skill, which the name or the field `skill` says."""
    name, skill = split_skill(model, served)
    if field is not None and skill is not None and field != skill:
        problems.add("skill", f"must be {skill}, as the name of the model says")
    return name, skill or field or TEXT


def refuse_with_skill(skill: str, given: Mapping[str, object], problems: Problems) -> None:
    """Adds a problem for each field that is set, by its path, and has no meaning for the result of a skill."""
    if skill != TEXT:
        for path, value in given.items():
            if value:
                problems.add(path, f"is not supported with the skill {skill}")


def engine_request(
    skill: str,
    conversation: Conversation,
    images: Sequence[bytes],
    sampling: SamplingParams,
    options: RequestOptions,
    problems: Problems,
    *,
    reasoning: bool,
    constraint: Constraint | None,
) -> Request:
    """Returns the request of the engine: of a skill about the image, or of the conversation, which alone has
    `reasoning` and a `constraint`. Raises `InvalidRequest`."""
    if skill == TEXT:
        return conversation.request(
            images, reasoning=reasoning, sampling=sampling, options=options, constraint=constraint
        )
    text = conversation.messages[-1].text.strip()
    if len(images) != 1:
        problems.add("messages", f"must have one image, which {skill} is about")
    image = images[0] if images else PLACEHOLDER
    if skill == "caption":
        length = text.lower() if text.lower() in CAPTION_LENGTHS else "normal"
        return Caption(image, length, sampling, options)
    if skill == "gaze":
        found = _PLACE.fullmatch(text)
        if found is None:
            problems.add("messages", "must end with the place of an eye, such as 0.45, 0.3")
        eye = PointRef(0.5, 0.5) if found is None else PointRef(float(found[1]), float(found[2]))
        return Gaze(image, eye, sampling, options)
    kind = {"point": Point, "detect": Detect, "segment": Segment}[skill]
    return kind(text, image, sampling=sampling, options=options)
