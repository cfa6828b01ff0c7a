import dataclasses
import math

import numpy as np
import pytest
import torch
from torch.nn.functional import gelu, layer_norm

from kestrel_runtime.models.moondream.vision.cropping import MoondreamCropping
from kestrel_runtime.models.moondream.vision.encoder import VisionModel
from tests.runtime.models.moondream.tiny import randomised, tiny_config
from tests.runtime.noise import noise

TINY = tiny_config().vision
GRIDS = [(rows, columns) for rows in range(1, 13) for columns in range(1, 13) if rows * columns <= 12]


def some_crops(count, config=TINY, seed=0):
    shape = (count, config.crop_size, config.crop_size, config.in_channels)
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


# Patches


def test_a_patch_is_a_vector_of_channel_row_column_with_pixels_from_minus_one_to_one():
    config = dataclasses.replace(TINY, crop_size=6, enc_patch_size=2, enc_dim=12, enc_n_layers=0)
    model = randomised(VisionModel(config))
    model.patch_emb.weight.copy_(torch.eye(12))
    model.patch_emb.bias.zero_()
    model.pos_emb.zero_()
    model.register_module("post_ln", torch.nn.Identity())
    crops = some_crops(2, config)
    features = model.encode(crops)
    assert features.shape == (2, 9, 12)
    for crop in range(2):
        for patch in range(9):
            top, left = 2 * (patch // 3), 2 * (patch % 3)
            wanted = [
                crops[crop, top + row, left + column, channel].item() / 127.5 - 1
                for channel in range(3)
                for row in range(2)
                for column in range(2)
            ]
            assert features[crop, patch].tolist() == pytest.approx(wanted, abs=1e-6)


# Encoder


def written_out(model, crops):
    """The encoder from its parameters, crop by crop, in float64."""
    weights = {name: tensor.double() for name, tensor in model.state_dict().items()}
    size, side = TINY.enc_patch_size, TINY.grid_size

    def linear(rows, name):
        return rows @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(rows, name):
        return layer_norm(rows, rows.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-5)

    def attention(rows, name):
        width = TINY.enc_dim // TINY.enc_n_heads
        query, key, value = linear(rows, f"{name}.qkv").chunk(3, dim=1)
        heads = []
        for head in range(TINY.enc_n_heads):
            own = slice(head * width, (head + 1) * width)
            scores = query[:, own] @ key[:, own].T / math.sqrt(width)
            heads.append(scores.softmax(dim=1) @ value[:, own])
        return linear(torch.cat(heads, dim=1), f"{name}.proj")

    features = []
    for crop in crops:
        pixels = crop.double() / 127.5 - 1
        patches = [
            pixels[size * (patch // side) :, size * (patch % side) :][:size, :size].permute(2, 0, 1).flatten()
            for patch in range(side * side)
        ]
        rows = linear(torch.stack(patches), "patch_emb") + weights["pos_emb"][0]
        for layer in range(TINY.enc_n_layers):
            name = f"blocks.{layer}"
            rows = rows + attention(norm(rows, f"{name}.ln1"), f"{name}.attn")
            inner = gelu(linear(norm(rows, f"{name}.ln2"), f"{name}.mlp.fc1"), approximate="tanh")
            rows = rows + linear(inner, f"{name}.mlp.fc2")
        features.append(norm(rows, "post_ln"))
    return torch.stack(features).float()


def test_the_encoder_is_its_blocks_written_out():
    model = randomised(VisionModel(TINY))
    crops = some_crops(3)
    torch.testing.assert_close(model.encode(crops), written_out(model, crops), rtol=1e-4, atol=1e-4)


def test_a_crop_is_encoded_the_same_in_any_company():
    model = randomised(VisionModel(TINY))
    crops = some_crops(5)
    together = model.encode(crops)
    for place in range(5):
        torch.testing.assert_close(model.encode(crops[place : place + 1])[0], together[place], rtol=1e-4, atol=1e-5)


# Stitching and pooling


def bare_model(config):
    """Its projection hands on what it gets: the global crop's features beside the pooled ones."""
    model = VisionModel(config)
    model.register_module("proj_mlp", torch.nn.Identity())
    return model


def stitched(features, rows, columns, config):
    """The grid of all local crops, patch by patch: each from the crop whose middle or rim it is."""
    side, margin = config.grid_size, config.overlap_margin
    inner = side - 2 * margin
    grid = torch.empty(rows * inner + 2 * margin, columns * inner + 2 * margin, config.enc_dim)
    for y in range(grid.shape[0]):
        for x in range(grid.shape[1]):
            row = min(max((y - margin) // inner, 0), rows - 1)
            column = min(max((x - margin) // inner, 0), columns - 1)
            patch = (y - row * inner) * side + x - column * inner
            grid[y, x] = features[1 + row * columns + column, patch]
    return grid


def pooled(grid, side):
    """The mean over window i from floor(i * n / side) to ceil((i + 1) * n / side), both ways."""
    height, width = grid.shape[:2]
    rows = []
    for y in range(side):
        for x in range(side):
            top, bottom = y * height // side, -(-(y + 1) * height // side)
            left, right = x * width // side, -(-(x + 1) * width // side)
            rows.append(grid[top:bottom, left:right].mean(dim=(0, 1)))
    return torch.stack(rows)


@pytest.mark.parametrize(("rows", "columns"), GRIDS, ids=str)
def test_every_patch_of_the_whole_comes_from_the_right_crop(rows, columns):
    config = dataclasses.replace(TINY, enc_dim=2)
    torch.manual_seed(rows * 13 + columns)
    features = torch.randn(1 + rows * columns, config.num_image_tokens, 2)
    projected = bare_model(config).project(features, rows, columns)
    torch.testing.assert_close(projected[:, :2], features[0])
    wanted = pooled(stitched(features, rows, columns, config), config.grid_size)
    torch.testing.assert_close(projected[:, 2:], wanted)


@pytest.mark.parametrize(("crop_size", "margin"), [(56, 1), (196, 2), (196, 4), (378, 4), (70, 0)])
def test_a_grid_of_any_size_and_margin_is_stitched(crop_size, margin):
    config = dataclasses.replace(TINY, crop_size=crop_size, overlap_margin=margin, enc_dim=1)
    features = torch.arange(7.0 * config.num_image_tokens).view(7, -1, 1)
    projected = bare_model(config).project(features, 2, 3)
    torch.testing.assert_close(projected[:, 1:], pooled(stitched(features, 2, 3, config), config.grid_size))


def test_a_single_local_crop_is_taken_as_it_is():
    features = torch.randn(2, TINY.num_image_tokens, TINY.enc_dim)
    projected = bare_model(TINY).project(features, 1, 1)
    assert torch.equal(projected, torch.cat((features[0], features[1]), dim=1))


def test_the_projection_reads_global_features_before_local_ones():
    model = randomised(VisionModel(TINY))
    features = torch.randn(2, TINY.num_image_tokens, TINY.enc_dim)
    wanted = model.proj_mlp(torch.cat((features[0], features[1]), dim=1))
    torch.testing.assert_close(model.project(features, 1, 1), wanted)
    assert model.project(features, 1, 1).shape == (TINY.num_image_tokens, TINY.proj_out_dim)


def test_pooling_is_exact_in_a_short_type():
    config = dataclasses.replace(TINY, enc_dim=1)
    features = (256 + torch.arange(13.0)).view(13, 1, 1).expand(13, config.num_image_tokens, 1).bfloat16()
    projected = bare_model(config).project(features, 3, 4)
    assert projected.dtype == torch.bfloat16
    wanted = pooled(stitched(features.float(), 3, 4, config), config.grid_size).bfloat16()
    assert torch.equal(projected[:, 1:], wanted)


# From pixels to embeddings


@pytest.mark.parametrize("crop_size", [56, 98, 196])
@pytest.mark.parametrize("size", [(40, 40), (500, 300), (150, 900)], ids=str)
def test_an_image_of_any_size_becomes_one_embedding_per_patch_of_a_crop(crop_size, size):
    config = dataclasses.replace(tiny_config(crop_size=crop_size).vision, enc_n_layers=1)
    crops = MoondreamCropping(config).make_crops(noise(*size))
    model = randomised(VisionModel(config))
    features = model.encode(torch.from_numpy(crops.pixels))
    embeddings = model.project(features, crops.rows, crops.columns)
    assert embeddings.shape == ((crop_size // 14) ** 2, config.proj_out_dim)
    assert embeddings.isfinite().all()
