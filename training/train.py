"""The recipe: batches in a fixed order, a schedule, checkpoints that a run resumes from, curves."""

import json
import math
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader, Dataset

from kestrel_runtime.loading.tokenizer import Tokenizer
from training.batches import Group, GroupMaker, Rows
from training.conversing import ConversingTeacher
from training.curves import draw_curves
from training.examples import Teacher
from training.export import trainable_state
from training.losses import loss, right_answers
from training.model import new_model, read_config
from training.muon import Muon, split_parameters
from training.network import Network
from training.progress import Progress
from training.scenes import HELD_OUT_SEED


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides what is learnt. Two runs of one recipe see the same batches in the same order."""

    num_steps: int = 12000
    num_scenes: int = 64
    """New pictures per step."""
    delays: tuple[int, ...] = (0, 24, 61)
    """A step sees the new pictures and those of so many steps ago."""
    num_visits: int = 3
    """So many times a picture is seen with new examples; from then on with those of its first visits again."""
    muon_lr: float = 0.02
    adam_lr: float = 0.003
    weight_decay: float = 0.02
    num_warmup_steps: int = 150
    constant_share: float = 0.35
    """Of the steps run at the full rate; then it falls to nothing."""
    quantised_share: float = 0.2
    """Of the steps, the last ones, run with experts as float8 has them."""
    seed: int = 0
    polishing: bool = False
    """Ask more of what is hardest: lists of everything, captions, reading."""
    starts_full: bool = False
    """The first step sees as many pictures as all others: each size of a batch is compiled by itself."""
    conversing: bool = False
    """Ask also about two pictures, several times, with instructions and for JSON."""
    keeps_vision: bool = False
    """Leave the vision encoder as it is, and so encode each picture once for all visits."""

    def rate(self, step: int) -> float:
        """The learning rate's factor at a step."""
        warm = min(1.0, (step + 1) / self.num_warmup_steps)
        left = (self.num_steps - step) / (self.num_steps * (1 - self.constant_share))
        return warm * min(1.0, left)


POLISH = Recipe(
    num_steps=3200,
    muon_lr=0.006,
    adam_lr=0.0009,
    num_warmup_steps=50,
    constant_share=0.0,
    quantised_share=1.0,
    seed=1,
    polishing=True,
)
"""A second, shorter run that starts from what the first one exported."""

CONVERSE = Recipe(
    num_steps=4269,
    num_scenes=32,
    delays=(0, 9, 20, 32, 45, 59),
    muon_lr=0.006,
    adam_lr=0.0009,
    num_warmup_steps=50,
    constant_share=0.1,
    quantised_share=1.0,
    seed=3,
    polishing=True,
    starts_full=True,
    conversing=True,
    keeps_vision=True,
)
"""A further run, which starts from what the second one exported and teaches conversations."""
_PACE_STEPS = 100
"""After so many steps a run with a time limit looks how many more fit."""


class _Groups(Dataset[Group]):
    def __init__(self, make: GroupMaker, first: int, end: int) -> None:
        self._make, self._first, self._end = make, first, end

    def __len__(self) -> int:
        return self._end - self._first

    def __getitem__(self, index: int) -> Group:
        torch.set_num_threads(1)
        return self._make(self._first + index)


def _stream(make: GroupMaker, first: int, end: int, num_workers: int) -> Iterator[Group]:
    loader = DataLoader(
        _Groups(make, first, end),
        batch_size=None,
        num_workers=num_workers,
        prefetch_factor=3 if num_workers else None,
        multiprocessing_context="fork" if num_workers else None,
    )
    return iter(loader)


