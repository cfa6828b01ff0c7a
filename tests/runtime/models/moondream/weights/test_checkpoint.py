import logging
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from kestrel_runtime.api.config import BUILT_IN_MODEL
from kestrel_runtime.api.errors import CheckpointError
from kestrel_runtime.loading.checkpoint import Checkpoint, find_checkpoint
from kestrel_runtime.models.moondream.config import MoondreamConfig
from kestrel_runtime.models.moondream.family import FAMILY
from kestrel_runtime.models.moondream.model import Moondream
from kestrel_runtime.models.moondream.skills import SKILLS
from kestrel_runtime.models.moondream.weights.checkpoint import (
    check_tensors,
    expected_tensors,
    load_moondream_state,
    read_tensors,
)
from kestrel_runtime.models.moondream.weights.published import infer_config
from tests.hub import save_shards
from tests.reference_fixtures import MD2_SMALL, MD3_SMALL, SMALL_FOLDERS, model_config, shared_folders
from tests.runtime.models.moondream.full_size import FULL_SIZES, published_config
from tests.runtime.models.moondream.layouts import compiled, hub_layout, joined_tau, training_layout

FOLDERS = [pytest.param(folder, id=folder.name) for folder in SMALL_FOLDERS]


def canonical(folder):
    return read_tensors([folder / "model.safetensors"])


