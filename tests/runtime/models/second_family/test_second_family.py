"""A model family that the engine does not know is served by the same loop, found by its package's entry point."""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.nn.functional import scaled_dot_product_attention

from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.errors import InvalidRequest, SkillUnsupported
from kestrel_runtime.api.events import QueryOutput
from kestrel_runtime.api.requests import Caption, Query, SamplingParams
from kestrel_runtime.engine.engine import LocalEngine
from kestrel_runtime.loading.tokenizer import Tokenizer
from kestrel_runtime.output.text_decoder import TextDecoder
from tests.reference_fixtures import MD2_SMALL
from tests.runtime.models.second_family.checkpoint import HEADS, NANO_TOKENIZER, write_checkpoint

MODULE = Path(__file__).with_name("small_text.py")
NUM_TOKENS = 30
QUESTIONS = ["hello", "why?", "a longer question than the others are", "again " * 12]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small_text")
    write_checkpoint(folder)
    return folder


@pytest.fixture
def engine(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalEngine]:
    shutil.copy(MODULE, tmp_path / "their_small_text.py")
    info = tmp_path / "their_small_text-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-small-text\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kestrel_runtime.models]\nsmall-text = their_small_text:FAMILY\n")
    monkeypatch.syspath_prepend(tmp_path)
    engine = LocalEngine.start(
        EngineConfig(model=str(checkpoint), device="cpu", max_batch_size=3, num_kv_pages=14, max_prefill_tokens=16)
    )
    yield engine
    engine.close()


def written_out(checkpoint: Path, question: str) -> str:
    """The greedy answer without cache, pages or batches."""
    from safetensors.torch import load_file

    weights, tokenizer = load_file(checkpoint / "model.safetensors"), Tokenizer.from_file(NANO_TOKENIZER)
    ids = [0, *tokenizer.encode(question)]
    count = len(ids)
    for _ in range(NUM_TOKENS):
        rows = weights["embedding"][ids] + weights["position"][: len(ids)]
        query, key, value = (rows @ weights["qkv"].T).unflatten(-1, (3, HEADS, -1)).permute(1, 2, 0, 3)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True).transpose(0, 1).flatten(1)
        ids.append(int(((rows + attended)[-1] @ weights["head"].T).argmax()))
    decoder = TextDecoder(tokenizer.token_bytes)
    return "".join(decoder.push(id) for id in ids[count:]) + decoder.flush()


async def test_it_answers_many_at_once_as_it_would_alone_without_a_cache(engine: LocalEngine, checkpoint: Path):
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    streams = [engine.submit(Query(question, sampling=sampling)) for question in QUESTIONS]
    answers = [(await stream.result()).output for stream in streams]
    assert answers == [QueryOutput(written_out(checkpoint, question), None) for question in QUESTIONS]
    assert engine.load().num_used_pages == 0


async def test_a_seed_repeats_an_answer_in_any_company(engine: LocalEngine):
    sampled = Query("hello", sampling=SamplingParams(temperature=1.0, max_tokens=NUM_TOKENS, seed=4))
    alone = (await engine.submit(sampled).result()).output
    crowd = [engine.submit(Query(question)) for question in QUESTIONS]
    assert (await engine.submit(sampled).result()).output == alone
    await asyncio.gather(*(stream.result() for stream in crowd))


async def test_what_it_cannot_do_is_refused(engine: LocalEngine):
    assert (engine.info.architecture, list(engine.info.skills)) == ("small-text", ["query"])
    image = (MD2_SMALL / "image_1_100x80.png").read_bytes()
    with pytest.raises(InvalidRequest, match="reads text alone"):
        await engine.submit(Query("what?", image)).result()
    with pytest.raises(SkillUnsupported):
        await engine.submit(Caption(image)).result()
