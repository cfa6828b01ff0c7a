import pytest
import torch

from bench.device_timing import Limits
from bench.harness.parts import NUM_INPUT_SETS, PartTimer
from kestrel_ops.reference.scaled_linear import scaled_linear

CPU = torch.device("cpu")
LIMITS = Limits(copy_bytes_per_s=1e9, product_flops_per_s={"model": 1e12, "float8": 2e12})


@pytest.mark.parametrize(
    ("name", "flops", "size", "limit_us"),
    [("attention", 3e9, 1e3, 3e3), ("product qkv", 3e9, 1e3, 1.5e3), ("product qkv", 3e3, 5e6, 5e3)],
)
def test_a_limit_is_the_larger_of_operations_and_bytes(name, flops, size, limit_us):
    timer = PartTimer(CPU, LIMITS, "float8", "nothing")
    timer.time(name, lambda: None, tuple, calls=2, flops=flops, size=size)
    (part,) = timer.parts
    assert part.limit_us == pytest.approx(limit_us)
    assert (part.name, part.calls) == (name, 2)


def test_every_call_has_inputs_of_its_own():
    made, seen = [], set()

    def inputs():
        made.append(object())
        return (made[-1],)

    PartTimer(CPU, LIMITS, "model", "nothing").time("some", seen.add, inputs, calls=1, size=1)
    assert seen == set(made)
    assert len(made) == NUM_INPUT_SETS


def test_what_fails_is_told_and_left_out(capsys):
    timer = PartTimer(CPU, LIMITS, "model", "three tiles")
    timer.time("broken", lambda: 1 / 0, tuple, calls=1, size=1)
    timer.time("whole", lambda: None, tuple, calls=1, size=1)
    assert [part.name for part in timer.parts] == ["whole"]
    assert "broken, three tiles failed" in capsys.readouterr().out


@pytest.mark.parametrize("precision", ["model", "float8"])
def test_a_product_is_of_the_sizes_asked_for(precision):
    shapes = []

    def operation(x, x_scale, weight, weight_scale, bias, out_dtype):
        shapes.append((*x.shape, *weight.shape, *bias.shape))
        return scaled_linear(x, x_scale, weight, weight_scale, bias, out_dtype)

    timer = PartTimer(CPU, LIMITS, precision, "nothing", shares=2, share=" a prompt")
    timer.time_product("up", operation, 48, 32, 16, calls=3)
    assert set(shapes) == {(48, 16, 32, 16, 32)}
    assert [(part.name, part.calls) for part in timer.parts] == [("product up", 3)]
