"""The peer's side, as far as it goes without the peer."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bench.harness.workload import WORKLOADS, Album
from bench.peer_kestrel import PeerEngine, peer_model, write_peer_file
from bench.random_weights import write_random_model
from kestrel_grpc.cli.bench.processes import Recording
from kestrel_runtime.loading.checkpoint import find_checkpoint
from kestrel_runtime.models.moondream.config import MoondreamConfig
from tests.bench.small import SMALL_2, SMALL_3


@dataclass
class Metrics:
    output_tokens: int
    decode_time_ms: float = 0.0


@dataclass
class Result:
    metrics: Metrics


class Engine:
    """Answers at once, in the peer's words."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.num_running = 0
        self.pictures: list[bytes] = []

    async def query(self, *, image: bytes, question: str, reasoning: bool, settings: dict[str, float]) -> Result:
        self.num_running += 1
        await asyncio.sleep(0)
        self.num_running -= 1
        self.pictures.append(image)
        if self.fails:
            raise RuntimeError("out of pages")
        assert not reasoning
        return Result(Metrics(int(settings["max_tokens"])))


async def recorded(engine: Engine, album: Album, concurrency: int) -> Recording:
    """Records over a longer window where the machine was too busy for a request in a shorter one."""
    for duration_s in (0.05, 0.5, 5.0, 50.0):
        recording = await PeerEngine(engine, album).record(WORKLOADS["direct"], concurrency, duration_s, 1.0)
        if recording.samples:
            return recording
    raise AssertionError("no request ran in any window")


async def test_the_peer_is_asked_about_pictures_it_has_not_seen():
    engine = Engine()
    recording = await recorded(engine, Album(2), 2)
    assert len(set(engine.pictures)) == len(engine.pictures) > 2
    assert {sample.num_tokens for sample in recording.samples} == {3}
    assert engine.num_running == 0


async def test_what_the_peer_raises_is_an_error_of_its_request():
    recording = await recorded(Engine(fails=True), Album(1), 1)
    assert {sample.error for sample in recording.samples} == {"RuntimeError"}


@pytest.mark.parametrize(
    ("config", "fp8_experts", "name"), [(SMALL_2, False, "moondream2"), (SMALL_3, True, "moondream3-preview")]
)
def test_the_peers_file_has_scales_and_ours_stays(
    tmp_path: Path, config: MoondreamConfig, fp8_experts: bool, name: str
):
    write_random_model(tmp_path, config, torch.device("cpu"), fp8_experts=fp8_experts)
    names = load_file(write_peer_file(tmp_path)).keys()
    assert "text_model.transformer.h.1.kv_quantizer.v_scale" in names
    assert peer_model(tmp_path) == name
    assert [file.name for file in find_checkpoint(str(tmp_path)).weight_files] == ["model.safetensors"]
