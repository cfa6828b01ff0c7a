import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from kestrel_runtime.api.config import BUILT_IN_MODEL
from kestrel_runtime.api.errors import CheckpointError
from kestrel_runtime.loading.checkpoint import Checkpoint, find_checkpoint
from tests.hub import Hub, Repository, save_shards
from tests.reference_fixtures import MD2_SMALL, MD3_SMALL, model_config

pytestmark = pytest.mark.usefixtures("warm_starts")

TOKENIZER = (MD2_SMALL / "tokenizer.json").read_bytes()
CONFIG = (MD2_SMALL / "config.json").read_bytes()
WEIGHTS = (MD2_SMALL / "model.safetensors").read_bytes()

# A process of its own, because huggingface_hub reads the environment when it is imported.
SCRIPT = """
import json, logging, sys
from kestrel_runtime.loading.checkpoint import find_checkpoint
from kestrel_runtime.api.errors import CheckpointError
logging.basicConfig(level=logging.INFO)
try:
    found = find_checkpoint(*sys.argv[1:])
except CheckpointError as error:
    print(json.dumps({"error": str(error)}))
else:
    print(json.dumps({
        "name": found.name, "revision": found.revision, "config": found.config,
        "weight_files": [str(file) for file in found.weight_files],
        "tokenizer_file": str(found.tokenizer_file),
    }))
"""


@dataclass(frozen=True)
class Found:
    """What a process with an environment of its own found, and what it said on the way."""

    checkpoint: Checkpoint | None
    error: str
    output: str


@dataclass(frozen=True)
class Machine:
    """A machine with its own cache."""

    home: Path

    def find(self, hub: Hub | None, *arguments: str, offline: bool = False) -> Found:
        endpoint = hub.endpoint if hub is not None else "http://127.0.0.1:9"  # where no server listens
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("HF_")},
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(self.home),
            "NO_PROXY": "127.0.0.1",
        }
        if offline:
            environment["HF_HUB_OFFLINE"] = "1"
        command = [sys.executable, "-c", SCRIPT, *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        if "error" in result:
            return Found(None, result["error"], done.stderr)
        checkpoint = Checkpoint(
            result["name"],
            result["revision"],
            tuple(Path(file) for file in result["weight_files"]),
            result["config"],
            Path(result["tokenizer_file"]),
        )
        return Found(checkpoint, "", done.stderr)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "home")


def repository(files: Mapping[str, bytes | None] | None = None, **options: Any) -> Repository:
    """A Moondream 2 with the files that the hub has besides; a file given as None is left out."""
    everything = {
        "README.md": b"# A model",
        "config.json": CONFIG,
        "tokenizer.json": TOKENIZER,
        "vocab.json": b"{}",
        "model.safetensors": WEIGHTS,
        **(files or {}),
    }
    return Repository({name: data for name, data in everything.items() if data is not None}, **options)


STARMIE = {"moondream/starmie-v1": Repository({"tokenizer.json": TOKENIZER, "README.md": b"# A tokenizer"})}


def copy_of(folder: Path, target: Path, *names: str) -> Path:
    target.mkdir(exist_ok=True)
    for name in names or ("config.json", "tokenizer.json", "model.safetensors"):
        (target / name).write_bytes((folder / name).read_bytes())
    return target


# Local folders and files


def test_a_folder_is_a_checkpoint():
    found = find_checkpoint(str(MD2_SMALL))
    assert found == Checkpoint(
        name="md2-small",
        revision=None,
        weight_files=(MD2_SMALL / "model.safetensors",),
        config=model_config(MD2_SMALL),
        tokenizer_file=MD2_SMALL / "tokenizer.json",
    )


def test_a_file_is_a_checkpoint_with_what_lies_beside_it(tmp_path):
    copy_of(MD3_SMALL, tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "tiny.safetensors")
    found = find_checkpoint(str(tmp_path / "tiny.safetensors"))
    assert found.name == "tiny"
    assert found.weight_files == (tmp_path / "tiny.safetensors",)
    assert found.tokenizer_file == tmp_path / "tokenizer.json"
    assert found.config == model_config(MD3_SMALL)


