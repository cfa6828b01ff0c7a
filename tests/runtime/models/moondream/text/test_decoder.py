import dataclasses
import itertools
import math

import pytest
import torch
from torch.nn.functional import gelu, layer_norm

from kestrel_runtime.models.moondream.config import MoeConfig
from kestrel_runtime.models.moondream.layers import Mlp
from kestrel_runtime.models.moondream.text.decoder import MixtureOfExperts, TextModel, rotary_tables
from tests.runtime.dense_attend import DenseAttend
from tests.runtime.models.moondream.tiny import randomised, tiny_config

GENERATIONS = pytest.mark.parametrize("generation", [2, 3], ids=["moondream2", "moondream3"])
GROUPED = tiny_config(2, n_heads=4, n_kv_heads=2).text
PREFIX = 6


def text_model(generation):
    return randomised(TextModel(tiny_config(generation).text))


def run(model, embeddings, attend, start=0):
    return model(embeddings, torch.arange(start, start + len(embeddings)), attend)


class WrittenOut:
    """A decoder from its parameters alone, in float64, all positions at once."""

    def __init__(self, model):
        self.config = model.config
        self.weights = {name: tensor.double() for name, tensor in model.state_dict().items()}

    def forward(self, embeddings, prefix_length):
        hidden = embeddings.double()
        for layer in range(self.config.n_layers):
            normed = self.norm(hidden, f"blocks.{layer}.ln")
            attended = self.attention(normed, layer, prefix_length)
            hidden = hidden + attended + self.mlp(normed, layer)
        return hidden

    def linear(self, hidden, name):
        return hidden @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def norm(self, hidden, name):
        weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        return layer_norm(hidden, weight.shape, weight, bias, 1e-5)

    def mlp(self, normed, layer):
        name = f"blocks.{layer}.mlp"
        if self.config.is_moe_layer(layer):
            return torch.stack([self.experts(row, name) for row in normed])
        return self.linear(gelu(self.linear(normed, f"{name}.fc1"), approximate="tanh"), f"{name}.fc2")

    def experts(self, row, name):
        logits = self.linear(row, f"{name}.router")
        best = logits.topk(self.config.moe.experts_per_token)
        total = torch.zeros_like(row)
        for expert, weight in zip(best.indices, best.values.softmax(0), strict=True):
            activated, gate = (self.weights[f"{name}.fc1.weight"][expert] @ row).chunk(2)
            total += weight * (self.weights[f"{name}.fc2.weight"][expert] @ (gelu(activated) * (gate + 1)))
        return total

    def attention(self, normed, layer, prefix_length):
        config, name = self.config, f"blocks.{layer}.attn"
        width, length = config.head_dim, len(normed)
        packed = self.linear(normed, f"{name}.qkv")
        query = packed[:, : config.n_heads * width]
        key, value = packed[:, config.n_heads * width :].chunk(2, dim=1)
        rows = torch.empty(length, config.n_heads * width, dtype=torch.float64)
        sees = torch.ones(length, length).tril().bool()
        sees[:prefix_length, :prefix_length] = True
        for head in range(config.n_heads):
            group = head * config.n_kv_heads // config.n_heads
            own, shared = slice(head * width, (head + 1) * width), slice(group * width, (group + 1) * width)
            q, k, v = query[:, own], key[:, shared], value[:, shared]
            if config.tau_attn:
                q = q * self.tau(packed, f"{name}.tau", "wq", head)
                v = v * self.tau(packed, f"{name}.tau", "wv", head)
            scores = self.turned(q) @ self.turned(k).T / math.sqrt(width)
            rows[:, own] = scores.masked_fill(~sees, -math.inf).softmax(dim=1) @ v
        return self.linear(rows, f"{name}.proj")

    def tau(self, packed, name, projection, head):
        """By token and by position, one scale for each position."""
        by_token = torch.tanh(gelu(packed) @ self.weights[f"{name}.{projection}"][head])
        places = torch.arange(1, len(packed) + 1, dtype=torch.float64)
        by_position = 0.5 + torch.sigmoid(self.weights[f"{name}.alpha"][head] * places.log())
        return (by_token + by_position)[:, None]

    def turned(self, rows):
        """The first half of the dimensions, turned in pairs of dim i and dim i + quarter."""
        quarter = rows.shape[1] // 4
        frequencies = self.config.rope_theta ** (-torch.arange(quarter, dtype=torch.float64) / quarter)
        angles = torch.arange(len(rows), dtype=torch.float64)[:, None] * frequencies
        pairs = torch.complex(rows[:, :quarter], rows[:, quarter : 2 * quarter])
        pairs = pairs * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((pairs.real, pairs.imag, rows[:, 2 * quarter :]), dim=1)


