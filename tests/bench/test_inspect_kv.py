"""The comparison of cache contents: it tells an exact path from a rounded one, and finds a fault's layer."""

import json
import sys
from pathlib import Path

import pytest
import torch

from bench import inspect_kv
from bench.inspect_kv import Parts, compare
from tests.reference_fixtures import MD2_SMALL, MD3_SMALL

PARTS = Parts(prefix_length=3, num_prompt=5)


@pytest.fixture
def inspect(tmp_path, monkeypatch):
    def run(model: Path, *switches: str):
        file = tmp_path / "inspect_kv.json"
        command = ["inspect_kv", "--model", str(model), "--device", "cpu", "--json", str(file), *switches]
        monkeypatch.setattr(sys, "argv", command)
        return inspect_kv.main(), json.loads(file.read_text())

    return run


def layers(num_layers: int):
    torch.manual_seed(1)
    return [(torch.randn(2, 7, 4), torch.randn(2, 7, 4)) for _ in range(num_layers)]


@pytest.mark.parametrize("model", [MD2_SMALL, MD3_SMALL], ids=["moondream2", "moondream3"])
def test_a_fused_path_in_float32_leaves_what_the_plain_one_does(inspect, model):
    status, result = inspect(model, "--dtype", "float32", "--set", "text-path=fused", "--tokens", "2")
    assert (status, result["precision"], result["first_layer_above"]) == (0, "float32", None)
    assert result["tokens_alike"] == result["tokens"] == 3
    assert all(0 < row["values"]["relative"] < 1e-5 for row in result["layers"][1:])


def test_the_first_layer_above_the_tolerance_is_named(inspect, capsys):
    status, result = inspect(MD2_SMALL, "--dtype", "bfloat16", "--tolerance", "1e-6", "--tokens", "1")
    assert (status, result["precision"], result["first_layer_above"]) == (1, "bfloat16", 0)
    assert all(1e-3 < row["keys"]["relative_decoded"] < 0.05 for row in result["layers"])
    assert "layer 0 is the first above 1e-06 (bfloat16)" in capsys.readouterr().out


def test_a_cache_in_float8_is_compared_with_its_scales(inspect):
    status, result = inspect(MD2_SMALL, "--set", "kv-dtype=float8", "--image", "-", "--tokens", "0")
    assert (status, result["precision"]) == (0, "float8")
    assert all(0.01 < row["keys"]["relative"] < 0.1 for row in result["layers"])
    assert all(row["keys"]["relative_decoded"] == 0 for row in result["layers"])


def test_a_fault_is_found_in_its_layer_and_at_its_position():
    wanted, got = layers(3), layers(3)
    got[1][1][0, 5, 2] += 100
    exact, faulty, also_exact = compare(wanted, got, PARTS)
    assert exact.keys == also_exact.values
    assert exact.keys.relative == exact.keys.largest == 0
    assert faulty.keys.largest == 0
    assert faulty.values.largest == pytest.approx(100)
    assert faulty.values.largest_at == "decoded 0"
    assert faulty.values.relative_decoded > faulty.values.relative > 1
    assert [row.exceeds(0.5) for row in (exact, faulty, also_exact)] == [False, True, False]


def test_what_is_no_number_is_above_every_tolerance():
    wanted, got = layers(1), layers(1)
    got[0][0][1, 2, 0] = float("nan")
    (row,) = compare(wanted, got, PARTS)
    assert row.exceeds(1e9)
    assert row.keys.largest_at == "image 2"
