import copy
import io
from dataclasses import replace

import torch

from training.batches import GroupMaker
from training.curves import draw_curves
from training.examples import Teacher
from training.model import new_model
from training.network import Network
from training.train import Recipe, State


def test_a_run_goes_on_from_its_checkpoint_as_if_never_stopped(teacher: Teacher):
    group, recipe = GroupMaker(teacher, 0, 1, 1)(0), Recipe(num_steps=10, num_warmup_steps=2)
    batch = (group.crops, group.grids, group.visits[0])
    # A block of each kind.
    text, vision = replace(teacher.config.text, n_layers=2), replace(teacher.config.vision, enc_n_layers=1)
    config = replace(teacher.config, text=text, vision=vision)
    whole, resumed = (State(Network(new_model(config, recipe.seed)), recipe) for _ in range(2))
    whole.learn(batch)
    file = io.BytesIO()
    torch.save(whole.save(), file)
    file.seek(0)
    resumed.load(torch.load(file, weights_only=False))
    for state in (whole, resumed):
        state.learn(batch)
    assert whole.step == resumed.step == 2
    pairs = zip(whole.network.parameters(), resumed.network.parameters(), strict=True)
    assert all(torch.equal(first, second) for first, second in pairs)
    start = new_model(config, recipe.seed)
    assert any(
        not torch.equal(first, second)
        for first, second in zip(whole.network.model.parameters(), start.parameters(), strict=True)
    )


def test_the_first_weights_follow_from_the_seed(teacher: Teacher):
    first, second, other = (new_model(teacher.config, seed) for seed in (3, 3, 4))
    assert torch.equal(first.text.wte, second.text.wte)
    assert not torch.equal(first.text.wte, other.text.wte)


def test_the_rate_warms_up_stays_and_falls_to_nothing():
    recipe = Recipe(num_steps=1000, num_warmup_steps=10, constant_share=0.5)
    assert recipe.rate(0) == 0.1
    assert recipe.rate(9) == recipe.rate(500) == 1
    assert recipe.rate(750) == 0.5
    assert 0 < recipe.rate(999) < 0.01


def test_curves_are_drawn(tmp_path):
    curves = {"loss": [(1, 4.0), (2, 3.0)], "count": [(2, 0.5)], "color": [(1, 0.1), (2, 0.9)]}
    before = copy.deepcopy(curves)
    draw_curves(curves, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert curves == before
