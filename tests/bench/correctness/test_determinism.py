"""The comparison of modes finds no difference with the mode, and asks for what can differ."""

from dataclasses import replace

from bench.correctness.determinism import requests, rounds
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.requests import Query
from kestrel_runtime.models.loaded_model import LoadedModel
from tests.reference_fixtures import MD2_SMALL


def test_with_the_mode_no_bit_differs():
    config = EngineConfig(model=str(MD2_SMALL), device="cpu", deterministic=True)
    loaded = LoadedModel.load(config)
    queries = [request for request in requests(40, loaded.model.config) if isinstance(request, Query)]
    asked = [replace(query, image=None, spatial_refs=(), reasoning=False) for query in queries[:6]]
    assert {request.sampling.temperature for request in asked} == {0.0, 1.0}
    done = rounds(loaded, config, asked, 4)
    assert [one.name for one in done] == ["alone", "4 at once", "4 at once, again", "few pages", "small steps"]
    assert not any(one.num_different for one in done)
