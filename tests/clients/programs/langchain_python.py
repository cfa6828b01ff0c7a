"""LangChain's ChatOpenAI against our OpenAI routes: a picture, streams, tools, objects by schema and by a call."""

from __future__ import annotations

from typing import Any, Literal

from facts import BASE_URL, QUESTION, TOKEN, URL, model_name
from langchain_core.messages import HumanMessage, ToolMessage  # installed in an environment of its own
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

SEEN = HumanMessage(content=[{"type": "text", "text": QUESTION}, {"type": "image_url", "image_url": {"url": URL}}])


class Shape(BaseModel):
    """What the picture shows."""

    colour: Literal["red", "blue"]
    is_round: bool


@tool
def paint(colour: Literal["red", "blue"]) -> str:
    """Paints in a colour."""
    return f"painted in {colour}"


def main() -> None:
    common: Any = {
        "model": model_name(),
        "base_url": BASE_URL,
        "api_key": TOKEN,
        "temperature": 0,
        "max_retries": 0,
    }
    llm = ChatOpenAI(**common, max_completion_tokens=64)
    text = llm.invoke([SEEN]).content
    assert "star" in text, text
    assert "".join(str(piece.content) for piece in llm.stream([SEEN])) == text
    print("picture and stream")

    assert llm.bind_tools([paint]).invoke([SEEN]).content  # it may call, and need not
    print("a tool that it may call")

    forced = llm.bind_tools([paint], tool_choice="paint")
    answer = forced.invoke([SEEN])
    (call,) = answer.tool_calls
    assert call["name"] == "paint", call
    assert call["args"]["colour"] in ("red", "blue"), call
    streamed: Any = None
    for piece in forced.stream([SEEN]):
        streamed = piece if streamed is None else streamed + piece
    assert [item["args"] for item in streamed.tool_calls] == [call["args"]]
    print("a forced call, whole and streamed")

    result = paint.invoke(call)
    assert isinstance(result, ToolMessage), result
    assert llm.bind_tools([paint]).invoke([SEEN, answer, result]).content
    assert llm.invoke([SEEN, llm.invoke([SEEN]), SEEN]).content  # a further turn with a further picture
    print("a turn with the result")

    for method in ("json_schema", "function_calling"):
        assert isinstance(llm.with_structured_output(Shape, method=method).invoke([SEEN]), Shape)
    print("objects by schema and by a call")


main()