def checkpoint_of(folder, tensors, tmp_path):
    """A checkpoint with the folder's configuration and other weights."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    return replace(find_checkpoint(str(folder)), weight_files=(tmp_path / "model.safetensors",))


def assert_same(tensors, others):
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == others[name].dtype, name
        assert tensor.shape == others[name].shape, name
        assert torch.equal(tensor.view(torch.uint8), others[name].contiguous().view(torch.uint8)), name


def save_safetensors(tensors, folder):
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return [folder / "model.safetensors"]


def save_pt(tensors, folder):
    torch.save(tensors, folder / "model.pt")
    return [folder / "model.pt"]


def save_parameters(tensors, folder):
    torch.save(
        {name: torch.nn.Parameter(tensor, requires_grad=False) for name, tensor in tensors.items()},
        folder / "model.pt",
    )
    return [folder / "model.pt"]


def save_three_shards(tensors, folder):
    return save_shards(folder, tensors, 3)


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("layout", [hub_layout, training_layout])
@pytest.mark.parametrize("spelling", [dict, compiled])
@pytest.mark.parametrize("save", [save_safetensors, save_three_shards, save_pt, save_parameters])
def test_every_layout_and_file_format_gives_the_same_tensors(folder, layout, spelling, save, tmp_path):
    tensors = canonical(folder)
    assert_same(tensors, read_tensors(save(spelling(layout(tensors)), tmp_path)))


def test_the_reference_files_hold_both_layouts():
    with (
        safe_open(MD2_SMALL / "model.safetensors", "pt") as md2,
        safe_open(MD3_SMALL / "model.safetensors", "pt") as md3,
    ):
        assert set(md2.keys()) == set(hub_layout(canonical(MD2_SMALL)))
        assert set(md3.keys()) == set(training_layout(canonical(MD3_SMALL)))


def test_region_features_are_transposed_from_the_training_layout():
    stored = load_file(MD3_SMALL / "model.safetensors")
    tensors = canonical(MD3_SMALL)
    assert torch.equal(tensors["region.size_features"], stored["region_model.size_features.weight"].T)
    assert tensors["region.size_features"].is_contiguous()


def test_joined_tau_weights_are_split(tmp_path):
    tensors = canonical(MD3_SMALL)
    joined = joined_tau(training_layout(tensors))
    assert any(name.endswith("tau_wqwv") for name in joined)
    assert_same(tensors, read_tensors(save_safetensors(joined, tmp_path)))


def test_scales_of_a_quantised_cache_are_ignored_with_a_line_in_the_log(tmp_path, caplog):
    tensors = canonical(MD3_SMALL)
    scales = {
        f"text_model.transformer.h.{n}.kv_quantizer.{k}_scale": torch.ones(()) for n in range(4) for k in "kv"
    }
    with caplog.at_level(logging.INFO):
        assert_same(tensors, read_tensors(save_safetensors(training_layout(tensors) | scales, tmp_path)))
    assert "ignoring 8 scales" in caplog.text


@pytest.mark.parametrize("folder", [pytest.param(folder, id=folder.name) for folder in shared_folders()])
def test_every_reference_checkpoint_loads(folder):
    config, tensors = load_moondream_state(find_checkpoint(str(folder)))
    assert config == MoondreamConfig.from_dict(model_config(folder))
    assert not any(tensor.is_meta for tensor in tensors.values())


def test_the_built_in_model_is_a_moondream_3_with_every_skill():
    config, _ = load_moondream_state(find_checkpoint(BUILT_IN_MODEL))
    assert config.generation == 3
    assert FAMILY.skills(config).keys() == SKILLS.keys()


def test_the_shards_that_an_index_names_are_loaded(tmp_path):
    save_three_shards(load_file(MD2_SMALL / "model.safetensors"), tmp_path)
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((MD2_SMALL / name).read_bytes())
    config, loaded = load_moondream_state(find_checkpoint(str(tmp_path)))
    assert config == MoondreamConfig.from_dict(model_config(MD2_SMALL))
    assert len(loaded) == 392
    assert_same(canonical(MD2_SMALL), loaded)


def test_fp8_experts_keep_their_bytes_and_scales():
    _, tensors = load_moondream_state(find_checkpoint(str(MD3_SMALL)))
    assert tensors["text.blocks.1.mlp.fc1.weight"].dtype is torch.float8_e4m3fn
    assert tensors["text.blocks.1.mlp.fc1.scale"].dtype is torch.float32
    assert tensors["text.blocks.1.mlp.fc1.scale"].shape == tensors["text.blocks.1.mlp.fc1.weight"].shape[:2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_experts_in_plain_types_need_no_scales(dtype, tmp_path):
    tensors = {n: t.to(dtype) for n, t in canonical(MD3_SMALL).items() if not n.endswith(".scale")}
    _, loaded = load_moondream_state(checkpoint_of(MD3_SMALL, hub_layout(tensors), tmp_path))
    assert_same(tensors, loaded)


def test_axes_of_length_one_are_put_right(tmp_path):
    tensors = canonical(MD3_SMALL)
    odd = dict(tensors)
    odd["text.blocks.0.attn.tau.alpha"] = tensors["text.blocks.0.attn.tau.alpha"][:, None]
    odd["text.blocks.1.mlp.fc1.scale"] = tensors["text.blocks.1.mlp.fc1.scale"][..., None]
    odd["vision.pos_emb"] = tensors["vision.pos_emb"][0]
    _, loaded = load_moondream_state(checkpoint_of(MD3_SMALL, hub_layout(odd), tmp_path))
    assert_same(tensors, loaded)


def test_one_error_names_every_missing_extra_and_misshapen_tensor(tmp_path):
    tensors = canonical(MD2_SMALL)
    del tensors["text.blocks.2.ln.bias"], tensors["vision.post_ln.weight"]
    tensors["text.blocks.9.ln.bias"] = torch.zeros(3)
    tensors["region.coord_encoder.weight"] = torch.zeros(64, 31)
    tensors["text.lm_head.bias"] = torch.zeros(640, dtype=torch.int32)
    with pytest.raises(CheckpointError) as raised:
        load_moondream_state(checkpoint_of(MD2_SMALL, hub_layout(tensors), tmp_path))
    text = str(raised.value)
    assert text.startswith("tensors that do not fit the model (5): ")
    assert "missing text.blocks.2.ln.bias [64]" in text
    assert "missing vision.post_ln.weight [16]" in text
    assert "unexpected text.blocks.9.ln.bias" in text
    assert "region.coord_encoder.weight has shape [64, 31] instead of [64, 32]" in text
    assert "text.lm_head.bias is int32 instead of float32 or bfloat16 or float16" in text


def test_a_long_list_of_problems_is_cut_and_counted():
    expected = {f"text.blocks.{n}.ln.bias": (4,) for n in range(50)}
    with pytest.raises(CheckpointError) as raised:
        check_tensors({}, expected)
    assert str(raised.value).count("missing") == 20
    assert str(raised.value).endswith("; and 30 more")


@pytest.mark.parametrize("lost", ["fc1.scale", "fc2.scale"])
def test_fp8_experts_without_a_scale_are_refused(lost, tmp_path):
    tensors = canonical(MD3_SMALL)
    del tensors[f"text.blocks.2.mlp.{lost}"]
    with pytest.raises(CheckpointError, match=rf"do not fit the model \(1\): missing text\.blocks\.2\.mlp\.{lost}"):
        load_moondream_state(checkpoint_of(MD3_SMALL, hub_layout(tensors), tmp_path))


def test_one_layer_of_plain_experts_among_fp8_ones_is_refused(tmp_path):
    tensors = canonical(MD3_SMALL)
    tensors["text.blocks.3.mlp.fc2.weight"] = tensors["text.blocks.3.mlp.fc2.weight"].float()
    with pytest.raises(CheckpointError, match=r"blocks\.3\.mlp\.fc2\.weight is float32 instead of float8_e4m3fn"):
        load_moondream_state(checkpoint_of(MD3_SMALL, hub_layout(tensors), tmp_path))


def test_fp8_elsewhere_than_in_experts_is_refused(tmp_path):
    tensors = canonical(MD2_SMALL)
    tensors["text.wte"] = tensors["text.wte"].to(torch.float8_e4m3fn)
    with pytest.raises(CheckpointError, match=r"text\.wte is float8_e4m3fn instead of float32"):
        load_moondream_state(checkpoint_of(MD2_SMALL, hub_layout(tensors), tmp_path))


def test_a_name_the_training_layout_does_not_know_is_named_as_it_stands(tmp_path):
    tensors = training_layout(canonical(MD3_SMALL)) | {"text_model.transformer.h.0.mixer.lora": torch.zeros(1)}
    with pytest.raises(CheckpointError, match=r"unexpected text_model\.transformer\.h\.0\.mixer\.lora"):
        load_moondream_state(checkpoint_of(MD3_SMALL, tensors, tmp_path))


def test_two_spellings_of_one_tensor_are_refused(tmp_path):
    tensors = training_layout(canonical(MD3_SMALL))
    both = joined_tau(tensors) | tensors
    with pytest.raises(CheckpointError, match=r"two tensors for .*attn\.tau\.wq"):
        read_tensors(save_safetensors(both, tmp_path))


def test_a_tensor_in_two_files_is_refused(tmp_path):
    tensors = hub_layout(canonical(MD2_SMALL))
    [file] = save_safetensors(tensors, tmp_path)
    save_file({"model.text.wte": tensors["model.text.wte"]}, tmp_path / "more.safetensors")
    with pytest.raises(CheckpointError, match=r"more\.safetensors: a second tensor model\.text\.wte"):
        read_tensors([file, tmp_path / "more.safetensors"])


def test_another_models_tensors_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"no Moondream: .* but bert\.embeddings"):
        read_tensors(save_safetensors({"bert.embeddings": torch.zeros(2)}, tmp_path))


@pytest.mark.parametrize("content", [b"", b"not a checkpoint at all", b"\x80\x04K\x01."])
@pytest.mark.parametrize("name", ["model.safetensors", "model.pt"])
def test_a_broken_file_is_one_clear_error(content, name, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"cannot read .*{name}"):
        read_tensors([tmp_path / name])


def test_a_truncated_file_is_one_clear_error(tmp_path):
    data = (MD2_SMALL / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match="cannot read"):
        read_tensors([tmp_path / "model.safetensors"])


def test_a_pt_file_that_would_run_code_is_refused(tmp_path):
    torch.save({"model.text.wte": print}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"cannot read .*model\.pt"):
        read_tensors([tmp_path / "model.pt"])


def test_a_pt_file_of_something_else_is_refused(tmp_path):
    torch.save({"step": 3, "state": {}}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="not a flat mapping of names to tensors"):
        read_tensors([tmp_path / "model.pt"])


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("folder", FOLDERS)
def test_dimensions_come_from_config_json_at_the_top_or_nested(folder, nested):
    data = model_config(folder)
    config = {"model_type": "moondream1", "config": data} if nested else data
    loaded, _ = load_moondream_state(replace(find_checkpoint(str(folder)), config=config))
    assert loaded == MoondreamConfig.from_dict(data)


@pytest.mark.parametrize("config", [None, {}, {"model_type": "moondream1", "config": {}}])
def test_dimensions_follow_from_the_tensors_where_config_json_has_none(config, tmp_path):
    # Two heads of the published sizes, few of everything else: small enough to write.
    given = published_config("small")
    tensors = {name: torch.zeros(shape) for name, shape in expected_tensors(given, fp8_experts=False).items()}
    save_safetensors(hub_layout(tensors), tmp_path)
    checkpoint = Checkpoint("x", None, (tmp_path / "model.safetensors",), config, tmp_path / "tokenizer.json")
    loaded, _ = load_moondream_state(checkpoint)
    assert loaded == given


def test_what_config_json_gives_wins_over_what_the_tensors_tell():
    data = model_config(MD2_SMALL)
    partial = {"text": {"max_context": 1024}, "vision": data["vision"], "tokenizer": data["tokenizer"]}
    config, _ = load_moondream_state(replace(find_checkpoint(str(MD2_SMALL)), config={"config": partial}))
    full = MoondreamConfig.from_dict(data)
    assert config == replace(full, text=replace(full.text, max_context=1024))


def test_a_contradictory_config_json_is_a_checkpoint_error():
    data = model_config(MD2_SMALL)
    data["text"]["prefix_attn"] = 100
    with pytest.raises(CheckpointError, match=r"md2-small: .*prefix_attn is not 1 \+ 729"):
        load_moondream_state(replace(find_checkpoint(str(MD2_SMALL)), config=data))


def test_a_config_json_of_another_size_is_told_by_the_tensors():
    data = model_config(MD2_SMALL)
    data["text"]["n_layers"] = 3
    with pytest.raises(CheckpointError, match=r"\(10\): unexpected text\.blocks\.3"):
        load_moondream_state(replace(find_checkpoint(str(MD2_SMALL)), config=data))


@pytest.mark.parametrize("size", FULL_SIZES, ids=lambda size: size.name)
def test_full_size_models_have_the_published_numbers_of_tensors_and_parameters(size):
    shapes = expected_tensors(published_config(size.name), fp8_experts=False)
    assert len(shapes) == size.num_tensors
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == size.num_parameters


@pytest.mark.parametrize("fp8_experts", [False, True])
@pytest.mark.parametrize("size", FULL_SIZES, ids=lambda size: size.name)
def test_the_model_has_the_tensors_that_a_checkpoint_must_have(size, fp8_experts):
    config = published_config(size.name)
    with torch.device("meta"):
        model = Moondream(config, expert_format="float8" if fp8_experts else "model")
    state = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert state == expected_tensors(config, fp8_experts=fp8_experts)


def test_inference_is_told_about_the_missing_tensor():
    with pytest.raises(CheckpointError, match=r"there is no tensor 'text\.wte'"):
        infer_config({})


# Checkpoints as scripts of training write them


def bare(tensors):
    return dict(tensors)


def wrapped(prefix):
    return lambda tensors: {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


def with_buffers(prefix):
    """The state of the publisher's own model, whose buffers of the cache are among its names."""

    def write(tensors):
        cache = {f"text.blocks.{n}.kv_cache.{k}_cache": torch.zeros(1, 2, 3, 5) for n in range(4) for k in "kv"}
        other = {"attn_mask": torch.ones(1, 1, 3, 3, dtype=torch.bool), "text.freqs_cis": torch.zeros(3, 2)}
        return {f"{prefix}{name}": tensor for name, tensor in {**tensors, **cache, **other}.items()}

    return write


