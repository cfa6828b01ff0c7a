"""Strands' Agent against our OpenAI routes: text, a picture, streams, a conversation."""

from __future__ import annotations

import asyncio
from typing import Any

from facts import BASE_URL, PICTURE, QUESTION, TOKEN, model_name
from strands import Agent  # installed in an environment of its own
from strands.models.openai import OpenAIModel


def agent() -> Any:
    model = OpenAIModel(
        client_args={"api_key": TOKEN, "base_url": BASE_URL, "max_retries": 0},
        model_id=model_name(),
        params={"temperature": 0, "max_tokens": 200},
    )
    return Agent(model=model, callback_handler=None)


def main() -> None:
    assert str(agent()("What is a star?")).strip()
    print("text")

    seen: Any = [{"text": QUESTION}, {"image": {"format": "png", "source": {"bytes": PICTURE}}}]
    talking = agent()
    text = str(talking(seen))
    assert "star" in text, text
    print("picture")

    assert str(talking("Which colour has it?")).strip()
    print("several turns")

    async def streamed() -> str:
        return "".join([event["data"] async for event in agent().stream_async(seen) if "data" in event])

    assert asyncio.run(streamed()).strip() == text.strip()
    print("stream")


main()
