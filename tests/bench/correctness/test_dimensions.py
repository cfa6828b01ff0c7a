"""The sweep over dimensions: every path of a small shape passes on a CPU, and a failing one is explained."""

import json

import pytest
import torch

from bench.correctness import dimensions
from bench.correctness.dimensions import HEADINGS, shape_of, write_fixture
from bench.correctness.models import HARD_SHAPES, drawn_shape
from kestrel_ops import Kernels
from kestrel_runtime.models.loaded_model import LoadedModel

SMALL = "seed-2"  # 25 patches, four layers, dimensions of 14, 72 and 77


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """The sweep would have operations use all processors, also for the tests that come later in this process."""
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)


@pytest.fixture(autouse=True)
def short_answers(monkeypatch):
    monkeypatch.setattr(dimensions, "MAX_TOKENS", 8)


def test_paths_of_a_small_shape_pass_and_leave_a_table_and_json(tmp_path, capsys):
    file = tmp_path / "sweep.json"
    command = ["--device", "cpu", "--shape", SMALL, "--runs", "2", "--json", str(file)]
    assert dimensions.main([*command, "--paths", "fused", "fused-graphs", "text-float8", "vision-calibrated"]) == 0
    result = json.loads(file.read_text())
    assert [row["path"] for row in result["rows"]] == ["fused", "text-float8", "vision-calibrated"]
    exact, short, _ = result["rows"]
    assert [row["num_failed"] for row in result["rows"]] == [0, 0, 0]
    assert exact["num_answers"] > 10
    assert exact["num_equal_answers"] == exact["num_answers"]
    assert short["num_answers"] == 0, "answers are compared in float32 alone"
    assert exact["num_bit_equal"] == exact["num_tensors"] == short["num_tensors"] == 16
    assert 0 < exact["worst_share"] < 1
    assert result["machine"]["date"]
    assert result["shapes"] == {SMALL: shape_of(SMALL).described()}
    assert file.stat().st_size < 10_000
    table = capsys.readouterr().out.splitlines()
    assert table[0] == f"| {' | '.join(HEADINGS)} |"
    assert table[2].startswith(f"| {SMALL} | fused | {exact['num_passed']} | 0 |")


def test_a_faulty_kernel_fails_the_sweep(tmp_path, monkeypatch, capsys):
    select = Kernels.select

    def faulty(device_type, choices, model):
        kernels = select(device_type, choices, model)
        if choices.get("concat_gelu") == "reference":
            return kernels
        exact = kernels.concat_gelu
        return dimensions.replace(kernels, concat_gelu=lambda *args, **kw: (exact(*args, **kw)[0] * 1.01, None))

    monkeypatch.setattr(Kernels, "select", faulty)
    file = tmp_path / "sweep.json"
    command = ["--device", "cpu", "--shape", SMALL, "--runs", "1", "--paths", "fused", "--json", str(file)]
    assert dimensions.main(command) == 1
    (row,) = json.loads(file.read_text())["rows"]
    assert row["num_failed"] > 0
    assert row["without"] == ["concat_gelu"]
    assert len(row["complaints"]) == 3
    assert "passes without concat_gelu" in capsys.readouterr().out


def test_a_path_that_cannot_be_had_is_no_failure():
    (row,) = dimensions.sweep_shape(shape_of(SMALL), ["fused-graphs"], 1, "cpu", num_threads=1)
    assert (row.num_passed, row.num_failed) == (0, 0)
    assert "needs a CUDA device" in row.unavailable


def test_an_unknown_shape_is_refused_by_name(capsys):
    with pytest.raises(SystemExit):
        dimensions.main(["--shape", "width-49"])
    assert "no shape width-49" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["seed-3", "seed-5"])
def test_checkpoints_of_experts_load_with_weights_that_are_scaled(tmp_path, name):
    shape = shape_of(name)
    write_fixture(tmp_path, shape, with_answers=False)
    config = dimensions.EngineConfig(model=str(tmp_path), device="cpu", dtype="float32")
    model = LoadedModel.load(config).model
    types = {parameter.dtype for parameter in model.text.parameters()}
    assert (torch.float8_e4m3fn in types) == shape.fp8_experts
    expected = json.loads((tmp_path / "expected.json").read_text())
    assert [image["calls"] for image in expected["images"]] == [[], []]
    assert expected["images"][0]["n_crops"] == 2
    assert expected["images"][1]["n_crops"] >= 2


@pytest.mark.parametrize(
    "shape", [*HARD_SHAPES.values(), *map(drawn_shape, range(60))], ids=lambda shape: shape.name
)
def test_a_shape_is_one_that_models_may_have_and_follows_from_its_name(shape):
    shape.config.check()
    vision = shape.config.vision
    assert vision.crop_size > 2 * vision.overlap_margin * vision.enc_patch_size
    assert shape.fp8_experts <= (shape.config.text.moe is not None)
    assert shape_of(shape.name) == shape