def test_a_file_of_the_usual_name_is_called_after_its_folder():
    assert find_checkpoint(str(MD2_SMALL / "model.safetensors")).name == "md2-small"


def test_the_built_in_model_is_found_by_its_name_and_has_no_revisions():
    found = find_checkpoint(BUILT_IN_MODEL)
    assert (found.name, found.revision) == ("moondream-nano", None)
    assert sum(file.stat().st_size for file in found.weight_files) <= 12 * 10**6
    with pytest.raises(CheckpointError):
        find_checkpoint(BUILT_IN_MODEL, "main")


def test_a_home_folder_is_understood(monkeypatch):
    monkeypatch.setenv("HOME", str(MD2_SMALL.parent))
    assert find_checkpoint("~/md2-small").weight_files == (MD2_SMALL / "model.safetensors",)


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["model.safetensors", "model_fp8.pt", "other.safetensors"], "model.safetensors"),
        (["model_fp8.safetensors", "model.pt"], "model_fp8.safetensors"),
        (["model_fp8.pt", "expected.safetensors", "notes.txt"], "model_fp8.pt"),
        (["tiny.safetensors"], "tiny.safetensors"),
        (["tiny.pt"], "tiny.pt"),
    ],
)
def test_the_weights_of_a_folder_are_chosen_by_name(names, chosen, tmp_path):
    copy_of(MD2_SMALL, tmp_path, "tokenizer.json")
    for name in names:
        (tmp_path / name).touch()
    found = find_checkpoint(str(tmp_path))
    assert found.weight_files == (tmp_path / chosen,)
    assert found.config is None


@pytest.mark.parametrize(
    "names",
    [
        ["a.safetensors", "b.safetensors"],
        ["model_a.pt", "model_b.pt"],
        ["model-1.safetensors", "model-2.safetensors"],
    ],
)
def test_an_ambiguous_folder_is_refused_and_its_files_are_named(names, tmp_path):
    copy_of(MD2_SMALL, tmp_path, "tokenizer.json")
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=f"holds {names[0]}, {names[1]} and no model.safetensors.index.json"):
        find_checkpoint(str(tmp_path))


def test_an_index_comes_before_all_else_and_names_the_shards(tmp_path):
    copy_of(MD2_SMALL, tmp_path)
    shards = save_shards(tmp_path, load_file(MD2_SMALL / "model.safetensors"), 3)
    (tmp_path / "model-extra.safetensors").touch()
    found = find_checkpoint(str(tmp_path))
    assert found.weight_files == tuple(shards)
    assert found.config == model_config(MD2_SMALL)


def test_a_missing_shard_is_named(tmp_path):
    copy_of(MD2_SMALL, tmp_path, "tokenizer.json")
    shards = save_shards(tmp_path, load_file(MD2_SMALL / "model.safetensors"), 3)
    shards[1].unlink()
    with pytest.raises(CheckpointError, match=r"lacks model-00002-of-00003\.safetensors"):
        find_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "cannot read"),
        ("[]", "is not a JSON object"),
        ("{}", "has no weight_map"),
        ('{"weight_map": {"a": "../../etc/x.safetensors"}}', "no .safetensors files next to it"),
        ('{"weight_map": {"a": "*.safetensors"}}', "no .safetensors files next to it"),
        ('{"weight_map": {"a": 3}}', "no .safetensors files next to it"),
    ],
)
def test_a_broken_index_is_refused(index, message, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=message):
        find_checkpoint(str(tmp_path))


@pytest.mark.parametrize("config", ["", "{", "[1]", "\xff"])
def test_a_broken_config_json_is_refused(config, tmp_path):
    copy_of(MD2_SMALL, tmp_path, "tokenizer.json", "model.safetensors")
    (tmp_path / "config.json").write_text(config, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        find_checkpoint(str(tmp_path))


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="holds no weights"):
        find_checkpoint(str(tmp_path))


def test_a_file_of_another_kind_is_refused():
    with pytest.raises(CheckpointError, match=r"neither a folder nor a \.safetensors or \.pt file"):
        find_checkpoint(str(MD2_SMALL / "config.json"))


