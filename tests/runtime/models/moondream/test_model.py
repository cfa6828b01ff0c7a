from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kestrel_ops import dequantise_int4
from kestrel_runtime.imaging.decoding import decode_image
from kestrel_runtime.models.moondream.model import Moondream
from kestrel_runtime.models.moondream.quantisation import quantised_stack
from kestrel_runtime.models.moondream.vision.cropping import MoondreamCropping
from kestrel_runtime.output.output_parser import Token
from tests.reference_fixtures import MD2_SMALL, MD3_SMALL, expected, image_paths
from tests.runtime.dense_attend import DenseAttend
from tests.runtime.models.moondream.tiny import random_model, tiny_config
from tests.runtime.noise import noise

CPU = torch.device("cpu")
COORDINATE, SIZE = 5, 6


# Embedding


def test_text_is_looked_up_and_values_are_encoded():
    model = random_model(tiny_config())
    tokens = [
        Token(17),
        Token(COORDINATE, (0.25,)),
        Token(SIZE, (0.5, 0.125)),
        Token(300),
        Token(COORDINATE, (0.75,)),
    ]
    wanted = torch.stack(
        (
            model.text.wte[17],
            model.region.encode_coordinates(torch.tensor([0.25]))[0],
            model.region.encode_sizes(torch.tensor([[0.5, 0.125]]))[0],
            model.text.wte[300],
            model.region.encode_coordinates(torch.tensor([0.75]))[0],
        )
    )
    torch.testing.assert_close(model.embed(tokens), wanted)


def test_a_place_without_a_value_is_a_token_like_any_other():
    model = random_model(tiny_config())
    embeddings = model.embed([Token(COORDINATE), Token(SIZE)])
    assert torch.equal(embeddings, model.text.wte[[COORDINATE, SIZE]])


def test_embedding_leaves_the_table_as_it_is():
    model = random_model(tiny_config())
    before = model.text.wte.clone()
    model.embed([Token(COORDINATE, (0.5,)), Token(SIZE, (0.5, 0.5))])
    assert torch.equal(model.text.wte, before)


def test_tokens_are_embedded_in_the_type_of_the_model():
    model = random_model(tiny_config()).bfloat16()
    embeddings = model.embed([Token(1), Token(COORDINATE, (0.5,)), Token(SIZE, (0.5, 0.5))])
    assert embeddings.dtype == model.dtype == torch.bfloat16


# Loading


@pytest.mark.parametrize("generation", [2, 3])
def test_a_state_makes_the_model_it_came_from(generation):
    config = tiny_config(generation)
    model = random_model(config)
    loaded = Moondream.from_state(config, dict(model.state_dict()), CPU, torch.float32)
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert not loaded.training
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    assert not any(tensor.is_meta for tensor in (*loaded.parameters(), *loaded.buffers()))


def test_everything_takes_the_type_asked_for_but_float8_experts_and_their_scales():
    config = tiny_config(3)
    state = dict(random_model(config, fp8_experts=True).state_dict())
    model = Moondream.from_state(config, state, CPU, torch.bfloat16)
    for name, tensor in model.state_dict().items():
        is_stack = name.endswith("weight") and tensor.ndim == 3
        wanted = torch.float8_e4m3fn if is_stack else torch.float32 if name.endswith(".scale") else torch.bfloat16
        assert tensor.dtype == wanted, name


def test_experts_are_rounded_where_that_is_asked_for_and_their_errors_are_told_by_layer():
    config = tiny_config(3)
    exact = random_model(config)
    model = Moondream.from_state(config, dict(exact.state_dict()), CPU, torch.float32, experts="float8")
    stacks = {name for name, tensor in exact.state_dict().items() if name.endswith("weight") and tensor.ndim == 3}
    assert stacks
    for name, tensor in model.state_dict().items():
        if name in stacks:
            assert tensor.dtype == torch.float8_e4m3fn
            scale = model.state_dict()[name.replace("weight", "scale")]
            torch.testing.assert_close(
                tensor.float() * scale[..., None], exact.state_dict()[name], rtol=1 / 16, atol=1e-4
            )
        elif not name.endswith(".scale"):
            assert torch.equal(tensor, exact.state_dict()[name]), name
    assert len(model.expert_errors) * 2 == len(stacks)
    assert all(0.01 < error < 0.04 for errors in model.expert_errors.values() for error in errors)


@pytest.mark.parametrize("fp8_experts", [False, True])
def test_experts_become_those_of_4_bits_from_either_type_and_their_errors_are_told_by_layer(fp8_experts):
    config = tiny_config(3)
    given = random_model(config, fp8_experts=fp8_experts).state_dict()
    model = Moondream.from_state(config, dict(given), CPU, torch.float32, experts="int4")
    assert model.expert_format == "int4"
    blocks: Any = model.text.blocks
    assert config.text.moe is not None
    for layer in range(config.text.moe.start_layer, config.text.n_layers):
        for part, error in zip(
            (blocks[layer].mlp.fc1, blocks[layer].mlp.fc2), model.expert_errors[layer], strict=True
        ):
            name = f"text.blocks.{layer}.mlp.fc{1 + (part is blocks[layer].mlp.fc2)}."
            wanted = given[name + "weight"].float()
            if fp8_experts:
                wanted = wanted * given[name + "scale"][..., None]
            pairs = zip(part.weight, part.scale, strict=True)
            stored = torch.stack([dequantise_int4(*expert, wanted.shape[2]) for expert in pairs])
            assert error == pytest.approx(((stored - wanted).norm() / wanted.norm()).item(), rel=1e-4)
            assert 0.03 < error < 0.11


