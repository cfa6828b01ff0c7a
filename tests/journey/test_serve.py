"""The command `kestrel-grpc serve` as people run it: from a hub, from its cache, and not at all."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kestrel_client import Client
from tests.hub import Hub, Repository, save_shards
from tests.reference_fixtures import MD2_SMALL, expected

COMMAND = (sys.executable, "-m", "kestrel_grpc", "serve", "--port", "0", "--withdrawal-delay", "0", "--model")
CASE = expected(MD2_SMALL)["images"][1]
pytestmark = pytest.mark.usefixtures("warm_starts")
QUERY = CASE["calls"][0]


def sharded_repository(folder: Path) -> Repository:
    save_shards(folder, load_file(MD2_SMALL / "model.safetensors"), 2)
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_bytes((MD2_SMALL / name).read_bytes())
    return Repository({file.name: file.read_bytes() for file in folder.iterdir()})


def environment(home: Path, endpoint: str, **more: str) -> dict[str, str]:
    """This process's, but with a hub and a cache of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "KESTREL_"))}
    return {**kept, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1", **more}


@contextmanager
def serving(model: str, env: dict[str, str], log: Path) -> Iterator[str]:
    """Run the command until the block ends, then stop it as an operator does; yields its address."""
    with log.open("w") as errors:
        process = subprocess.Popen((*COMMAND, model), env=env, stdout=subprocess.PIPE, stderr=errors, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert " on 127.0.0.1:" in line, log.read_text()
        yield line.split(" on ")[1].split()[0]
    finally:
        process.send_signal(signal.SIGTERM)
        rest = process.communicate(timeout=60)[0]
    assert (process.returncode, rest) == (0, "")


def reference_answer(address: str) -> str:
    with Client(address) as client:
        image = (MD2_SMALL / CASE["image"]).read_bytes()
        sampling = {"temperature": 0.0, "max_tokens": expected(MD2_SMALL)["max_tokens"]}
        return client.complete_query(image, QUERY["args"]["question"], **sampling).answer


def test_a_hub_name_is_downloaded_with_progress_and_served_then_served_offline(tmp_path: Path):
    files = tmp_path / "files"
    files.mkdir()
    home, log = tmp_path / "home", tmp_path / "log"
    with Hub({"org/sharded": sharded_repository(files)}) as hub:
        with serving("org/sharded", environment(home, hub.endpoint), log) as address:
            assert reference_answer(address) == QUERY["expect"]["answer"]
        assert any(name.endswith("-of-00002.safetensors") for name in hub.downloads)
    assert "100%" in log.read_text()
    offline = environment(home, "http://127.0.0.1:9", HF_HUB_OFFLINE="1")
    with serving("org/sharded", offline, log) as address:
        assert reference_answer(address) == QUERY["expect"]["answer"]


def refusal(model: str, env: dict[str, str]) -> str:
    """What the command says when it refuses; it must be one line, and the port must not have been opened."""
    done = subprocess.run((*COMMAND, model), env=env, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_a_hub_name_without_network_or_cache_is_refused_in_one_line(tmp_path: Path):
    env = environment(tmp_path / "home", "http://127.0.0.1:9", HF_HUB_OFFLINE="1")
    assert "org/sharded" in refusal("org/sharded", env)


def test_a_checkpoint_with_wrong_tensors_is_refused_and_each_is_named(tmp_path: Path):
    tensors = load_file(MD2_SMALL / "model.safetensors")
    del tensors["model.text.post_ln.bias"]
    tensors["model.text.extra"] = torch.zeros(3)
    tensors["model.vision.pos_emb"] = torch.zeros(1, 5, 16)
    save_file(tensors, tmp_path / "model.safetensors")
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((MD2_SMALL / name).read_bytes())
    told = refusal(str(tmp_path), environment(tmp_path / "home", "http://127.0.0.1:9"))
    for name in ("text.post_ln.bias", "text.extra", "vision.pos_emb"):
        assert name in told
