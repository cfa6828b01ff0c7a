import torch
from torch.nn.functional import gelu

from kestrel_runtime.models.moondream.config import MoeConfig
from kestrel_runtime.models.moondream.moe import MixtureOfExperts
from tests.runtime.models.moondream.tiny import randomised

CONFIG = MoeConfig(num_experts=5, start_layer=0, experts_per_token=2, expert_inner_dim=3)


def mixture(config=CONFIG, *, fp8=False):
    return randomised(MixtureOfExperts(8, config, fp8=fp8))


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
