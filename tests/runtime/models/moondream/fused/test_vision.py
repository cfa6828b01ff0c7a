import dataclasses

import pytest
import torch

from kestrel_ops import Kernels
from kestrel_ops.attention.reference import crop_attention
from kestrel_ops.linear.reference import scaled_linear, scaled_linear_add, scaled_linear_gelu
from kestrel_ops.norms.reference import add_layer_norm, concat_gelu
from kestrel_runtime.models.moondream.fused.vision import FusedVision
from kestrel_runtime.models.moondream.vision.encoder import VisionModel
from tests.runtime.models.moondream.tiny import randomised, tiny_config
from tests.runtime.models.moondream.vision.test_encoder import some_crops

TINY = tiny_config().vision
# Dimensions that float8 products take.
ALIGNED = dataclasses.replace(TINY, enc_dim=32, enc_n_heads=2, enc_ff_dim=48, proj_inner_dim=64, proj_out_dim=16)


def unused(*arguments):
    raise AssertionError("the vision side has no use for this operation")


KERNELS = dataclasses.replace(
    Kernels(*[unused] * len(dataclasses.fields(Kernels))),
    add_layer_norm=add_layer_norm,
    concat_gelu=concat_gelu,
    crop_attention=crop_attention,
    scaled_linear=scaled_linear,
    scaled_linear_add=scaled_linear_add,
    scaled_linear_gelu=scaled_linear_gelu,
)
CROPPINGS = [(1, 1), (1, 2), (2, 1), (2, 4), (3, 4), (4, 3), (12, 1), (1, 12)]


def some_model(config=TINY, seed=0):
    model = randomised(VisionModel(config), seed)
    for module in model.modules():  # so that normalised rows keep their size, as they do in trained models
        if isinstance(module, torch.nn.LayerNorm):
            module.weight.add_(1)
    return model


def relative_error(got, wanted):
    return ((got.float() - wanted.float()).norm() / wanted.float().norm()).item()


# Encoder


@pytest.mark.parametrize("config", [TINY, ALIGNED, tiny_config(3).vision, tiny_config(crop_size=98).vision])
def test_features_are_those_of_the_plain_encoder(config):
    model, crops = some_model(config), some_crops(3, config)
    features = FusedVision(model, KERNELS, "model").encode(crops)
    torch.testing.assert_close(features, model.encode(crops), rtol=1e-4, atol=1e-4)


def test_an_encoder_without_blocks_embeds_its_patches():
    config = dataclasses.replace(TINY, enc_n_layers=0)
    model, crops = some_model(config), some_crops(2, config)
    features = FusedVision(model, KERNELS, "model").encode(crops)
    torch.testing.assert_close(features, model.encode(crops), rtol=1e-4, atol=1e-4)


def test_the_stream_can_be_read_after_each_block():
    model, crops = some_model(), some_crops(2)
    wanted = model.patch_emb(model._patches(crops)) + model.pos_emb
    states = list(FusedVision(model, KERNELS, "model").states(crops))
    assert len(states) == len(model.blocks)
    for block, state in zip(model.blocks, states, strict=True):
        wanted = block(wanted)
        torch.testing.assert_close(state, wanted.flatten(0, 1), rtol=1e-4, atol=1e-4)


def test_an_even_picture_keeps_its_colour_in_a_short_type():
    # In a short type what is left of large terms that cancel is noise: bytes must be centred before the product.
    model = some_model().bfloat16()
    crops = torch.full((1, TINY.crop_size, TINY.crop_size, 3), 128, dtype=torch.uint8)
    got = FusedVision(model, KERNELS, "model").encode(crops)
    assert relative_error(got, some_model().encode(crops)) < 0.03


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_short_type_is_kept_and_no_less_exact(dtype):
    exact, crops = some_model(ALIGNED), some_crops(4, ALIGNED)
    short = some_model(ALIGNED).to(dtype)
    wanted = exact.encode(crops)
    features = FusedVision(short, KERNELS, "model").encode(crops)
    assert features.dtype == dtype
    assert relative_error(features, wanted) < 1.3 * relative_error(short.encode(crops), wanted)