@pytest.mark.parametrize("model", ["", "no-such-model", "/no/such/folder", "./no/such", "a/b/c", "org/"])
def test_what_is_neither_a_path_nor_a_hub_name_is_refused(model, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"(no file or folder|holds no weights)"):
        find_checkpoint(model)


def test_a_revision_of_a_local_path_is_refused():
    with pytest.raises(CheckpointError, match="a revision goes with a hub name only"):
        find_checkpoint(str(MD2_SMALL), "main")


# The hub


def test_a_published_name_is_downloaded_with_progress_at_its_pinned_revision(machine):
    published = repository(revisions=("main", "2025-06-21"))
    newer = repository({"README.md": b"# Newer"}, revisions=("main",))
    assert newer.commit != published.commit
    with Hub({"vikhyatk/moondream2": published}) as hub:
        found = machine.find(hub, "moondream2")
        assert found.checkpoint is not None, found.error
        assert sorted(hub.downloads) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert found.checkpoint.name == "moondream2"
    assert found.checkpoint.revision == published.commit
    assert f"vikhyatk/moondream2 at commit {published.commit}" in found.output
    assert "100%" in found.output
    assert found.checkpoint.config == model_config(MD2_SMALL)
    assert [file.read_bytes() for file in found.checkpoint.weight_files] == [WEIGHTS]


def test_the_pinned_revision_is_asked_for(machine):
    with Hub({"vikhyatk/moondream2": repository()}) as hub:
        found = machine.find(hub, "moondream2")
    assert found.error == "vikhyatk/moondream2 has no revision '2025-06-21'"


@pytest.mark.parametrize("model", ["moondream3-preview", "moondream3.1-9B-A2B"])
def test_the_other_published_names_take_the_newest_revision(model, machine):
    with Hub({f"moondream/{model}": repository()}) as hub:
        found = machine.find(hub, model)
    assert found.checkpoint is not None, found.error
    assert found.checkpoint.name == model


def test_any_repository_at_a_given_revision_is_served(machine):
    with Hub({"someone/moon.dream-1": repository(revisions=("main", "v2"))}) as hub:
        found = machine.find(hub, "someone/moon.dream-1", "v2")
        assert found.checkpoint is not None, found.error
        again = machine.find(hub, "someone/moon.dream-1", found.checkpoint.revision or "")
    assert again.checkpoint is not None, again.error
    assert again.checkpoint.revision == found.checkpoint.revision
    assert again.checkpoint.name == "someone/moon.dream-1"


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A repository's files with three shards, an index, and weights that the index does not name."""
    folder = tmp_path_factory.mktemp("sharded")
    save_shards(folder, load_file(MD2_SMALL / "model.safetensors"), 3)
    return {
        "config.json": CONFIG,
        "tokenizer.json": TOKENIZER,
        "model-other.safetensors": b"not needed",
        "model_fp8.pt": b"not needed",
        **{file.name: file.read_bytes() for file in folder.iterdir()},
    }


def test_only_the_shards_that_the_index_names_are_downloaded(machine, sharded):
    with Hub({"org/sharded": Repository(sharded)}) as hub:
        found = machine.find(hub, "org/sharded")
        assert found.checkpoint is not None, found.error
        weights = [name for name in hub.downloads if not name.endswith(".json")]
    shards = [f"model-0000{place}-of-00003.safetensors" for place in (1, 2, 3)]
    assert sorted(weights) == shards
    assert [file.name for file in found.checkpoint.weight_files] == shards
    assert [file.read_bytes() for file in found.checkpoint.weight_files] == [sharded[name] for name in shards]


def test_a_warm_cache_downloads_nothing_again_and_serves_offline(machine, sharded):
    with Hub({"org/sharded": Repository(sharded)}) as hub:
        first = machine.find(hub, "org/sharded")
        num_downloads = len(hub.downloads)
        again = machine.find(hub, "org/sharded")
        assert len(hub.downloads) == num_downloads
    assert first.checkpoint is not None, first.error
    offline = machine.find(None, "org/sharded", offline=True)
    unreachable = machine.find(None, "org/sharded")
    assert again.checkpoint == offline.checkpoint == unreachable.checkpoint == first.checkpoint


