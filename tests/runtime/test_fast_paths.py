import pytest

from kestrel_runtime.config import EngineConfig
from kestrel_runtime.errors import CheckpointError
from kestrel_runtime.fast_paths import FastPaths


def test_a_cpu_takes_the_plain_paths():
    paths = FastPaths.of(EngineConfig(), "cpu")
    assert (paths.text, paths.vision, paths.with_graphs) == ("plain", "plain", False)
    assert paths.kernels.resample.__module__ == "kestrel_ops.reference.resample"


def test_what_is_asked_for_is_taken():
    paths = FastPaths.of(EngineConfig(text_path="fused-float8", vision_path="fused"), "cpu")
    assert (paths.text, paths.vision, paths.with_graphs) == ("fused-float8", "fused", False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cuda_graphs": True, "text_path": "fused"}, "CUDA graphs need a CUDA device"),
        (
            {"kernels": (("concat_gelu", "cuneiform"), ("sing", "reference"))},
            "concat_gelu=cuneiform, sing=reference",
        ),
    ],
)
def test_what_cannot_be_had_is_refused(settings, message):
    with pytest.raises(CheckpointError, match=message):
        FastPaths.of(EngineConfig(**settings), "cpu")
