"""LiteLLM against our OpenAI routes: text, a picture, streams, async, a cache mark, classes of errors."""

from __future__ import annotations

import asyncio
import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch its table of prices otherwise
import litellm  # installed in an environment of its own
from facts import BASE_URL, QUESTION, TOKEN, URL, model_name

litellm.suppress_debug_info = True

COMMON: Any = {
    "model": f"openai/{model_name()}",
    "api_base": BASE_URL,
    "api_key": TOKEN,
    "temperature": 0,
    "max_tokens": 16,
    "num_retries": 0,
}
SEEN: Any = [
    {
        "role": "user",
        "content": [
            # For other servers than ours: it passes the mark on, which is without effect.
            {"type": "text", "text": QUESTION, "cache_control": {"type": "ephemeral"}},
            {"type": "image_url", "image_url": {"url": URL}},
        ],
    }
]


def main() -> None:
    answer = litellm.completion(messages=[{"role": "user", "content": "What is a star?"}], **COMMON)
    assert answer.choices[0].message.content
    print("text")

    whole = litellm.completion(messages=SEEN, **COMMON)
    text = whole.choices[0].message.content
    assert "star" in text, text
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    print("picture")

    chunks = list(litellm.completion(messages=SEEN, stream=True, **COMMON))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    print("stream")

    again = asyncio.run(litellm.acompletion(messages=SEEN, **COMMON))
    assert again.choices[0].message.content == text
    print("asyncio")

    for kind, changed in (
        (litellm.NotFoundError, {"model": "openai/gull"}),
        (litellm.AuthenticationError, {"api_key": "wrong"}),
        (litellm.BadRequestError, {"n": 0}),
    ):
        try:
            litellm.completion(messages=SEEN, **{**COMMON, **changed})
        except kind:
            continue
        raise AssertionError(f"no {kind.__name__}")
    print("classes of errors")


main()
