"""Pydantic AI's OpenAIChatModel against our OpenAI routes: text, a picture, output types, tools, streams."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from facts import BASE_URL, PICTURE, QUESTION, TOKEN, model_name
from pydantic import BaseModel, Field
from pydantic_ai import Agent, BinaryContent, NativeOutput  # installed in an environment of its own
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

SEEN = [QUESTION, BinaryContent(PICTURE, media_type="image/png")]
SETTINGS: Any = {"temperature": 0, "max_tokens": 200}


class CityLocation(BaseModel):
    city: str = Field(max_length=20)
    country: str = Field(max_length=20)


class Shape(BaseModel):
    colour: Literal["red", "blue"]


def main() -> None:
    provider = OpenAIProvider(base_url=BASE_URL, api_key=TOKEN)
    model = OpenAIChatModel(model_name(), provider=provider)
    agent = Agent(model, model_settings=SETTINGS)
    seen = agent.run_sync(SEEN)
    assert "star" in seen.output, seen.output
    again: Any = ["And here?", BinaryContent(PICTURE, media_type="image/png")]
    second = agent.run_sync(again, message_history=seen.all_messages())
    assert second.output
    assert second.usage.input_tokens > 1.5 * seen.usage.input_tokens, "it has two pictures"
    assert agent.run_sync("Which colour has it?", message_history=second.all_messages()).output
    print("picture and several turns")

    # The first example of the documentation on outputs: one tool, `final_result`, whose call is forced.
    located = Agent(model, output_type=CityLocation, model_settings=SETTINGS)
    result = located.run_sync("Where were the olympics held in 2012?")
    assert isinstance(result.output, CityLocation)
    assert result.usage.input_tokens > 0
    print("output_type, by a forced call")
    assert isinstance(Agent(model, output_type=Shape, model_settings=SETTINGS).run_sync(SEEN).output, Shape)
    print("output_type of a picture")

    several: Any = Agent(model, output_type=[Shape, CityLocation], model_settings=SETTINGS)
    assert isinstance(several.run_sync(SEEN).output, Shape | CityLocation)
    print("a choice of two output types")
    native: Any = Agent(model, output_type=NativeOutput(Shape), model_settings=SETTINGS)
    assert isinstance(native.run_sync(SEEN).output, Shape)
    print("NativeOutput")

    async def streamed() -> Any:
        async with located.run_stream("Where were the olympics held in 2012?") as run:
            return await run.get_output()

    assert isinstance(asyncio.run(streamed()), CityLocation)
    print("a streamed object")

    helped = Agent(model, model_settings=SETTINGS)

    @helped.tool_plain
    def weather(city: str) -> str:
        """Says how the weather is."""
        return f"sunny in {city}"

    assert helped.run_sync("How is the weather in Rome?").output
    print("a tool that it may call")

    responses = OpenAIResponsesModel(model_name(), provider=provider)
    assert isinstance(Agent(responses, output_type=Shape, model_settings=SETTINGS).run_sync(SEEN).output, Shape)
    print("the Responses API")


main()