@GENERATIONS
@pytest.mark.parametrize("prefix_length", [0, PREFIX])
def test_a_decoder_is_its_blocks_written_out(generation, prefix_length):
    model = text_model(generation)
    embeddings = torch.randn(11, model.config.dim)
    wanted = WrittenOut(model).forward(embeddings, prefix_length)
    hidden = run(model, embeddings, DenseAttend(prefix_length))
    torch.testing.assert_close(hidden, wanted.float(), rtol=1e-4, atol=1e-4)


def test_a_decoder_with_grouped_heads_is_its_blocks_written_out():
    model = randomised(TextModel(GROUPED))
    embeddings = torch.randn(11, GROUPED.dim)
    wanted = WrittenOut(model).forward(embeddings, PREFIX)
    torch.testing.assert_close(run(model, embeddings, DenseAttend(PREFIX)), wanted.float(), rtol=1e-4, atol=1e-4)


def test_grouped_heads_equal_heads_that_are_repeated():
    grouped = randomised(TextModel(GROUPED))
    repeated = TextModel(dataclasses.replace(GROUPED, n_kv_heads=4))
    state = grouped.state_dict()
    width, num_queries = GROUPED.head_dim, GROUPED.n_heads * GROUPED.head_dim
    for name in [name for name in state if ".attn.qkv." in name]:
        query, keys_and_values = state[name][:num_queries], state[name][num_queries:]
        heads = keys_and_values.unflatten(0, (4, width)).repeat_interleave(2, dim=0).flatten(0, 1)
        state[name] = torch.cat((query, heads))
    repeated.load_state_dict(state)
    embeddings = torch.randn(9, GROUPED.dim)
    with torch.no_grad():
        torch.testing.assert_close(
            run(grouped, embeddings, DenseAttend(PREFIX)), run(repeated, embeddings, DenseAttend(PREFIX))
        )


@GENERATIONS
@pytest.mark.parametrize("cuts", [(0, 6, 11), (0, 7, 8, 11), (0, 6, 7, 8, 9, 10, 11)])
def test_chunks_and_single_tokens_equal_everything_at_once(generation, cuts):
    model = text_model(generation)
    embeddings = torch.randn(11, model.config.dim)
    attend, parts = DenseAttend(PREFIX), []
    for start, end in itertools.pairwise(cuts):
        parts.append(run(model, embeddings[start:end], attend, start))
    torch.testing.assert_close(torch.cat(parts), run(model, embeddings, DenseAttend(PREFIX)), rtol=1e-4, atol=1e-5)


@GENERATIONS
def test_a_block_reads_one_norm_for_attention_and_mlp_alike(generation):
    model = text_model(generation)
    block = model.blocks[1]
    embeddings = torch.randn(5, model.config.dim)
    model.blocks = torch.nn.ModuleList([block])
    whole = run(model, embeddings, DenseAttend())
    block.get_parameter("attn.proj.weight").zero_()
    block.get_parameter("attn.proj.bias").zero_()
    without_attention = run(model, embeddings, DenseAttend())
    norm, mlp = block.get_submodule("ln"), block.get_submodule("mlp")
    torch.testing.assert_close(without_attention, embeddings + mlp(norm(embeddings)))
    assert not torch.allclose(whole, without_attention)


def test_the_tau_of_the_first_position_is_one_and_what_the_token_adds():
    model = text_model(3)
    tau = model.blocks[0].get_submodule("attn.tau")
    wq, wv, alpha = (tau.get_parameter(name) for name in ("wq", "wv", "alpha"))
    packed = torch.randn(1, model.config.qkv_dim)
    for slope in (-3.0, 0.0, 8.0):
        alpha.fill_(slope)
        query_scale, value_scale = tau(packed, torch.tensor([0]))
        torch.testing.assert_close(query_scale, 1 + torch.tanh(gelu(packed) @ wq.T))
        torch.testing.assert_close(value_scale, 1 + torch.tanh(gelu(packed) @ wv.T))


def test_keys_are_not_scaled_by_tau():
    scaled, plain = DenseAttend(), DenseAttend()
    model = text_model(3)
    embeddings = torch.randn(3, model.config.dim)
    run(model, embeddings, scaled)
    for block in model.blocks:
        block.get_parameter("attn.tau.wq").add_(1)
        block.get_parameter("attn.tau.wv").add_(1)
    run(model, embeddings, plain)
    torch.testing.assert_close(scaled.keys[0], plain.keys[0])
    assert not torch.allclose(scaled.values[0], plain.values[0])


def test_logits_are_read_through_the_final_norm():
    model = text_model(2)
    hidden = torch.randn(3, model.config.dim)
    logits = model.logits(hidden)
    assert logits.shape == (3, model.config.vocab_size)
    torch.testing.assert_close(logits, model.logits(5 * hidden + 2), rtol=1e-3, atol=1e-3)  # a norm sees shape only
    normed = layer_norm(hidden, (model.config.dim,), model.post_ln.weight, model.post_ln.bias)
    torch.testing.assert_close(logits, normed @ model.lm_head.weight.T + model.lm_head.bias)