def test_with_invariant_kernels_a_crop_has_the_same_bits_alone_and_among_others():
    exact, crops = some_model(ALIGNED), some_crops(4, ALIGNED)
    short = some_model(ALIGNED).bfloat16()
    vision = FusedVision(short, Kernels.select("cpu", {}).invariant(), "model")
    together = vision.encode(crops)
    assert torch.equal(vision.encode(crops[2:3]), together[2:3])
    assert relative_error(together, exact.encode(crops)) < 1.3 * relative_error(
        short.encode(crops), exact.encode(crops)
    )


def test_float8_features_are_within_a_few_percent():
    model, crops = some_model(ALIGNED), some_crops(4, ALIGNED)
    error = relative_error(FusedVision(model, KERNELS, "float8").encode(crops), model.encode(crops))
    assert 1e-3 < error < 0.08  # not zero, or nothing was quantised


def test_dimensions_that_float8_products_refuse_stay_in_the_models_type():
    model, crops = some_model(TINY), some_crops(2)
    features = FusedVision(model, KERNELS, "float8").encode(crops)
    torch.testing.assert_close(features, model.encode(crops), rtol=1e-4, atol=1e-4)


def test_crops_handed_in_stay_as_they_are():
    crops = some_crops(2)
    before = crops.clone()
    FusedVision(some_model(), KERNELS, "model").encode(crops)
    assert torch.equal(crops, before)


# Projection


def some_features(grids, config=TINY, dtype=torch.float32):
    torch.manual_seed(3)
    return [
        torch.randn(1 + rows * columns, config.num_image_tokens, config.enc_dim).to(dtype)
        for rows, columns in grids
    ]


@pytest.mark.parametrize(
    "config",
    [
        TINY,
        tiny_config(crop_size=98).vision,
        dataclasses.replace(TINY, crop_size=378, overlap_margin=4),
        dataclasses.replace(TINY, crop_size=70, overlap_margin=0),
    ],
)
def test_each_of_several_images_is_projected_as_alone(config):
    model, features = some_model(config), some_features(CROPPINGS, config)
    together = FusedVision(model, KERNELS, "model").project_all(features, CROPPINGS)
    assert together.shape == (len(CROPPINGS), config.num_image_tokens, config.proj_out_dim)
    for place, (rows, columns) in enumerate(CROPPINGS):
        wanted = model.project(features[place], rows, columns)
        torch.testing.assert_close(together[place], wanted, rtol=1e-4, atol=1e-4)


def test_a_grid_met_again_is_projected_the_same():
    model, features = some_model(), some_features([(2, 3), (1, 1), (2, 3)])
    fused = FusedVision(model, KERNELS, "model")
    first = fused.project_all(features[:1], [(2, 3)])
    again = fused.project_all([*features[1:], features[0]], [(1, 1), (2, 3), (2, 3)])
    torch.testing.assert_close(again[2], first[0])


def test_pooling_in_a_short_type_sums_in_float32():
    model = some_model(ALIGNED)
    features = some_features([(3, 4), (2, 2)], ALIGNED, torch.bfloat16)
    short = some_model(ALIGNED).bfloat16()
    embeddings = FusedVision(short, KERNELS, "model").project_all(features, [(3, 4), (2, 2)])
    assert embeddings.dtype == torch.bfloat16
    for place, (rows, columns) in enumerate([(3, 4), (2, 2)]):
        wanted = model.project(features[place].float(), rows, columns)
        assert relative_error(embeddings[place], wanted) < 1.3 * relative_error(
            short.project(features[place], rows, columns), wanted
        )


def test_float8_embeddings_are_within_a_few_percent():
    model, features = some_model(ALIGNED), some_features([(2, 4), (1, 1)], ALIGNED)
    embeddings = FusedVision(model, KERNELS, "float8").project_all(features, [(2, 4), (1, 1)])
    wanted = torch.stack([model.project(features[0], 2, 4), model.project(features[1], 1, 1)])
    assert 1e-3 < relative_error(embeddings, wanted) < 0.08


# The kernels it is made of


def test_only_the_chosen_kernels_compute():
    # An operation that doubles what it should give must show.
    def doubled(rows, *rest):
        out, scale = KERNELS.concat_gelu(rows, *rest)
        return 2 * out, scale

    model, crops = some_model(), some_crops(1)
    plain = FusedVision(model, KERNELS, "model").encode(crops)
    changed = FusedVision(model, dataclasses.replace(KERNELS, concat_gelu=doubled), "model").encode(crops)
    assert relative_error(changed, plain) > 0.01
