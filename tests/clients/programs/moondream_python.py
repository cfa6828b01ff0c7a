"""Moondream's Python client against our REST API: every method of its HTTP class, whole and streamed."""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import moondream  # installed in an environment of its own
from PIL import Image

FACTS = json.loads(sys.argv[1])
DOCUMENT = Path(FACTS["picture"]).parents[1] / "docs" / "http.md"


def client(token: str = "alice") -> Any:
    return moondream.vl(endpoint=f"{FACTS['http']}/v1", api_key=FACTS.get(token, token))


def check_example() -> None:
    """The example of the documentation, with another address and a token."""
    text = DOCUMENT.read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (block,) = [block for block in blocks if "import moondream" in block]
    for ours, theirs in (
        ("http://localhost:8000", FACTS["http"]),
        ("a token, or anything where none is asked for", FACTS["alice"]),
        ("kestrel_grpc/demo_picture.png", FACTS["picture"]),
    ):
        assert ours in block, ours
        block = block.replace(ours, theirs)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(block, {})
    answer, caption = printed.getvalue().splitlines()
    assert "star" in answer, answer
    assert caption
    print("the example of the documentation")


def main() -> None:
    model = client()
    check_example()
    picture = Image.open(FACTS["picture"])
    greedy: Any = {"temperature": 0, "max_tokens": 16}

    for length in ("short", "normal", "long"):
        assert model.caption(picture, length=length, settings=greedy)["caption"]
    whole = model.caption(picture, settings=greedy)["caption"]
    assert "".join(model.caption(picture, stream=True, settings=greedy)["caption"]) == whole
    print("caption")

    question = "What is in this image?"
    whole = model.query(picture, question, settings=greedy)["answer"]
    assert "star" in whole, whole
    assert "".join(model.query(picture, question, stream=True, settings=greedy)["answer"]) == whole
    encoded = model.encode_image(picture)
    assert model.query(encoded, question, settings=greedy)["answer"]
    assert model.query(question="What is a star?", settings=greedy)["answer"]
    assert model.query(picture, question, settings=greedy, spatial_refs=[[0.5, 0.5], [0.1, 0.1, 0.9, 0.9]])[
        "answer"
    ]
    reasoned = model.query(picture, question, settings=greedy, reasoning=True)
    assert reasoned["reasoning"].keys() == {"text", "grounding"}
    print("query")

    points = model.point(picture, "star", settings={"max_objects": 5})["points"]
    assert points, "no star was found"
    assert all(point.keys() == {"x", "y", "score"} for point in points)
    assert model.point(picture, "star", spatial_refs=[[0.5, 0.5]])["points"] is not None
    print("point")

    objects = model.detect(picture, "star")["objects"]
    assert objects, "no star was found"
    assert all(item.keys() == {"x_min", "y_min", "x_max", "y_max", "score"} for item in objects)
    print("detect")

    outline = model.segment(picture, "star", spatial_refs=[[0.5, 0.5]])
    assert outline["path"] == model.segment(picture, "star", spatial_refs=[[0.5, 0.5]])["path"]
    updates = list(model.segment(picture, "star", stream=True))
    assert updates[-1]["completed"]
    assert "".join(update.get("chunk", "") for update in updates) == updates[-1]["path"]
    print("segment")

    served = client("alice")
    served.model = model_name()
    messages: Any = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": question},
                {"type": "image_url", "image_url": {"url": encoded.image_url}},
            ],
        }
    ]
    answer = served.chat(messages, settings=greedy)
    assert model.chat(messages, settings=greedy) == answer  # its client then sends a name of its own
    assert answer["finish_reason"] in ("stop", "length")
    assert "".join(served.chat(messages, settings=greedy, stream=True)["message"]) == answer["message"]["content"]
    assert served.chat(messages, settings=greedy, reasoning=True)["message"]["reasoning"] is not None
    mirrored = model.encode_image(picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT))
    messages[0]["content"].append({"type": "image_url", "image_url": {"url": mirrored.image_url}})
    messages += [
        {"role": "assistant", "content": answer["message"]["content"]},
        {"role": "user", "content": question},
    ]
    both = served.chat(messages, settings=greedy)
    assert both["message"]["content"]
    assert "".join(served.chat(messages, settings=greedy, stream=True)["message"]) == both["message"]["content"]
    print("chat")

    refusal = refused(lambda: client("wrong").query(question="?"))
    assert (refusal.code, json.loads(refusal.read())["error"]["code"]) == (401, "TOKEN_INVALID")
    print("a wrong token")


def refused(call: Callable[[], object]) -> HTTPError:
    try:
        call()
    except HTTPError as error:
        return error
    raise AssertionError("it was not refused")


def model_name() -> str:
    request = Request(f"{FACTS['http']}/v1/models", headers={"Authorization": f"Bearer {FACTS['alice']}"})
    with urlopen(request) as response:
        return json.load(response)["data"][0]["id"]


main()