def test_a_single_file_in_a_warm_cache_serves_offline(machine):
    with Hub({"org/single": repository({"other.safetensors": b"not needed"})}) as hub:
        first = machine.find(hub, "org/single")
    assert first.checkpoint is not None, first.error
    assert machine.find(None, "org/single", offline=True).checkpoint == first.checkpoint
    assert machine.find(None, "org/single").checkpoint == first.checkpoint


def test_a_download_that_breaks_off_goes_on_at_once_or_is_refused_and_goes_on_next_time(machine):
    with Hub({"org/model": repository()}, broken_once={"model.safetensors"}) as hub:
        found = machine.find(hub, "org/model")
        if found.checkpoint is None:  # the library's older releases do not try again
            assert found.error.startswith("cannot download org/model from http://127.0.0.1")
            found = machine.find(hub, "org/model")
        assert hub.downloads.count("model.safetensors") == 2
    assert found.checkpoint is not None, found.error
    assert found.checkpoint.weight_files[0].read_bytes() == WEIGHTS


def test_offline_with_a_cold_cache_is_refused_clearly(machine):
    found = machine.find(None, "moondream2", offline=True)
    assert found.error.startswith("vikhyatk/moondream2 is not (or not wholly) in the cache")
    assert found.error.endswith("cannot be downloaded: HF_HUB_OFFLINE is set")


def test_a_hub_that_does_not_answer_is_told(machine):
    found = machine.find(None, "moondream2")
    assert found.error.endswith("cannot be downloaded: http://127.0.0.1:9 does not answer")


def test_offline_with_half_a_cache_is_refused_clearly(machine, sharded):
    with Hub({"org/sharded": Repository(sharded)}) as hub:
        found = machine.find(hub, "org/sharded")
    assert found.checkpoint is not None, found.error
    found.checkpoint.weight_files[2].unlink()
    refused = machine.find(None, "org/sharded", offline=True)
    # The library's newer releases know what is missing; for the older ones we look.
    assert re.search(r"is not \(or not wholly\) in the cache|lacks model-00003-of-00003", refused.error)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing/nothing"], "has no repository missing/nothing"),
        (["org/model", "v9"], "org/model has no revision 'v9'"),
        (["org/gated"], "org/gated is gated: accept its terms on"),
        (["org/empty"], "holds no weights"),
        (["org/several"], "holds a.safetensors, b.safetensors"),
    ],
)
def test_what_the_hub_does_not_give_is_told_in_one_line(arguments, message, machine):
    repositories = {
        "org/model": repository(),
        "org/gated": repository(gated=True),
        "org/empty": repository({"model.safetensors": None}),
        "org/several": repository({"model.safetensors": None, "a.safetensors": b"", "b.safetensors": b""}),
    }
    with Hub(repositories) as hub:
        found = machine.find(hub, *arguments)
        assert not [name for name in hub.downloads if name.endswith(".safetensors")]
    assert message in found.error
    assert "\n" not in found.error
    assert "Traceback" not in found.output


def test_a_repository_of_one_pt_file_is_served(machine):
    with Hub({"org/pt": repository({"model.safetensors": None, "model_fp8.pt": b"data"})}) as hub:
        found = machine.find(hub, "org/pt")
    assert found.checkpoint is not None, found.error
    assert [file.name for file in found.checkpoint.weight_files] == ["model_fp8.pt"]


# Tokenizers


def stale_tokenizer() -> bytes:
    """A tokenizer of the kind that lies beside the published Moondream 2 and is not its own."""
    data = json.loads(TOKENIZER)
    for token in data["added_tokens"]:
        if token["content"] == "<|endoftext|>":
            token["id"] = 50256
    return json.dumps(data).encode()


