import logging
from dataclasses import fields

import pytest

from kestrel_ops import Kernels

OPERATIONS = [field.name for field in fields(Kernels)]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_cpu_takes_the_definitions(operation):
    assert getattr(Kernels.select("cpu", {}), operation).__module__ == f"kestrel_ops.reference.{operation}"


def test_a_cuda_device_takes_what_is_faster():
    kernels = Kernels.select("cuda", {})
    modules = {getattr(kernels, operation).__module__.split(".")[1] for operation in OPERATIONS}
    assert modules == {"cuda", "triton", "library"}


def test_a_choice_goes_first():
    kernels = Kernels.select("cuda", {"concat_gelu": "reference"})
    assert kernels.concat_gelu.__module__ == "kestrel_ops.reference.concat_gelu"
    assert kernels.add_layer_norm.__module__ == "kestrel_ops.triton.add_layer_norm"


def test_the_choice_is_logged(caplog):
    with caplog.at_level(logging.INFO):
        Kernels.select("cpu", {})
    assert all(f"{operation}=reference" in caplog.text for operation in OPERATIONS)


def test_what_there_is_not_is_refused_by_name():
    choices = {"concat_gelu": "cuneiform", "sing": "reference", "crop_attention": "triton"}
    with pytest.raises(ValueError, match=r"concat_gelu=cuneiform, sing=reference, crop_attention=triton"):
        Kernels.select("cpu", choices)