@GENERATIONS
def test_a_short_type_is_kept_throughout(generation):
    model = text_model(generation)
    embeddings = torch.randn(8, model.config.dim)
    wanted = run(model, embeddings, DenseAttend())
    hidden = run(model.bfloat16(), embeddings.bfloat16(), DenseAttend())
    assert hidden.dtype == torch.bfloat16
    torch.testing.assert_close(hidden.float(), wanted, rtol=0.1, atol=0.1)


def test_an_mlp_has_the_tanh_form_of_gelu():
    mlp = randomised(Mlp(1, 1, 1))
    mlp.fc1.weight.fill_(1)
    mlp.fc2.weight.fill_(1)
    mlp.fc1.bias.zero_()
    mlp.fc2.bias.zero_()
    x = 2.5
    wanted = 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    assert mlp(torch.tensor([[x]])).item() == pytest.approx(wanted, abs=1e-6)
    assert abs(wanted - gelu(torch.tensor(x)).item()) > 1e-4


CONFIG = MoeConfig(num_experts=5, start_layer=0, experts_per_token=2, expert_inner_dim=3)


def mixture(config=CONFIG, *, fp8=False):
    return randomised(MixtureOfExperts(8, config, "float8" if fp8 else "model"))


def test_parameters_carry_the_names_and_shapes_of_the_checkpoints():
    shapes = {name: tuple(tensor.shape) for name, tensor in mixture().named_parameters()}
    assert shapes == {
        "router.weight": (5, 8),
        "router.bias": (5,),
        "fc1.weight": (5, 6, 8),
        "fc2.weight": (5, 8, 3),
    }


def test_float8_experts_have_a_scale_per_expert_and_row():
    parameters = dict(mixture(fp8=True).named_parameters())
    assert parameters["fc1.weight"].dtype == parameters["fc2.weight"].dtype == torch.float8_e4m3fn
    assert tuple(parameters["fc1.scale"].shape) == (5, 6)
    assert tuple(parameters["fc2.scale"].shape) == (5, 8)
    assert parameters["fc1.scale"].dtype == parameters["fc2.scale"].dtype == torch.float32
    assert parameters["router.weight"].dtype == torch.float32


def test_a_token_goes_to_the_experts_that_the_router_likes_best():
    experts, hidden = mixture(), torch.randn(6, 8)
    wanted = torch.zeros(6, 8)
    for row, vector in enumerate(hidden):
        logits = experts.router.weight @ vector + experts.router.bias
        best = logits.argsort(descending=True)[:2]
        for expert, weight in zip(best, logits[best].softmax(0), strict=True):
            activated, gate = (experts.fc1.weight[expert] @ vector).chunk(2)
            wanted[row] += weight * (experts.fc2.weight[expert] @ (gelu(activated) * (gate + 1)))
    torch.testing.assert_close(experts(hidden), wanted)


def test_a_gate_of_zero_leaves_a_plain_gelu_expert():
    experts = mixture(MoeConfig(num_experts=1, start_layer=0, experts_per_token=1, expert_inner_dim=3))
    experts.fc1.weight[:, 3:] = 0
    hidden = torch.randn(4, 8)
    wanted = gelu(hidden @ experts.fc1.weight[0, :3].T) @ experts.fc2.weight[0].T
    torch.testing.assert_close(experts(hidden), wanted)


def test_float8_experts_equal_the_weights_they_stand_for():
    scaled, plain = mixture(fp8=True), mixture()
    plain.router.load_state_dict(scaled.router.state_dict())
    for ours, theirs in ((plain.fc1, scaled.fc1), (plain.fc2, scaled.fc2)):
        assert theirs.scale is not None
        ours.weight.copy_(theirs.weight.float() * theirs.scale[..., None])
    hidden = torch.randn(7, 8)
    torch.testing.assert_close(scaled(hidden), plain(hidden))


@pytest.mark.parametrize("theta", [10_000.0, 1_500_000.0])
def test_an_angle_is_the_position_times_the_frequency_of_its_dimension(theta):
    cosine, sine = rotary_tables(32, 800, theta)
    assert cosine.shape == sine.shape == (800, 16)
    assert cosine.dtype == sine.dtype == torch.float32
    for position in (0, 1, 2, 729, 799):
        for dim in range(16):
            angle = position * theta ** (-2 * dim / 32)
            assert cosine[position, dim].item() == pytest.approx(math.cos(angle), abs=2e-4)
            assert sine[position, dim].item() == pytest.approx(math.sin(angle), abs=2e-4)


def test_the_first_lane_turns_by_one_radian_and_position_zero_not_at_all():
    cosine, sine = rotary_tables(8, 3, 10_000.0)
    assert sine[:, 0].tolist() == pytest.approx([0, math.sin(1), math.sin(2)])
    assert cosine[0].tolist() == [1.0] * 4
