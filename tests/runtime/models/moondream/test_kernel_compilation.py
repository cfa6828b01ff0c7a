"""Kernels of a model that is not there, for cards that are not there."""

import os
import subprocess
import sys
from dataclasses import fields, replace

import pytest
import torch

from kestrel_ops import Kernels
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.errors import CheckpointError
from kestrel_runtime.models.moondream.config import MoeConfig
from kestrel_runtime.models.moondream.kernel_compilation import compile_ahead, outline
from tests.runtime.models.moondream.tiny import tiny_config

META = torch.device("meta")
EXPERTS = MoeConfig(num_experts=4, start_layer=3, experts_per_token=2, expert_inner_dim=16)


@pytest.mark.parametrize(("moe", "kinds"), [(None, "ddd"), (EXPERTS, "ddee")])
@pytest.mark.parametrize("expert_format", ["model", "float8", "int4"])
def test_an_outline_has_a_block_of_each_kind_and_no_weights(moe, kinds, expert_format):
    config = tiny_config()
    whole = replace(config, text=replace(config.text, n_layers=6, moe=moe))
    small = outline(whole, torch.bfloat16, META, expert_format)
    has_experts = [hasattr(block.mlp, "router") for block in small.text.blocks]
    assert has_experts == [kind == "e" for kind in kinds]
    assert len(small.vision.blocks) == small.config.vision.enc_n_layers == 1
    assert all(tensor.is_meta for tensor in small.parameters())
    assert small.expert_format == ("model" if moe is None else expert_format)
    assert small.text.wte.dtype == torch.bfloat16


def test_one_block_is_one_block():
    config = tiny_config()
    small = outline(replace(config, text=replace(config.text, n_layers=1)), torch.float32, META, "model")
    assert len(small.text.blocks) == 1


def test_float8_is_refused_for_a_card_that_has_none(tmp_path):
    settings = EngineConfig(model="moondream2", text_backend="fused-float8", kv_dtype="float8")
    with pytest.raises(CheckpointError, match=r"--text-backend fused-float8, --kv-dtype float8: .* 8\.9.* 8\.0"):
        compile_ahead("moondream2", settings, (8, 0), tmp_path)


def test_nothing_is_compiled_or_looked_at_where_definitions_are_named(tmp_path):
    named = tuple((field.name, "reference") for field in fields(Kernels))
    assert compile_ahead("moondream3", EngineConfig(model="", kernels=named), (9, 0), tmp_path) == (0, tmp_path)


_START = """
import kestrel_ops.compilation.triton_compilations
from kestrel_ops import num_compilations
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.models.moondream import prepared

load, counts = prepared.load_kernels, [num_compilations()]

def counted(*arguments):
    facts = load(*arguments)
    counts.append(num_compilations())
    return facts

prepared.load_kernels = counted
settings = {"text_backend": "fused-float8", "vision_backend": "calibrated-float8", "kv_dtype": "float8"}
LocalEngine.start(EngineConfig(model="moondream-nano", device="cuda", num_kv_pages=512, **settings)).close()
print(*counts, num_compilations())
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_captures_compile_nothing_that_a_start_has_not_compiled_together(tmp_path):
    own = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    own["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", _START], capture_output=True, text=True, check=True, env=own)
    before, together, in_all = map(int, done.stdout.split())
    assert before == 0 < together == in_all