def wrapped_blocks(tensors):
    return {
        "_fsdp_wrapped_module.model." + name.replace(".blocks.1.", ".blocks.1._fsdp_wrapped_module."): tensor
        for name, tensor in tensors.items()
    }


VALID = {
    "finetune_text.py": bare,
    "finetune_text.py, with the cache": with_buffers(""),
    "the hub's model, with the cache": with_buffers("model."),
    "DistributedDataParallel": wrapped("module.model."),
    "DistributedDataParallel of a compiled model": wrapped("module._orig_mod."),
    "a compiled model": wrapped("_orig_mod.model."),
    "a module that holds the hub's model": wrapped("model.model."),
    "FSDP": wrapped_blocks,
    "DDP of the training layout": lambda tensors: wrapped("module.")(training_layout(tensors)),
}


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("written", VALID.values(), ids=VALID.keys())
def test_a_checkpoint_of_a_training_has_the_tensors_of_its_model(folder, written, tmp_path):
    tensors = canonical(folder)
    assert_same(tensors, read_tensors(save_safetensors(written(tensors), tmp_path)))
    config, loaded = load_moondream_state(checkpoint_of(folder, written(tensors), tmp_path))
    assert config == MoondreamConfig.from_dict(model_config(folder))
    assert_same(tensors, loaded)


