"""OpenAI's Agents SDK against both of our OpenAI APIs: a picture, tools with their results, objects, streams."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from agents import (  # installed in an environment of its own
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    ToolCallOutputItem,
    function_tool,
    set_tracing_disabled,
)
from facts import BASE_URL, QUESTION, TOKEN, URL, model_name
from openai import AsyncOpenAI
from pydantic import BaseModel

SEEN: Any = [
    {
        "role": "user",
        "content": [
            {"type": "input_text", "text": QUESTION},
            {"type": "input_image", "image_url": URL, "detail": "auto"},
        ],
    }
]
painted: list[str] = []


class Shape(BaseModel):
    colour: Literal["red", "blue"]


@function_tool
def paint(colour: Literal["red", "blue"]) -> str:
    """Paints in a colour."""
    painted.append(colour)
    return f"painted in {colour}"


async def check(kind: str, model: Any) -> None:
    settings = ModelSettings(temperature=0, max_tokens=64)
    agent = Agent(name="seer", model=model, model_settings=settings)
    whole = (await Runner.run(agent, SEEN)).final_output
    assert "star" in whole, whole
    streamed = Runner.run_streamed(agent, SEEN)
    kinds = [event.type async for event in streamed.stream_events()]
    assert "raw_response_event" in kinds, kinds
    assert streamed.final_output == whole
    print(f"{kind}: picture and stream")

    shaped = Agent(name="shaper", model=model, model_settings=settings, output_type=Shape)
    assert isinstance((await Runner.run(shaped, SEEN)).final_output, Shape)
    print(f"{kind}: output_type")

    # The first turn is a call; the second, in which the runner resets the choice, is a text.
    forced = ModelSettings(temperature=0, max_tokens=64, tool_choice="required")
    painter = Agent(name="painter", model=model, model_settings=forced, tools=[paint])
    done = await Runner.run(painter, SEEN, max_turns=4)
    assert painted.pop() in ("red", "blue")
    assert any(isinstance(item, ToolCallOutputItem) for item in done.new_items), done.new_items
    assert done.final_output
    print(f"{kind}: a forced call, and a turn with its result")


async def main() -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=BASE_URL, api_key=TOKEN, max_retries=0)
    name = model_name()
    await check("Chat Completions", OpenAIChatCompletionsModel(name, client))
    await check("Responses", OpenAIResponsesModel(name, client))


asyncio.run(main())
