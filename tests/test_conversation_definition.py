"""The definition of conversations agrees with the reference where that has an answer, and with its own fixtures."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.conversation_definition import (
    CONVERSATIONS,
    EVERY,
    TENSORS,
    Model,
    Picture,
    Run,
    Sampled,
    allowed,
    layout,
    prompt_of,
    spans,
)
from tests.reference_fixtures import MD2_SMALL, MD3_SMALL, SMALL_FOLDERS, expected

HIDDEN_TOLERANCE, LOGIT_TOLERANCE = 2e-4, 1e-3


@pytest.fixture(scope="module", params=SMALL_FOLDERS, ids=lambda folder: folder.name)
def model(request: pytest.FixtureRequest) -> Model:
    return Model(request.param)


def conversations(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / CONVERSATIONS).read_text(encoding="utf-8"))["conversations"]


def is_close(actual: Tensor, wanted: Tensor, tolerance: float) -> bool:
    return (actual - wanted).abs().max().item() <= tolerance


def hidden_is_close(actual: Tensor, wanted: Tensor) -> bool:
    return is_close(actual, wanted, HIDDEN_TOLERANCE * wanted.abs().max().item())


@torch.inference_mode()
def test_a_question_about_one_picture_has_the_numbers_of_the_reference(model: Model):
    tensors = load_file(model.folder / "expected.safetensors")
    for number, image in enumerate(expected(model.folder)["images"]):
        question = {"role": "user", "text": image["calls"][0]["args"]["question"], "images": [image["image"]]}
        prompt = layout(model, [question], reasoning=False)
        assert prompt[2:] == image["query_prompt_tokens"]
        hidden = Run(model, prompt).hidden()[-1]
        assert hidden_is_close(
            model.image_embeddings(image["image"])[::EVERY], tensors[f"{number}.image_embeddings_every_9th"]
        )
        assert hidden_is_close(hidden, tensors[f"{number}.query_prompt_last_hidden"])
        assert is_close(model.logits(hidden), tensors[f"{number}.query_prompt_logits"], LOGIT_TOLERANCE)


@torch.inference_mode()
def test_the_fixtures_are_what_the_definition_answers(model: Model):
    """All tokens of an answer in one pass: each is the likeliest one after those before it."""
    tensors = load_file(model.folder / TENSORS)
    for number, conversation in enumerate(conversations(model.folder)):
        prompt = prompt_of(model, conversation)
        assert [part.name if isinstance(part, Picture) else part for part in prompt] == conversation["prompt"]
        assert [list(span) for span in spans(model, prompt)] == conversation["blocks"]
        run = Run(model, prompt)
        tokens = [
            Sampled(*token) if isinstance(token, list) else Sampled(token) for token in conversation["tokens"]
        ]
        for token in tokens:
            run.append(token)
        hidden = run.hidden()[-len(tokens) - 1 :]
        logits = model.logits(hidden)
        assert hidden_is_close(hidden[0], tensors[f"{number}.last_hidden"])
        assert is_close(logits[0][::EVERY], tensors[f"{number}.logits_every_9th"], LOGIT_TOLERANCE)
        answer_at = 1 + [token.id for token in tokens].index(3) if conversation["reasoning"] else 0
        for place, token in enumerate(tokens):
            if place + 1 != answer_at:  # the token that begins the answer may be given
                assert logits[place, token.id] >= _best(model, logits[place], place, answer_at)


def _best(model: Model, logits: Tensor, place: int, answer_at: int) -> float:
    """The largest logit that may be chosen, less its tolerance: some ids only begin a phase of a Moondream 2."""
    ids, logits = model.config["tokenizer"], logits.clone()
    if model.is_second and place > answer_at:
        logits[ids["answer_id"]] = -math.inf
    elif model.is_second and 0 < place < answer_at:
        logits[[ids["eos_id"], ids["size_id"]]] = -math.inf
    return logits.max().item() - LOGIT_TOLERANCE


@torch.inference_mode()
def test_another_mask_is_far_from_a_fixture(model: Model):
    first = conversations(model.folder)[0]
    wanted = load_file(model.folder / TENSORS)["0.last_hidden"]
    run = Run(model, prompt_of(model, first))
    (start, end), (later_start, later_end) = run.blocks
    for wrong in (
        [(start, end)],
        [(later_start, later_end)],
        [(start, later_end)],
        [(start + 1, end), (later_start, later_end)],
    ):
        found = model.hidden(run.inputs, allowed(len(run.inputs), wrong))[-1]
        assert not is_close(found, wanted, 5 * HIDDEN_TOLERANCE * wanted.abs().max().item()), wrong


@pytest.mark.parametrize(("folder", "counts"), [(MD2_SMALL, {0, 1, 2}), (MD3_SMALL, {0, 1, 2, 3})])
def test_the_fixtures_have_what_conversations_may_have(folder: Path, counts: set[int]):
    found = conversations(folder)
    pictures = [sum(len(message.get("images", ())) for message in each["messages"]) for each in found]
    assert set(pictures) == counts
    last = [each for each, count in zip(found, pictures, strict=True) if each["reasoning"] and count > 1]
    assert any(message["role"] == "system" for each in last for message in each["messages"])
    assert any(message["role"] == "assistant" for each in last for message in each["messages"])
    users = [[message for message in each["messages"] if message["role"] == "user"] for each in found]
    assert any("images" not in each[0] and any("images" in later for later in each[1:]) for each in users)
