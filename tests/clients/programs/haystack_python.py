"""Haystack's OpenAIChatGenerator against our OpenAI routes: text, a picture, streams, a pipeline."""

from __future__ import annotations

import base64
from typing import Any

from facts import BASE_URL, PICTURE, QUESTION, TOKEN, model_name
from haystack import Pipeline  # installed in an environment of its own
from haystack.components.builders import ChatPromptBuilder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage, ImageContent, StreamingChunk
from haystack.utils import Secret


def main() -> None:
    common: Any = {
        "model": model_name(),
        "api_key": Secret.from_token(TOKEN),
        "api_base_url": BASE_URL,
        "generation_kwargs": {"temperature": 0, "max_tokens": 16},
        "max_retries": 0,
    }
    generator = OpenAIChatGenerator(**common)
    assert generator.run([ChatMessage.from_user("What is a star?")])["replies"][0].text
    print("text")

    image = ImageContent(base64_image=base64.b64encode(PICTURE).decode(), mime_type="image/png")
    seen = [ChatMessage.from_user(content_parts=[QUESTION, image])]
    (reply,) = generator.run(seen)["replies"]
    assert "star" in reply.text, reply.text
    assert reply.meta["finish_reason"] in ("stop", "length")
    print("picture")

    pieces: list[StreamingChunk] = []
    streamed = OpenAIChatGenerator(**common, streaming_callback=pieces.append).run(seen)["replies"][0]
    assert streamed.text == reply.text == "".join(piece.content for piece in pieces)
    print("stream")

    turns = [ChatMessage.from_system("Be brief."), *seen, reply, ChatMessage.from_user("Which colour has it?")]
    assert generator.run(turns)["replies"][0].text
    print("several turns")

    pipeline = Pipeline()
    pipeline.add_component("prompt", ChatPromptBuilder([ChatMessage.from_user("What is a {{thing}}?")]))
    pipeline.add_component("chat", generator)
    pipeline.connect("prompt.prompt", "chat.messages")
    assert pipeline.run({"prompt": {"thing": "star"}})["chat"]["replies"][0].text
    print("a pipeline")


main()