def test_float8_experts_of_a_checkpoint_are_not_rounded_again():
    config = tiny_config(3)
    state = random_model(config, fp8_experts=True).state_dict()
    model = Moondream.from_state(config, dict(state), CPU, torch.float32, experts="float8")
    assert all(torch.equal(tensor.float(), state[name].float()) for name, tensor in model.state_dict().items())
    assert model.expert_errors == {}


def test_a_model_without_experts_has_none_to_round():
    config = tiny_config(2)
    model = Moondream.from_state(
        config, dict(random_model(config).state_dict()), CPU, torch.float32, experts="float8"
    )
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float32}


def test_a_state_is_emptied_as_it_is_taken():
    config = tiny_config()
    state = dict(random_model(config).state_dict())
    Moondream.from_state(config, state, CPU, torch.float32)
    assert state == {}


@pytest.mark.parametrize("change", ["missing", "unknown"])
def test_a_state_must_hold_exactly_the_models_tensors(change):
    config = tiny_config()
    state = dict(random_model(config).state_dict())
    if change == "missing":
        del state["text.post_ln.weight"]
    else:
        state["text.extra.weight"] = torch.zeros(1)
    with pytest.raises(RuntimeError, match=r"text\.(post_ln|extra)\.weight"):
        Moondream.from_state(config, state, CPU, torch.float32)


# From pixels to logits


@torch.inference_mode()
def prompted(model, image, ids):
    """What the model makes of BOS, an image and a prompt: the image's embeddings and the hidden states."""
    crops = MoondreamCropping(model.config.vision).make_crops(image)
    features = model.vision.encode(torch.from_numpy(crops.pixels))
    pictured = model.vision.project(features, crops.rows, crops.columns)
    bos = model.embed([Token(model.config.tokenizer.bos_id)])
    embeddings = torch.cat((bos, pictured, model.embed([Token(id) for id in ids])))
    attend = DenseAttend(model.config.text.prefix_attn)
    return pictured, model.text(embeddings, torch.arange(len(embeddings)), attend)


@pytest.mark.parametrize("generation", [2, 3])
@pytest.mark.parametrize("crop_size", [56, 196])
def test_crops_of_other_sizes_work_from_pixels_to_logits(generation, crop_size):
    model = random_model(tiny_config(generation, crop_size=crop_size))
    pictured, hidden = prompted(model, noise(500, 300), [1, 17, 2, 3])
    num_image_tokens = (crop_size // 14) ** 2
    assert pictured.shape == (num_image_tokens, model.config.text.dim)
    assert hidden.shape == (1 + num_image_tokens + 4, model.config.text.dim)
    assert model.text.logits(hidden[-1:]).isfinite().all()
    _, other = prompted(model, noise(500, 300, seed=1), [1, 17, 2, 3])
    assert not torch.allclose(hidden[-1], other[-1])


@pytest.mark.parametrize(
    ("folder", "loaded"), [(MD2_SMALL, "moondream2"), (MD3_SMALL, "moondream3")], ids=["moondream2", "moondream3"]
)
def test_a_reference_model_sees_and_answers_as_the_reference(folder, loaded, request):
    model = request.getfixturevalue(loaded).model
    tensors, place = load_file(folder / "expected.safetensors"), 1  # the smallest image
    image = decode_image(image_paths(folder)[place].read_bytes(), max_image_pixels=10**6)
    pictured, hidden = prompted(model, image, expected(folder)["images"][place]["query_prompt_tokens"])
    for name, tensor in (("image_embeddings_every_9th", pictured[::9]), ("query_prompt_last_hidden", hidden[-1])):
        wanted = tensors[f"{place}.{name}"]
        torch.testing.assert_close(tensor, wanted, rtol=0, atol=2e-4 * wanted.abs().max().item())
    logits = model.text.logits(hidden[-1:])[0]
    torch.testing.assert_close(logits, tensors[f"{place}.query_prompt_logits"], rtol=0, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_row_is_as_close_as_float8_with_a_scale_of_its_own_allows(dtype):
    weight = torch.randn(3, 7, 33, generator=torch.Generator().manual_seed(1)).to(dtype)
    weight[1, 2] *= 1e4
    weight[2, 6] *= 1e-6
    quantised, scales, _ = quantised_stack(weight, None, "float8", CPU)
    assert (quantised.dtype, quantised.shape) == (torch.float8_e4m3fn, weight.shape)
    assert (scales.dtype, scales.shape) == (torch.float32, weight.shape[:2])
    largest = weight.float().abs().amax(dim=2, keepdim=True)
    # Half a unit of the last of three bits, or of the smallest number that float8 has below its largest one.
    allowed = (weight.float().abs() / 16).maximum(largest / 448 * 2**-10)
    assert ((quantised.float() * scales[..., None] - weight.float()).abs() <= allowed * 1.001).all()


def test_the_error_is_that_of_all_weights_together():
    weight = torch.randn(2, 5, 301, generator=torch.Generator().manual_seed(2))
    quantised, scales, error = quantised_stack(weight, None, "float8", CPU)
    changed = quantised.float() * scales[..., None] - weight
    assert error == pytest.approx((changed.norm() / weight.norm()).item(), rel=1e-5)
    assert 0.02 < error < 0.03


def test_what_float8_represents_is_not_changed_and_zeros_stay_zeros():
    weight = torch.zeros(1, 3, 5)
    weight[0, 0] = torch.tensor([448.0, -224.0, 1.75, 0.0, 2**-6])
    quantised, scales, error = quantised_stack(weight, None, "float8", CPU)
    assert torch.equal(quantised.float() * scales[..., None], weight)
    assert error == 0.0
