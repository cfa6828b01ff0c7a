"""Files that are no adapters are refused by name; nothing of them is executed or kept."""

import gc
import json
import os
import pickle
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from kestrel_runtime.adapters.files import CONFIG_FILE, WEIGHTS_FILE, AdapterSource
from kestrel_runtime.api.errors import AdapterInvalid, AdapterNotFound
from kestrel_runtime.models.loaded_model import LoadedModel
from kestrel_runtime.models.moondream.adapters.target import MoondreamAdapters
from tests.adapter_folders import PEFT_CONFIG, peft_tensors, random_pairs

RANK = 4
NUM_RANDOM = 100


class Bomb:
    """Unpickling it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def target(moondream3: LoadedModel) -> MoondreamAdapters:
    return MoondreamAdapters(moondream3.model.config.text, 2, RANK, torch.device("cpu"), torch.float32)


@pytest.fixture
def tensors(moondream3: LoadedModel) -> dict[str, torch.Tensor]:
    return peft_tensors(random_pairs(moondream3.model.config.text, seed=1, rank=RANK))


@pytest.fixture
def root(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder = tmp_path / "root" / "some"
    folder.mkdir(parents=True)
    (folder / CONFIG_FILE).write_text(json.dumps(PEFT_CONFIG))
    (folder / WEIGHTS_FILE).write_bytes(save(tensors))
    return tmp_path / "root"


def load(root: Path, target: MoondreamAdapters, name: str = "some") -> None:
    target.check(AdapterSource(root, (), target.max_file_bytes).read(name))


def refusal(root: Path, target: MoondreamAdapters, name: str = "some") -> str:
    before = num_tensor_bytes()
    with pytest.raises((AdapterInvalid, AdapterNotFound)) as caught:
        load(root, target, name)
    assert caught.value.name == name
    text = str(caught.value)
    del caught
    gc.collect()
    assert num_tensor_bytes() <= before, "tensors of a refused adapter stay in memory"
    assert len(text) < 8000
    return text


def num_tensor_bytes() -> int:
    return sum(item.nbytes for item in gc.get_objects() if type(item) is torch.Tensor)


def test_the_folder_is_an_adapter_unless_it_is_changed(root: Path, target: MoondreamAdapters):
    load(root, target)


@pytest.mark.parametrize(
    "name",
    ["..", "../root/some", "some/../../outside", "/etc", ".", "", "some/", "a" * 200, "so me", "some\0", "~"],
)
def test_names_lead_nowhere_else(root: Path, target: MoondreamAdapters, name: str):
    (root.parent / "outside").mkdir()
    assert "no adapter named" in refusal(root, target, name)


def test_a_pickled_file_is_not_opened(root: Path, target: MoondreamAdapters, tmp_path: Path):
    folder = root / "pickled"
    folder.mkdir()
    bomb = tmp_path / "bomb"
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(Bomb(bomb)))
    assert "adapter_model.bin is not read" in refusal(root, target, "pickled")
    (folder / WEIGHTS_FILE).write_bytes(pickle.dumps(Bomb(bomb)))  # under the name of another format
    assert "is no safetensors file" in refusal(root, target, "pickled")
    assert not bomb.exists()


def test_links_out_of_the_root_are_refused(root: Path, target: MoondreamAdapters):
    outside = root.parent / "outside"
    (root / "some").rename(outside)
    (root / "folder").symlink_to(outside)
    assert "no adapter named" in refusal(root, target, "folder")
    (root / "files").mkdir()
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        (root / "files" / name).symlink_to(outside / name)
    assert f"{CONFIG_FILE}: leads out of the folder of adapters" in refusal(root, target, "files")


def test_links_within_the_root_are_followed(root: Path, target: MoondreamAdapters):
    (root / "latest").symlink_to(root / "some")
    load(root, target, "latest")


def test_a_pipe_and_a_folder_in_place_of_a_file_do_not_hang(root: Path, target: MoondreamAdapters):
    weights = root / "some" / WEIGHTS_FILE
    weights.unlink()
    os.mkfifo(weights)
    assert "is no regular file" in refusal(root, target)
    weights.unlink()
    weights.mkdir()
    assert "is no regular file" in refusal(root, target) or "cannot be read" in refusal(root, target)


def test_a_file_that_is_too_large_is_not_read(root: Path, target: MoondreamAdapters):
    with (root / "some" / WEIGHTS_FILE).open("r+b") as file:
        file.truncate(2**40)  # sparse
    assert "has more than" in refusal(root, target)


@pytest.mark.parametrize("change", ["another size", "another file", "a new file", "gone"])
def test_a_folder_that_changes_while_it_is_read_is_refused(
    root: Path, target: MoondreamAdapters, monkeypatch: pytest.MonkeyPatch, change: str
):
    weights = root / "some" / WEIGHTS_FILE
    read = AdapterSource._read_file

    def read_and_change(name: str, path: Path, allowed: Path, max_bytes: int) -> bytes:
        data = read(name, path, allowed, max_bytes)
        if path == weights:
            if change == "another size":
                weights.write_bytes(data[:-1])
            elif change == "another file":
                (root / "other").write_bytes(data)
                (root / "other").replace(weights)
            elif change == "a new file":
                (weights.parent / "more.safetensors").write_bytes(data)
            else:
                weights.unlink()
        return data

    monkeypatch.setattr(AdapterSource, "_read_file", staticmethod(read_and_change))
    assert "was changed while it was read" in refusal(root, target)


def test_a_tensor_that_claims_more_than_the_file_is_refused(root: Path, target: MoondreamAdapters):
    header = json.dumps({"a": {"dtype": "F32", "shape": [2**40, 2**20], "data_offsets": [0, 2**62]}}).encode()
    (root / "some" / WEIGHTS_FILE).write_bytes(struct.pack("<Q", len(header)) + header)
    assert "is no safetensors file" in refusal(root, target)


@pytest.mark.parametrize("config", ["[" * 100_000, "", "[]", '{"peft_type": ' + "9" * 5000, "\ud800", '{"a": NaN}'])
def test_a_broken_configuration_is_refused(root: Path, target: MoondreamAdapters, config: str):
    (root / "some" / CONFIG_FILE).write_text(config, errors="surrogatepass")
    assert CONFIG_FILE in refusal(root, target) or "lora_alpha" in refusal(root, target)


def renamed(chance: random.Random, tensors: dict[str, torch.Tensor]) -> None:
    name = chance.choice(list(tensors))
    spot = chance.randrange(len(name))
    changed = name[:spot] + chance.choice("xA.0") + name[spot + chance.randrange(2) :]
    tensors[changed if changed != name else f"{name}.x"] = tensors.pop(name)


def dropped(chance: random.Random, tensors: dict[str, torch.Tensor]) -> None:
    tensors.pop(chance.choice([name for name in tensors if "lora_A" in name]))  # without a whole pair it is valid


def reshaped(chance: random.Random, tensors: dict[str, torch.Tensor]) -> None:
    name = chance.choice(list(tensors))
    shape = chance.choice([(0,), (1,), (), (3, 0), (2, 2, 2), tensors[name].shape[::-1][:1], (1, 1, 1, 1)])
    tensors[name] = torch.zeros(shape)


def ranked(chance: random.Random, tensors: dict[str, torch.Tensor]) -> None:
    name = chance.choice([name for name in tensors if name.replace("lora_A", "lora_B") in tensors.keys() - {name}])
    other = name.replace("lora_A", "lora_B")
    times = chance.choice([0, 2, 64])
    tensors[name] = tensors[name].repeat(times, 1)
    tensors[other] = tensors[other].repeat(1, times)


def poisoned(chance: random.Random, tensors: dict[str, torch.Tensor]) -> None:
    name = chance.choice(list(tensors))
    tensors[name] = tensors[name].clone()
    tensors[name].view(-1)[chance.randrange(tensors[name].numel())] = chance.choice([float("nan"), float("inf")])


def retyped(chance: random.Random, tensors: dict[str, torch.Tensor]) -> None:
    name = chance.choice(list(tensors))
    tensors[name] = tensors[name].to(chance.choice([torch.int64, torch.float64, torch.bool, torch.float8_e4m3fn]))


CHANGES: list[Callable[[random.Random, dict[str, torch.Tensor]], None]] = [
    *(renamed, dropped, reshaped, ranked, poisoned, retyped)
]


@pytest.mark.parametrize("seed", range(NUM_RANDOM))
def test_random_damage_is_refused(
    root: Path, target: MoondreamAdapters, tensors: dict[str, torch.Tensor], seed: int
):
    chance = random.Random(seed)
    weights = root / "some" / WEIGHTS_FILE
    if seed % 10 == 9:  # damage to the bytes of the header, or the end
        data = bytearray(save(tensors))
        if chance.random() < 0.5:
            data[chance.randrange(8)] ^= 0xFF
        else:
            del data[-chance.randrange(1, len(data)) :]
        weights.write_bytes(data)
    else:
        for _ in range(chance.randrange(1, 3)):
            change = chance.choice(CHANGES)
            change(chance, tensors)
            if change in (poisoned, retyped, reshaped, ranked):
                break  # another change might undo it
        weights.write_bytes(save(tensors))
    refusal(root, target)