@pytest.mark.parametrize("key", ["state_dict", "model_state_dict", "model", "module"])
def test_the_state_within_what_a_trainer_saves_is_found(key, tmp_path):
    tensors = canonical(MD2_SMALL)
    optimizer = {"state": {0: {"exp_avg": torch.zeros(3)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    torch.save({key: tensors, "optimizer": optimizer, "epoch": 3, "loss": 0.5}, tmp_path / "model.pt")
    assert_same(tensors, read_tensors([tmp_path / "model.pt"]))


def test_a_pt_file_of_the_former_format_is_read(tmp_path):
    tensors = canonical(MD2_SMALL)
    torch.save(tensors, tmp_path / "model.pt", _use_new_zipfile_serialization=False)
    assert_same(tensors, read_tensors([tmp_path / "model.pt"]))


@pytest.mark.parametrize("saved", [torch.nn.Linear(2, 2), [torch.zeros(2)], torch.zeros(2), 3, {"a": {"b": 1}}])
def test_a_pt_file_that_is_no_state_says_how_to_save_one(saved, tmp_path):
    torch.save(saved, tmp_path / "model.pt")
    with pytest.raises(CheckpointError) as raised:
        read_tensors([tmp_path / "model.pt"])
    assert str(raised.value).endswith("; save the weights alone, as torch.save(model.state_dict(), ...) does")
    assert str(raised.value).isprintable()


def quantised(suffix):
    return lambda tensors: {
        f"{name}{suffix}" if name.endswith("qkv.weight") else name: tensor for name, tensor in tensors.items()
    }


def in_int8(tensors):
    return {n: tensor.to(torch.int8) if n.endswith("qkv.weight") else tensor for n, tensor in tensors.items()}


def without_region(tensors):
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("region.")}


def with_adapter(tensors):
    return {**tensors, "text.blocks.0.attn.qkv.lora_A.default.weight": torch.zeros(2, 2)}


def of_2024(tensors):
    return {"text_model.model.layers.0.self_attn.q_proj.weight": torch.zeros(2)}


REFUSED = {
    "4 bits": (quantised(".packed"), "quantised weights (text.blocks.0.attn.qkv.weight.packed) are not read"),
    "GPTQ": (quantised(".qweight"), "such as --model moondream2"),
    "bitsandbytes": (quantised(".quant_state.bitsandbytes__nf4"), "such as --model moondream2"),
    "compressed-tensors": (quantised("_packed"), "such as --model moondream2"),
    "int8": (in_int8, "quantised weights (text.blocks.0.attn.qkv.weight) are not read"),
    "before 2025": (without_region, "has no region model, as releases of Moondream from before 2025"),
    "of 2024": (of_2024, "if it is a Moondream from before 2025, use the release of 2025-06-21"),
    "an adapter that is not merged": (with_adapter, "merge it into its model and save that"),
}


@pytest.mark.parametrize("config", [{}, {"architectures": ["HfMoondream"], "config": {}}, None])
@pytest.mark.parametrize(("written", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_not_served_names_the_way_out(written, message, config, tmp_path):
    checkpoint = checkpoint_of(MD2_SMALL, written(canonical(MD2_SMALL)), tmp_path)
    config = model_config(MD2_SMALL) if config is None else config
    with pytest.raises(CheckpointError) as raised:
        load_moondream_state(replace(checkpoint, config=config))
    assert message in str(raised.value)
    assert len(str(raised.value)) < 300


def test_ids_of_the_former_tokenizer_are_refused_and_not_mixed_with_current_prompts():
    former = {"bos_id": 50256, "eos_id": 50256, "templates": {"query": {"prefix": [198], "suffix": [198]}}}
    checkpoint = replace(find_checkpoint(str(MD2_SMALL)), config={"config": {"tokenizer": former}})
    with pytest.raises(CheckpointError, match="has the ids of the tokenizer of releases before 2025-06-19"):
        load_moondream_state(checkpoint)


@pytest.mark.parametrize(
    "odd",
    [
        {"text.blocks.99999999999.ln.weight": torch.zeros(2)},
        {"text.wte": torch.zeros(2)},
        {"text.wte": torch.zeros(0, 0)},
        {"vision.pos_emb": torch.zeros(())},
        {"region.coord_decoder.fc1.weight": torch.zeros(())},
    ],
    ids=lambda odd: next(iter(odd)),
)
def test_tensors_that_no_model_has_are_refused_where_dimensions_follow_from_them(odd, tmp_path):
    checkpoint = checkpoint_of(MD2_SMALL, {**canonical(MD2_SMALL), **odd}, tmp_path)
    with pytest.raises(CheckpointError, match="cannot infer the model's dimensions"):
        load_moondream_state(replace(checkpoint, config={}))


@pytest.mark.parametrize(
    "config", [{"text": [1]}, {"vision": "x"}, {"tokenizer": 7}, {"config": "x"}, {"config": []}]
)
def test_what_is_no_section_of_config_json_is_refused(config):
    with pytest.raises(CheckpointError, match=r"config\.json: "):
        load_moondream_state(replace(find_checkpoint(str(MD2_SMALL)), config=config))
