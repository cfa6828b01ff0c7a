"""The bench of constraints runs, its random schemas are schemas, and nothing hostile is left to be compiled."""

import random

import jsonschema
import pytest

from bench.constraints import check_schemas, cost, hostile_constraints, schema_constraint
from bench.harness.random_schemas import random_schema
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.engine.engine import LocalEngine


def test_random_schemas_are_schemas_within_the_bounds():
    for seed in range(200):
        schema = random_schema(random.Random(seed))
        jsonschema.Draft202012Validator.check_schema(schema)
        assert list(schema_constraint(schema).violations()) == []


@pytest.mark.parametrize(
    "name", ["a schema of 1 MB", "60,000 brackets", "2^20 combinations by references", "(a?){5000}a{5000}"]
)
def test_what_is_certainly_hostile_is_refused_before_it_is_compiled(name: str):
    assert list(hostile_constraints()[name].violations())


async def test_schemas_are_checked_and_the_cost_is_measured():
    engine = LocalEngine.start(EngineConfig(device="cpu", dtype="float32", max_batch_size=8))
    try:
        outcomes = await check_schemas(engine, 8, at_once=8, max_tokens=60)
        assert sum(outcomes.values()) == 8
        assert outcomes.keys() <= {"STOP", "LENGTH", "InvalidRequest"}
        assert outcomes["STOP"] >= 3
    finally:
        engine.close()


async def test_a_model_that_ends_its_answers_is_no_model_for_the_cost():
    engine = LocalEngine.start(EngineConfig(device="cpu", dtype="float32", max_batch_size=2))
    try:
        with pytest.raises(AssertionError, match="an answer ended"):
            await cost(engine, [1], 40)
    finally:
        engine.close()