def train(
    folder: Path,
    recipe: Recipe,
    *,
    start: Path | None,
    num_workers: int,
    seconds: float,
    within: float = math.inf,
    compiled: bool,
    log_every: int,
    score_every: int,
) -> None:
    """Train in `folder`, which holds config and tokenizer; go on from its checkpoint if it has one.

    Without one the weights are those exported to `start`, or random.

    Stops after `seconds` with a checkpoint, or at the end with `weights.pt`. Where the recipe's steps take longer
    than `within`, there are fewer, and the rate falls faster.
    """
    started = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    config, tokenizer = read_config(folder), Tokenizer.from_file(folder / "tokenizer.json")
    kind = ConversingTeacher if recipe.conversing else Teacher
    teacher = kind(tokenizer, config, polishing=recipe.polishing)
    make = GroupMaker(teacher, recipe.seed * 100_000_000, recipe.num_scenes, recipe.num_visits)
    model = new_model(config, recipe.seed)
    if start is not None:
        model.load_state_dict(trainable_state(load_file(start)))
    state = State(Network(model).to(device), recipe)
    checkpoint = folder / "checkpoint.pt"
    if checkpoint.exists():
        state.load(torch.load(checkpoint, map_location=device, weights_only=False))
    # The workers fork before anything runs on the device.
    lead = max(recipe.delays) if recipe.starts_full else 0
    first = max(0, state.step + lead - max(recipe.delays))
    stream = _stream(make, first, recipe.num_steps + lead, num_workers)
    recent: deque[Pictures] = deque(maxlen=max(recipe.delays) + 1)
    for index in range(first, state.step + lead):
        recent.append(state.look_at(_on(next(stream), device)))
        print(f"\rrecalling pictures {index + 1 - first}/{state.step + lead - first}", end="", flush=True)
    if compiled:
        torch._dynamo.config.recompile_limit = 64
        state.network.compile_blocks()
    num_tests = recipe.num_scenes * len(recipe.delays)  # the shape of a batch, which is compiled already
    held_out = GroupMaker(teacher, HELD_OUT_SEED + 1_000_000, num_tests, 1, jitter=False)
    tests = [_on(held_out(index), device) for index in range(3)] if score_every else []
    progress = Progress(recipe.num_steps)
    waited, asked_for_pace, most_steps = 0.0, math.nan, recipe.num_steps
    while state.step < recipe.num_steps and time.monotonic() - started < seconds:
        if state.step == round(recipe.num_steps * (1 - recipe.quantised_share)):
            state.network.quantise_experts()
        asked = time.monotonic()
        group = _on(next(stream), device)
        waited += time.monotonic() - asked
        recent.append(state.look_at(group))
        state.learn(step_batch(recent, recipe.delays))
        if within < math.inf and state.step % _PACE_STEPS == 0:
            if device.type == "cuda":
                torch.cuda.synchronize()
            now = time.monotonic()
            if not math.isnan(asked_for_pace):
                pace_s = (now - asked_for_pace) / _PACE_STEPS
                fitting = state.step + max(0, int((within - (now - started)) / pace_s))
                state.recipe = recipe = replace(recipe, num_steps=min(most_steps, fitting))
                print(f"\n{pace_s:.3f} s a step: {recipe.num_steps} steps", flush=True)
            asked_for_pace = now
        if state.step % log_every == 0:
            value = state.note_loss()
            progress.show(state.step, f"loss {value:.3f}, waited for data {waited:.0f} s")
        if score_every and state.step % score_every == 0:
            state.note_scores(tests)
            torch.save(state.save(), checkpoint)
    is_done = state.step == recipe.num_steps
    if tests:
        print("\n" + state.note_scores(tests))
    torch.save(state.save(), checkpoint)
    (folder / "curves.json").write_text(json.dumps(state.curves))
    draw_curves(state.curves, folder / "curves.png")
    if is_done:
        torch.save(state.network.model.state_dict(), folder / "weights.pt")
    print(f"\n{'done' if is_done else 'paused'} at step {state.step}, {time.monotonic() - started:.0f} s, "
          f"{waited:.0f} s of them waiting for data", flush=True)  # fmt: skip


@dataclass(slots=True)
class Pictures:
    """Some pictures as steps see them, and a row of examples of each for every visit."""

    seen: torch.Tensor
    """Crops as in `Group`; or, without grids, embeddings [pictures, image tokens, dim]."""
    grids: list[tuple[int, int]]
    visits: list[Rows]