@pytest.mark.parametrize("tokenizer", [None, stale_tokenizer()], ids=["none", "stale"])
def test_the_published_tokenizer_stands_in_for_one_that_is_not_the_models(tokenizer, machine):
    with Hub({"org/model": repository({"tokenizer.json": tokenizer}), **STARMIE}) as hub:
        found = machine.find(hub, "org/model")
        assert hub.downloads.count("tokenizer.json") == (1 if tokenizer is None else 2)
        assert hub.downloads.count("README.md") == 0
    assert found.checkpoint is not None, found.error
    assert "models--moondream--starmie-v1" in str(found.checkpoint.tokenizer_file)
    assert found.checkpoint.tokenizer_file.read_bytes() == TOKENIZER
    assert machine.find(None, "org/model", offline=True).checkpoint == found.checkpoint


def test_a_local_folder_without_a_tokenizer_takes_the_published_one(machine, tmp_path):
    folder = copy_of(MD2_SMALL, tmp_path / "model", "config.json", "model.safetensors")
    with Hub(STARMIE) as hub:
        found = machine.find(hub, str(folder))
    assert found.checkpoint is not None, found.error
    assert found.checkpoint.revision is None
    assert found.checkpoint.tokenizer_file.read_bytes() == TOKENIZER


def test_no_tokenizer_anywhere_is_told(machine, tmp_path):
    folder = copy_of(MD2_SMALL, tmp_path / "model", "config.json", "model.safetensors")
    found = machine.find(None, str(folder), offline=True)
    assert found.error.startswith(f"{folder} has no tokenizer.json, and moondream/starmie-v1 is not")
    assert found.error.endswith("HF_HUB_OFFLINE is set")


HUB_CONFIG = json.dumps({"architectures": ["HfMoondream"], "config": {}}).encode()
FORMER_CODE = b"@dataclass(frozen=True)\nclass TokenizerConfig:\n    bos_id: int = 50256\n    eos_id: int = 50256\n"
CURRENT_CODE = FORMER_CODE.replace(b"50256", b"0")


@pytest.mark.parametrize("revision", ["2025-01-09", "2025-04-14"])
def test_a_release_with_the_former_tokenizer_is_refused_by_its_day(revision, machine):
    files = {"config.json": HUB_CONFIG, "tokenizer.json": stale_tokenizer()}
    published = repository(files, revisions=("main", revision))
    with Hub({"vikhyatk/moondream2": published, **STARMIE}) as hub:
        found = machine.find(hub, "vikhyatk/moondream2", revision)
    assert "Moondream 2 before 2025-06-19 has another tokenizer" in found.error
    assert "use vikhyatk/moondream2 at 2025-06-21" in found.error


def test_a_release_with_the_current_tokenizer_brings_the_former_one_and_is_served(machine):
    files = {"config.json": HUB_CONFIG, "tokenizer.json": stale_tokenizer()}
    published = repository(files, revisions=("main", "2025-06-21"))
    with Hub({"vikhyatk/moondream2": published, **STARMIE}) as hub:
        found = machine.find(hub, "moondream2")
    assert found.checkpoint is not None, found.error
    assert found.checkpoint.tokenizer_file.read_bytes() == TOKENIZER


@pytest.mark.parametrize(("code", "is_served"), [(FORMER_CODE, False), (CURRENT_CODE, True), (b"bos_id = 0", None)])
def test_the_publishers_code_says_which_tokenizer_the_weights_have(code, is_served, machine):
    files = {"config.json": HUB_CONFIG, "tokenizer.json": stale_tokenizer(), "config.py": code}
    with Hub({"someone/moondream": repository(files), **STARMIE}) as hub:
        found = machine.find(hub, "someone/moondream")
    if is_served:
        assert found.checkpoint is not None, found.error
        assert found.checkpoint.tokenizer_file.read_bytes() == TOKENIZER
    elif is_served is None:
        assert "nothing near it says which one the weights were trained with" in found.error
    else:
        assert "(config.py there says so): use vikhyatk/moondream2 at 2025-06-21" in found.error


