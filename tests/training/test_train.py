import copy
import io
from collections import deque
from dataclasses import replace

import torch

from training.batches import GroupMaker
from training.curves import draw_curves
from training.examples import Teacher
from training.losses import loss
from training.model import new_model
from training.network import Network
from training.train import Recipe, State, step_batch


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


def test_a_run_that_keeps_its_vision_learns_from_pictures_that_it_encodes_once(teacher: Teacher):
    text, vision = replace(teacher.config.text, n_layers=2), replace(teacher.config.vision, enc_n_layers=1)
    config = replace(teacher.config, text=text, vision=vision)
    group, recipe = GroupMaker(teacher, 5, 2, 2)(0), Recipe(num_steps=10, num_warmup_steps=2)
    kept, plain = (
        State(Network(new_model(config, 0)), replace(recipe, keeps_vision=keeps)) for keeps in (True, False)
    )
    seen = kept.look_at(group)
    assert seen.grids == []
    # On the third of two visits a picture comes with the examples of the first one again.
    batches = [step_batch(deque([state.look_at(group)] * 3), (0, 1, 2)) for state in (kept, plain)]
    third = len(group.visits[0].ids) * 2
    assert torch.equal(batches[0][2].ids[third:], group.visits[0].ids)
    torch.testing.assert_close(
        loss(kept.network.predict(batches[0][0], batches[0][2]), batches[0][2]),
        loss(plain.network(batches[1][0], batches[1][1], batches[1][2]), batches[1][2]),
    )
    before = copy.deepcopy(kept.network.model.state_dict())
    kept.learn(batches[0])
    changed = {
        name for name, value in kept.network.model.state_dict().items() if not torch.equal(value, before[name])
    }
    assert changed
    assert not any(name.startswith("vision.") for name in changed)
