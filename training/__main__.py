"""`python -m training`: prepare, train, polish, converse, export, or all five; or train the adapter."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import torch

from training.adapter.run import AdapterRecipe, train_adapter
from training.corpus import corpus
from training.export import export
from training.model import config_dict
from training.tokens import train_tokenizer
from training.train import CONVERSE, POLISH, Recipe, train


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m training", description=__doc__)
    parser.add_argument("task", choices=("prepare", "train", "polish", "converse", "export", "all", "adapter"))
    parser.add_argument("--folder", type=Path, default=Path("build/nano"), help="where everything is kept")
    parser.add_argument("--steps", type=int, help="steps of the whole run")
    parser.add_argument("--scenes", type=int, help="new pictures per step")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="pause with a checkpoint after these")
    parser.add_argument("--within", type=float, default=float("inf"), help="fewer steps where all take longer")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--plain", action="store_true", help="do not compile")
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--score-every", type=int, default=500)
    arguments = parser.parse_args()
    if arguments.task in ("prepare", "all"):
        prepare(arguments.folder)
    if arguments.task == "adapter":
        torch.set_num_threads(
            1
        )  # the order of sums, and so each byte of the file, does not depend on the machine's cores
        train_adapter(arguments.folder / "adapters", AdapterRecipe())
    polished, conversing = arguments.folder / "polished", arguments.folder / "conversing"
    if arguments.task in ("train", "all"):
        _train(arguments, arguments.folder, Recipe(), None)
    if arguments.task in ("polish", "all"):
        first = arguments.folder / "first"
        export(arguments.folder, first)
        _go_on(arguments, first, polished, POLISH)
    if arguments.task in ("converse", "all"):
        second = arguments.folder / "second"
        export(polished, second)
        _go_on(arguments, second, conversing, CONVERSE)
    if arguments.task in ("export", "all"):
        export(conversing, arguments.folder / "export")


def _go_on(arguments: argparse.Namespace, start: Path, folder: Path, recipe: Recipe) -> None:
    """Trains in `folder`, from an exported model."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(start / name, folder / name)
    _train(arguments, folder, recipe, start / "model.safetensors")


def _train(arguments: argparse.Namespace, folder: Path, recipe: Recipe, start: Path | None) -> None:
    given = {"num_steps": arguments.steps, "num_scenes": arguments.scenes}
    train(
        folder,
        replace(recipe, **{name: value for name, value in given.items() if value is not None}),
        start=start,
        num_workers=arguments.workers,
        seconds=arguments.seconds,
        within=arguments.within,
        compiled=not arguments.plain,
        log_every=arguments.log_every,
        score_every=arguments.score_every,
    )


def prepare(folder: Path) -> None:
    """Write the tokenizer and the configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    train_tokenizer(corpus(), folder / "tokenizer.json")
    (folder / "config.json").write_text(json.dumps(config_dict(folder / "tokenizer.json"), indent=1))


if __name__ == "__main__":
    main()
