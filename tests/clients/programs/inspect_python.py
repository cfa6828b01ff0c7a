"""Inspect's provider openai-api against our OpenAI routes: a task with a picture, whose answer a scorer reads."""

from __future__ import annotations

import os
import tempfile

from facts import BASE_URL, QUESTION, TOKEN, URL, model_name

os.environ.update(KESTREL_API_KEY=TOKEN, KESTREL_BASE_URL=BASE_URL, INSPECT_DISABLE_MODEL_INFO="1")
from inspect_ai import Task  # installed in an environment of its own
from inspect_ai import eval as evaluate
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageUser, ContentImage, ContentText
from inspect_ai.scorer import includes


def main() -> None:
    picture = ChatMessageUser(content=[ContentText(text=QUESTION), ContentImage(image=URL)])
    task = Task(
        dataset=[Sample(input=[picture], target="star"), Sample(input="What is a star?", target="a")],
        scorer=includes(),
    )
    with tempfile.TemporaryDirectory() as folder:
        (log,) = evaluate(
            task,
            model=f"openai-api/kestrel/{model_name()}",
            temperature=0,
            max_tokens=16,
            max_retries=0,
            log_dir=folder,
            display="none",
            log_realtime=False,
        )
        assert log.status == "success", log.error
        assert log.samples is not None
        assert log.samples[0].scores is not None
        assert log.samples[0].scores["includes"].value == "C", log.samples[0].output.completion
        print("a task with a picture and a text")
        assert log.stats.model_usage, "no usage was counted"
        print("usage")


main()
