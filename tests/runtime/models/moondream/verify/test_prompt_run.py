"""The tensors of a prompt: both ways to its last hidden state agree, and where float8 loses most."""

import pytest

from bench.correctness.dimensions import shape_of, write_fixture
from bench.harness.workload import chart
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.requests import Query
from kestrel_runtime.models.loaded_model import LoadedModel
from kestrel_runtime.models.moondream.fused import weights as fused_weights
from kestrel_runtime.models.moondream.verify.prompt_run import DECODED_HIDDEN, HIDDEN, PromptRun, prompt_tensors
from kestrel_runtime.verify.preparing import preparing

REQUEST = Query("What is the value of the tallest bar?", chart(1, 60, 50))
VALUES = ("last_layer_v_first8", "last_layer_v_last8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("seed-5")
    write_fixture(path, shape_of("seed-5"), with_answers=False)
    return path


def tensors(folder, text_backend):
    config = EngineConfig(model=str(folder), device="cpu", dtype="float32", text_backend=text_backend)
    loaded = LoadedModel.load(config)
    with preparing(loaded, config) as prepare:
        return prompt_tensors(PromptRun(loaded.model, config, prepare), REQUEST)


def off_by(result, wanted):
    return ((result - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("text_backend", ["plain", "fused"])
def test_a_decode_step_of_the_last_token_gives_what_the_prompt_gives(folder, text_backend):
    found = tensors(folder, text_backend)
    assert off_by(found[DECODED_HIDDEN], found[HIDDEN]) < 1e-5


def test_a_first_block_in_the_models_type_makes_prompts_in_float8_more_accurate(folder, monkeypatch):
    exact = tensors(folder, "plain")
    errors = {}
    for num_wide in (0, 1):
        monkeypatch.setattr(fused_weights, "NUM_WIDE_BLOCKS", num_wide)
        found = tensors(folder, "fused-float8")
        errors[num_wide] = [off_by(found[name], exact[name]) for name in VALUES]
    assert all(wide < 0.8 * short for short, wide in zip(errors[0], errors[1], strict=True)), errors
