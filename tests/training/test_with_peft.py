"""The script that trains an adapter with PEFT reads examples as the server does."""

import re
from pathlib import Path

import pytest
import torch

from kestrel_runtime.api.config import BUILT_IN_MODEL, EngineConfig
from kestrel_runtime.api.events import QueryOutput
from kestrel_runtime.api.requests import Query, SamplingParams
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.models.loaded_model import LoadedModel
from tests.reference_fixtures import CHECKOUT
from training.adapter.with_peft import TARGET_MODULES, Decoder, prepared, train

PICTURE = (CHECKOUT / "kestrel_grpc" / "demo_picture.png").read_bytes()
QUESTION = "What color is the star?"


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return LoadedModel.load(EngineConfig(model=BUILT_IN_MODEL, device="cpu"))


async def test_the_answer_of_the_server_is_the_most_likely_one(loaded: LoadedModel):
    engine = LocalEngine(loaded, EngineConfig(model=BUILT_IN_MODEL, device="cpu"))
    try:
        finished = await engine.submit(
            Query(image=PICTURE, question=QUESTION, sampling=SamplingParams(temperature=0.0))
        ).result()
    finally:
        engine.close()
    assert isinstance(finished.output, QueryOutput)
    example = prepared(loaded, PICTURE, QUESTION, finished.output.answer)
    with torch.inference_mode():
        assert Decoder(loaded.model)(example).argmax(-1).tolist() == example.answer.tolist()


def test_only_the_answer_is_learnt_and_only_by_what_is_trained(loaded: LoadedModel):
    example = prepared(loaded, PICTURE, QUESTION, "blue")
    decoder = Decoder(loaded.model)
    with torch.no_grad():
        before = decoder(example).log_softmax(-1)
    assert before.shape[0] == len(example.answer) == 2, "one token and EOS"
    own = loaded.model.text.blocks[-1].attn.proj.bias
    kept = own.detach().clone()
    own.requires_grad_(True)
    try:
        train(decoder, [example], steps=3, rate=0.02, seed=1)
        with torch.no_grad():
            after = decoder(example).log_softmax(-1)
        likelihood = [scores[range(2), example.answer].sum() for scores in (before, after)]
        assert likelihood[1] > likelihood[0]
    finally:
        own.requires_grad_(False)
        own.data.copy_(kept)


def test_the_modules_that_are_trained_are_the_decoders(loaded: LoadedModel):
    names = [name for name, _ in Decoder(loaded.model).named_modules() if re.fullmatch(TARGET_MODULES, name)]
    assert len(names) == 2 * len(loaded.model.text.blocks)
    assert [name for name in names if not name.startswith("model.text.blocks.")] == []


def test_the_page_gives_the_expression_of_the_script():
    page = (Path(CHECKOUT) / "docs" / "adapters.md").read_text(encoding="utf-8")
    assert f'`r"{TARGET_MODULES}"`' in page
