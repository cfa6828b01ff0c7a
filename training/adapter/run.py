"""The recipe of the example adapter: frozen weights, a few minutes on two CPU cores, scores before and after."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path

import torch
from safetensors.torch import load_file

from kestrel_runtime.api.config import BUILT_IN_MODEL
from kestrel_runtime.loading import checkpoint
from kestrel_runtime.loading.tokenizer import Tokenizer
from training.adapter.low_rank import add_adapter, write_peft
from training.adapter.renaming import NEW, OLD, Renaming, has_old_color, prints_a_name
from training.batches import Group, GroupMaker
from training.export import trainable_state
from training.losses import loss, right_answers
from training.model import new_model, read_config
from training.network import Network
from training.progress import Progress
from training.scenes import HELD_OUT_SEED, Scene, make_scene

NANO = Path(checkpoint.__file__).parents[1] / "nano"


@dataclass(frozen=True, slots=True)
class AdapterRecipe:
    """Everything that decides what is learnt."""

    num_steps: int = 160
    scenes_with: int = 5
    """New pictures per step that have the colour."""
    scenes_without: int = 1
    layers: tuple[int, ...] = (0, 1, 2, 3, 4, 5)
    rate: float = 0.004
    """Of AdamW at the start; it falls to nothing in a line."""
    seed: int = 2
    num_tests: int = 24
    """Held-out pictures of each kind."""


def train_adapter(folder: Path, recipe: AdapterRecipe) -> None:
    """Train the adapter of the built-in model and write it to a folder of its name in `folder`.

    Runs on the CPU. One machine writes the same bytes each time, with the same number of threads.
    """
    started = time.monotonic()
    config, tokenizer = read_config(NANO), Tokenizer.from_file(NANO / "tokenizer.json")
    model = new_model(config, recipe.seed)
    model.load_state_dict(trainable_state(load_file(NANO / "model.safetensors")))
    added = add_adapter(model, recipe.layers, recipe.seed)
    network = Network(model)
    parameters = [parameter for own in added.values() for parameter in (own.a, own.b)]
    optimizer = torch.optim.AdamW(parameters, recipe.rate, weight_decay=0.0)
    make = GroupMaker(Renaming(tokenizer, config, polishing=True), 0, 0, 1)
    with_color = _seeds(recipe.seed * 100_000_000, has_old_color)
    without = _seeds(recipe.seed * 100_000_000, lambda scene: not has_old_color(scene))
    old, new = (
        _tests(Renaming(tokenizer, config, share_of_others=0.0, name=name), recipe, has_old_color)
        for name in (OLD, NEW)
    )
    others = _tests(Renaming(tokenizer, config), recipe, lambda scene: not has_old_color(scene))
    print(f"before: answers with {OLD}: {_score(network, old)}; others: {_score(network, others)}")
    progress = Progress(recipe.num_steps)
    for step in range(recipe.num_steps):
        optimizer.param_groups[0]["lr"] = recipe.rate * (1 - step / recipe.num_steps)
        seeds = [*islice(with_color, recipe.scenes_with), *islice(without, recipe.scenes_without)]
        group = make.of_seeds(seeds)
        value = loss(network(group.crops, group.grids, group.visits[0]), group.visits[0])
        value.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % 10 == 0:
            progress.show(step + 1, f"loss {value.item():.3f}")
    num_bytes = write_peft(folder / NEW, added, BUILT_IN_MODEL)
    print(f"\nafter: answers with {NEW}: {_score(network, new)}; others: {_score(network, others)}")
    print(f"{folder / NEW}: {num_bytes / 1000:.0f} kB, {time.monotonic() - started:.0f} s")


def _seeds(first: int, fits: Callable[[Scene], bool]) -> Iterator[int]:
    """Seeds of scenes that fit, from `first` on."""
    for seed in count(first):
        scene = make_scene(seed)
        if fits(scene) and not prints_a_name(scene):
            yield seed


def _tests(teacher: Renaming, recipe: AdapterRecipe, fits: Callable[[Scene], bool]) -> Group:
    seeds = islice(_seeds(HELD_OUT_SEED, fits), recipe.num_tests)
    return GroupMaker(teacher, 0, 0, 1, jitter=False).of_seeds(seeds)


@torch.no_grad()
def _score(network: Network, group: Group) -> str:
    rows = group.visits[0]
    scores = right_answers(network(group.crops, group.grids, rows), rows).values()
    right, total = (sum(numbers) for numbers in zip(*scores, strict=True))
    return f"{right} of {total} right"
