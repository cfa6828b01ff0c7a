"""What settings of an engine resolve to on a device."""

from dataclasses import replace

import pytest

from kestrel_runtime.api.config import EngineConfig


def test_settings_that_are_given_stay():
    given = EngineConfig(
        dtype="float16",
        text_backend="fused-float8",
        vision_backend="plain",
        cuda_graphs=False,
        max_batch_size=3,
        max_prefill_tokens=100,
        max_crops_per_step=2,
        resize_on_device=False,
        step_timeout_s=5.0,
    )
    assert given.resolved("cuda", free_bytes=1.0) == replace(given, device="cuda")


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("cuda", ("cuda", "bfloat16", "fused", "fused", True, True, 64, 8192, 72, 60.0)),
        ("cpu", ("cpu", "float32", "plain", "plain", False, False, 16, 1024, 4, 1800.0)),
    ],
)
def test_each_device_has_its_values_for_what_is_left_to_it(device, expected):
    found = EngineConfig().resolved(device)
    assert (
        *(
            found.device,
            found.dtype,
            found.text_backend,
            found.vision_backend,
            found.cuda_graphs,
            found.resize_on_device,
        ),
        *(found.max_batch_size, found.max_prefill_tokens, found.max_crops_per_step, found.step_timeout_s),
    ) == expected
    assert found.resolved(device) == found


def test_plain_steps_are_not_captured():
    assert EngineConfig(text_backend="plain").resolved("cuda").cuda_graphs is False
    assert EngineConfig(text_backend="fused").resolved("cpu").cuda_graphs is False


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_determinism_selects_its_own_paths(device):
    found = EngineConfig(deterministic=True).resolved(device)
    assert (found.text_backend, found.vision_backend) == ("invariant", "invariant")
    assert found.cuda_graphs is (device == "cuda")
    assert list(found.contradictions()) == []
