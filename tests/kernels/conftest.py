"""Fixtures of the tests of kernels, which run in Triton's interpreter where there is no GPU."""

import pytest

from tests.kernels import interpreter

interpreter.repair()


@pytest.fixture
def last_program_first(monkeypatch):
    """Runs the programs of a kernel in the interpreter from the last to the first."""
    builder = interpreter.module.interpreter_builder
    set_index = builder.set_grid_idx

    def set_opposite(*index: int) -> None:
        set_index(*(size - 1 - place for size, place in zip(builder.grid_dim, index, strict=True)))

    monkeypatch.setattr(builder, "set_grid_idx", set_opposite)
