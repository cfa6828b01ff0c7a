"""A model of which each kind of block is left once, for what compiles kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kestrel_runtime.models.moondream.config import MoeConfig
from kestrel_runtime.models.moondream.kernel_compilation import abridged
from tests.runtime.models.moondream.tiny import random_model, tiny_config

EXPERTS = MoeConfig(num_experts=4, start_layer=3, experts_per_token=2, expert_inner_dim=16)


@pytest.mark.parametrize(("moe", "layers"), [(None, [0, 1, 5]), (EXPERTS, [0, 1, 3, 5])])
def test_a_block_of_each_kind_stays_with_its_weights(moe, layers):
    config = tiny_config()
    whole = random_model(replace(config, text=replace(config.text, n_layers=6, moe=moe)))
    small = abridged(whole)
    assert len(small.text.blocks) == small.config.text.n_layers == len(layers)
    assert len(small.vision.blocks) == small.config.vision.enc_n_layers == 1
    found, weights = small.state_dict(), whole.state_dict()
    for place, layer in enumerate(layers):
        own = {name: tensor for name, tensor in weights.items() if name.startswith(f"text.blocks.{layer}.")}
        assert own
        for name, tensor in own.items():
            assert found[name.replace(f".{layer}.", f".{place}.", 1)].data_ptr() == tensor.data_ptr()
    assert small.text.wte.data_ptr() == whole.text.wte.data_ptr()


def test_a_model_of_one_block_is_left_as_it_is():
    config = tiny_config()
    whole = random_model(replace(config, text=replace(config.text, n_layers=1)))
    small = abridged(whole)
    assert {name: tensor.shape for name, tensor in small.state_dict().items()} == {
        name: tensor.shape
        for name, tensor in whole.state_dict().items()
        if not name.startswith("vision.blocks.") or name.startswith("vision.blocks.0.")
    }
