"""LlamaIndex's OpenAILike against our OpenAI routes: chat with a picture, streams, objects by JSON schema."""

from __future__ import annotations

from typing import Any, Literal

from facts import BASE_URL, PICTURE, QUESTION, TOKEN, model_name
from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock  # installed in an environment of its own
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

COMMON: Any = {
    "model": model_name(),
    "api_base": BASE_URL,
    "api_key": TOKEN,
    "is_chat_model": True,
    "temperature": 0,
    "max_tokens": 64,
    "max_retries": 0,
}


class Colour(BaseModel):
    name: Literal["red", "blue"]


def main() -> None:
    llm = OpenAILike(**COMMON)
    assert llm.complete("What is a star?").text
    print("text")

    seen = [ChatMessage(role="user", blocks=[TextBlock(text=QUESTION), ImageBlock(image=PICTURE)])]
    text = llm.chat(seen).message.content
    assert text is not None
    assert "star" in text, text
    print("picture")

    assert "".join(piece.delta or "" for piece in llm.stream_chat(seen)) == text
    print("stream")

    turns = [*seen, ChatMessage(role="assistant", content=text), ChatMessage(role="user", content="Which colour?")]
    assert llm.chat(turns).message.content
    print("several turns")

    shaped = OpenAILike(should_use_structured_outputs=True, **COMMON)
    assert isinstance(shaped.structured_predict(Colour, _prompt("Which colour is it?")), Colour)
    print("objects by JSON schema")


def _prompt(text: str) -> Any:
    from llama_index.core.prompts import PromptTemplate

    return PromptTemplate(text)


main()
