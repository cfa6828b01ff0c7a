"""smolagents' ToolCallingAgent against our OpenAI routes: calls that its parser takes, and their results."""

from __future__ import annotations

import io
import itertools
import json
from typing import Any, ClassVar

from facts import BASE_URL, PICTURE, QUESTION, TOKEN, model_name
from PIL import Image
from smolagents import LogLevel, OpenAIModel, Tool, ToolCallingAgent  # installed in an environment of its own
from smolagents.memory import ActionStep


class Lamp(Tool):
    name = "lamp"
    description = "Switches the lamp."
    inputs: ClassVar = {"is_on": {"type": "boolean", "description": "The state of the lamp."}}
    output_type = "string"

    def forward(self, is_on: bool) -> str:
        return "on" if is_on else "off"


def main() -> None:
    options: Any = {"temperature": 0, "max_tokens": 300}
    model = OpenAIModel(
        model_id=model_name(), api_base=BASE_URL, api_key=TOKEN, client_kwargs={"max_retries": 0}, **options
    )
    seen: Any = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
    assert model(seen).content
    print("text")

    # The model chooses among the tool and the final answer: every step is a call that fits a schema. The agent
    # sends its picture again with each step, so one with a picture has one step.
    tool = Lamp()
    for max_steps, images in ((2, None), (1, [Image.open(io.BytesIO(PICTURE))])):
        agent = ToolCallingAgent(tools=[tool], model=model, max_steps=max_steps, verbosity_level=LogLevel.OFF)
        stream = agent.run(QUESTION, images=images, stream=True)
        # The steps alone: an agent that ends without a final answer asks for one without tools.
        steps = list(itertools.islice((item for item in stream if isinstance(item, ActionStep)), max_steps))
        calls = [call for step in steps for call in step.tool_calls or ()]
        assert calls, steps
        assert {call.name for call in calls} <= {"lamp", "final_answer"}, calls
    print("agents with and without a picture, whose steps are calls")

    final = model.generate(seen, tools_to_call_from=[tool])
    (call,) = final.tool_calls
    assert call.function.name == "lamp", call
    result = tool(**_arguments(call.function.arguments))
    turns: Any = [
        *seen,
        {"role": "tool-call", "content": [{"type": "text", "text": f"Calling tools: {call.function.name}"}]},
        {"role": "tool-response", "content": [{"type": "text", "text": f"Observation: {result}"}]},
    ]
    assert model(turns).content
    print("a forced call, and a turn with its result")


def _arguments(found: Any) -> dict[str, Any]:
    return json.loads(found) if isinstance(found, str) else found


main()
