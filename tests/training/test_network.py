import random

import torch
from torch.nn.functional import scaled_dot_product_attention

from kestrel_runtime.models.moondream.model import Moondream
from kestrel_runtime.output.output_parser import Token
from training.batches import ROW_TOKENS, GroupMaker
from training.examples import Teacher
from training.export import stored_tensors, trainable_state
from training.losses import loss, right_answers
from training.model import new_model
from training.muon import Muon
from training.network import Network
from training.quantise import fake_quantised, quantised


def _random_model(teacher: Teacher) -> Moondream:
    model = new_model(teacher.config, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.05)
    return model


def test_a_batch_computes_what_the_runtime_computes_for_each_example(teacher: Teacher):
    group = GroupMaker(teacher, 0, 2, 1, jitter=False)(0)
    rows, model = group.visits[0], _random_model(teacher)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plain = Moondream.from_state(teacher.config, state, torch.device("cpu"), torch.float32)
    with torch.no_grad():
        prediction = Network(model)(group.crops, group.grids, rows)
    count = 1 + group.grids[0][0] * group.grids[0][1]
    image = plain.vision.project(plain.vision.encode(group.crops[:count]), *group.grids[0])
    for example in (1, 4, 7):
        own = (rows.example[0] == example).nonzero()[:, 0]
        tokens = [
            Token(id, {5: tuple(value[:1]), 6: tuple(value)}.get(id, ()))
            for id, value in zip(rows.ids[0, own].tolist(), rows.values[0, own].tolist(), strict=True)
        ]
        embedded, num_prefix = plain.embed(tokens), 0
        if rows.sees_image[0, own[0]]:
            embedded = torch.cat((plain.embed([Token(0)]), image, embedded))
            num_prefix = 1 + len(image)
        mask = torch.ones(len(embedded), len(embedded), dtype=torch.bool).tril()
        mask[:num_prefix, :num_prefix] = True

        def attend(
            layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor = mask
        ) -> torch.Tensor:
            heads = (part.transpose(0, 1)[None] for part in (query, key, value))
            return scaled_dot_product_attention(*heads, attn_mask=mask)[0].transpose(0, 1)

        hidden = plain.text(embedded, torch.arange(len(embedded)), attend)[num_prefix:]
        torch.testing.assert_close(prediction.logits[0, own], plain.text.logits(hidden), atol=1e-4, rtol=1e-4)


def test_a_step_lowers_the_loss_and_scores_count_every_example(teacher: Teacher):
    group = GroupMaker(teacher, 0, 1, 1)(0)
    rows, network = group.visits[0], Network(new_model(teacher.config, 0))
    matrices = [p for n, p in network.named_parameters() if "blocks." in n and n.endswith("weight") and p.ndim == 2]
    optimizer = Muon(matrices, 0.01, 0.0)
    first = loss(network(group.crops, group.grids, rows), rows)
    first.backward()
    optimizer.step()
    with torch.no_grad():
        prediction = network(group.crops, group.grids, rows)
    assert loss(prediction, rows) < first
    scores = right_answers(prediction, rows)
    assert sum(total for _, total in scores.values()) == int(rows.example.max())


def test_rows_spell_prompts_and_answers_that_the_runtime_reads(teacher: Teacher):
    row = GroupMaker(teacher, 3, 1, 1)(0).visits[0]
    assert row.ids.shape == (1, ROW_TOKENS)
    own = row.example[0] == 1
    ids, targets = row.ids[0][own].tolist(), row.target[0][own].tolist()
    answer = [target for target in targets if target >= 0]
    assert answer[-1] == teacher.config.tokenizer.eos_id
    given = targets.index(answer[0]) + 1
    assert ids[given:] == answer[:-1]
    assert ids[given - 1] in (teacher.config.tokenizer.answer_id, teacher.config.tokenizer.thinking_id)


def test_float8_keeps_weights_within_a_step_and_passes_gradients():
    weight = torch.randn(2, 8, 16, requires_grad=True)
    rounded = fake_quantised(weight)
    assert (rounded - weight).abs().max() < weight.abs().max() / 14
    rounded.sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.ones_like(weight))
    stored, scale = quantised(weight.detach())
    torch.testing.assert_close(stored.float() * scale[..., None], rounded.detach())


def test_what_is_exported_can_be_trained_on_and_exported_again(teacher: Teacher):
    first = stored_tensors(dict(new_model(teacher.config, 0).state_dict()))
    second = stored_tensors(trainable_state(first))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name].float(), second[name].float()) for name in first)


def test_the_same_seed_makes_the_same_group(teacher: Teacher):
    first, second = (GroupMaker(teacher, 11, 2, 2)(1) for _ in range(2))
    assert torch.equal(first.crops, second.crops)
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(first.visits, second.visits, strict=True))
    assert not torch.equal(first.visits[0].ids, first.visits[1].ids)


def test_examples_speak_of_the_scene_in_every_skill(teacher: Teacher):
    from training.scenes import make_scene

    examples = teacher.examples(make_scene(2), random.Random(0))
    skills = {next(examples).request.skill for _ in range(200)}
    assert skills == {"query", "caption", "point", "detect", "segment"}
