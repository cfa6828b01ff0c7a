"""Instructor against our OpenAI routes: the first example of its documentation in its default mode, and others."""

from __future__ import annotations

from typing import Any, Literal

import instructor  # installed in an environment of its own
from facts import BASE_URL, QUESTION, TOKEN, URL, model_name
from openai import OpenAI
from pydantic import BaseModel, Field


class UserInfo(BaseModel):
    name: str = Field(max_length=20)
    age: int


class Shape(BaseModel):
    colour: Literal["red", "blue"]


def main() -> None:
    model = model_name()
    openai_client = OpenAI(base_url=BASE_URL, api_key=TOKEN, max_retries=0)
    client = instructor.from_openai(openai_client)
    common: Any = {"model": model, "temperature": 0, "max_tokens": 200, "max_retries": 0}
    user = client.chat.completions.create(
        response_model=UserInfo,
        messages=[{"role": "user", "content": "Extract: John Doe is 30 years old."}],
        **common,
    )
    assert isinstance(user, UserInfo)
    print("the first example, in the default mode")

    seen: Any = [
        {
            "role": "user",
            "content": [{"type": "text", "text": QUESTION}, {"type": "image_url", "image_url": {"url": URL}}],
        }
    ]
    assert client.chat.completions.create(response_model=Shape, messages=seen, **common).colour
    print("a picture")

    pieces = list(client.chat.completions.create_partial(response_model=UserInfo, messages=seen, **common))
    assert isinstance(UserInfo.model_validate(pieces[-1].model_dump()), UserInfo)
    print("objects that grow")

    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS_STRICT):
        other = instructor.from_openai(openai_client, mode=mode)
        assert other.chat.completions.create(response_model=Shape, messages=seen, **common).colour
    print("modes JSON_SCHEMA and TOOLS_STRICT")


main()