@pytest.mark.parametrize(
    ("config", "tokenizer", "code", "message"),
    [
        (HUB_CONFIG, stale_tokenizer(), None, "put tokenizer.json of moondream/starmie-v1 there"),
        (None, stale_tokenizer(), None, "put tokenizer.json of moondream/starmie-v1 there"),
        (HUB_CONFIG, TOKENIZER, FORMER_CODE, "has another tokenizer and other prompts"),
        (b'{"tokenizer": {"eos_id": 50256}}', TOKENIZER, None, "at id 0, the model at 50256"),
        (b'{"tokenizer": {"eos_id": 50256}}', None, None, "has no tokenizer.json; that of moondream/starmie-v1"),
        (b'{"config": {"tokenizer": {"eos_id": 50256}}}', TOKENIZER, None, "at id 0, the model at 50256"),
    ],
)
def test_a_folder_never_gets_the_prompts_of_another_tokenizer(config, tokenizer, code, message, tmp_path):
    contents = {"config.json": config, "tokenizer.json": tokenizer, "config.py": code, "model.safetensors": b""}
    for name, content in contents.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        find_checkpoint(str(tmp_path))


# Files that are none


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def make_dangling_link(path: Path) -> None:
    path.symlink_to("/no/such/file")


def make_loop(path: Path) -> None:
    path.symlink_to(path.name)


def make_huge_file(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)  # sparse


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "model.safetensors.index.json", "model.safetensors"]
)
@pytest.mark.parametrize(
    "make", [make_pipe, make_device, make_socket, Path.mkdir, make_dangling_link, make_loop, make_huge_file]
)
def test_what_is_no_file_is_refused_and_not_waited_for(name, make, tmp_path):
    copy_of(MD2_SMALL, tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    make(tmp_path / name)
    if (name, make) == ("model.safetensors", make_huge_file):  # weights have any size, and are not read here
        find_checkpoint(str(tmp_path))
        return
    with pytest.raises(CheckpointError) as raised:
        find_checkpoint(str(tmp_path))
    assert name in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["pipe", "pipe.safetensors", "pipe.pt"])
def test_a_pipe_as_the_checkpoint_is_refused(name, tmp_path):
    copy_of(MD2_SMALL, tmp_path, "tokenizer.json")
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match=r"no regular file|neither a folder nor a"):
        find_checkpoint(str(tmp_path / name))


@pytest.mark.parametrize("model", ["a" * 5000, "a\0b", "~no-such-user/model", "/dev/null", "/proc/self/mem"])
def test_odd_names_of_models_are_refused_in_a_short_line(model):
    with pytest.raises(CheckpointError) as raised:
        find_checkpoint(model)
    assert len(str(raised.value)) < 500


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.gguf", "model.pth"])
def test_weights_of_a_format_that_is_not_read_are_named(name, tmp_path):
    (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)} is of a format that is not read"):
        find_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    "config", ['{"text": ' + "[" * 10_000 + "]" * 10_000 + "}", '{"text": ' + "9" * 10_000 + "}", '{"a": 1, "a"}']
)
def test_json_that_python_does_not_read_is_refused(config, tmp_path):
    copy_of(MD2_SMALL, tmp_path)
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(CheckpointError, match=r"cannot read .*config\.json"):
        find_checkpoint(str(tmp_path))


@pytest.mark.parametrize("number", ['"0"', "-1", "1e30", "true", "NaN", "[0]", "{}", "9" * 400, "16777217"])
def test_an_end_of_text_that_is_no_id_is_refused_before_a_download(number, tmp_path):
    copy_of(MD2_SMALL, tmp_path)
    (tmp_path / "config.json").write_text(f'{{"tokenizer": {{"eos_id": {number}}}}}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.eos_id is .*, and no id of a token"):
        find_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    "tokenizer",
    [
        "[]",
        '{"model": {"vocab": ["a"]}}',
        '{"model": {"vocab": {}}, "added_tokens": "abc"}',
        '{"model": {"vocab": {}}, "added_tokens": [{"content": "a"}]}',
        '{"model": {"vocab": {}}, "added_tokens": [{"content": [], "id": 1}]}',
        "[" * 10_000,
    ],
)
def test_json_that_is_no_tokenizer_is_refused(tokenizer, tmp_path):
    copy_of(MD2_SMALL, tmp_path)
    (tmp_path / "tokenizer.json").write_text(tokenizer)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        find_checkpoint(str(tmp_path))