class State:
    """What a checkpoint holds, and how a step changes it."""

    def __init__(self, network: Network, recipe: Recipe) -> None:
        self.network, self.recipe = network, recipe
        network.model.vision.requires_grad_(not recipe.keeps_vision)
        matrices, others = split_parameters(network.model)
        self._optimizers: list[torch.optim.Optimizer] = [
            Muon(matrices, recipe.muon_lr, recipe.weight_decay),
            torch.optim.AdamW(others, recipe.adam_lr, betas=(0.9, 0.98), weight_decay=0.0),
        ]
        self._rates = (recipe.muon_lr, recipe.adam_lr)
        self._others = others
        self._losses: list[torch.Tensor] = []
        self.step = 0
        self.curves: dict[str, list[tuple[int, float]]] = {}

    @torch.no_grad()
    def look_at(self, group: Group) -> Pictures:
        """Returns what steps need of a group: its embeddings where vision does not change, else its crops."""
        if not self.recipe.keeps_vision:
            return Pictures(group.crops, group.grids, group.visits)
        with _mixed_precision(group.crops.device):
            return Pictures(self.network.embed_images(group.crops, group.grids), [], group.visits)

    def learn(self, batch: tuple[torch.Tensor, list[tuple[int, int]], Rows]) -> None:
        """One step on one batch: crops with their grids, or embeddings of whole pictures without; and rows."""
        rate = self.recipe.rate(self.step)
        for optimizer, full in zip(self._optimizers, self._rates, strict=True):
            optimizer.param_groups[0]["lr"] = full * rate
        pictures, grids, rows = batch
        with _mixed_precision(pictures.device):
            images = self.network.embed_images(pictures, grids) if grids else pictures
            value = loss(self.network.predict(images, rows), rows)
        value.backward()
        torch.nn.utils.clip_grad_norm_(self._others, 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._losses.append(value.detach())
        self.step += 1

    def note_loss(self) -> float:
        """The mean loss since the last note, kept for the curves. Raises `FloatingPointError` if it is none."""
        value = torch.stack(self._losses).mean().item()
        if not math.isfinite(value):
            raise FloatingPointError(f"the loss is {value} at step {self.step}")
        self._losses.clear()
        self.curves.setdefault("loss", []).append((self.step, value))
        return value

    @torch.no_grad()
    def note_scores(self, tests: list[Group]) -> str:
        """Shares of right answers in `tests`, printed and kept for the curves."""
        right: Counter[str] = Counter()
        total: Counter[str] = Counter()
        for group in tests:
            rows = group.visits[0]
            with _mixed_precision(group.crops.device):
                prediction = self.network(group.crops, group.grids, rows)
            for kind, (good, count) in right_answers(prediction, rows).items():
                right[kind] += good
                total[kind] += count
        scores = {kind: right[kind] / total[kind] for kind in total if total[kind]}
        for kind, score in scores.items():
            self.curves.setdefault(kind, []).append((self.step, score))
        line = ", ".join(f"{kind} {score:.2f}" for kind, score in scores.items())
        print(f"\nstep {self.step}: {line}", flush=True)
        return line

    def save(self) -> dict[str, Any]:
        """All that `load` needs to go on as if nothing had happened."""
        return {
            "step": self.step,
            "model": self.network.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "curves": self.curves,
        }

    def load(self, saved: dict[str, Any]) -> None:
        """Become what was saved."""
        self.step, self.curves = saved["step"], saved["curves"]
        self.network.model.load_state_dict(saved["model"])
        for optimizer, state in zip(self._optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        if self.step >= round(self.recipe.num_steps * (1 - self.recipe.quantised_share)):
            self.network.quantise_experts()


def _on(group: Group, device: torch.device) -> Group:
    return Group(group.crops.to(device, non_blocking=True), group.grids, [rows.to(device) for rows in group.visits])


def _mixed_precision(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def step_batch(
    recent: deque[Pictures], delays: tuple[int, ...]
) -> tuple[torch.Tensor, list[tuple[int, int]], Rows]:
    """The newest group and the older ones that are due, each on its next visit."""
    due = [(recent[-1 - delay], visit) for visit, delay in enumerate(delays) if delay < len(recent)]
    return (
        torch.cat([group.seen for group, _ in due]),
        [grid for group, _ in due for grid in group.grids],
        Rows.cat([group.visits[visit % len(group.visits)] for group, visit in due]),
    )
