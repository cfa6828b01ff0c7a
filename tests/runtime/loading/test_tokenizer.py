import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from kestrel_runtime.api.errors import CheckpointError
from kestrel_runtime.loading.tokenizer import Tokenizer
from kestrel_runtime.output.text_decoder import TextDecoder
from tests.reference_fixtures import MD2_SMALL, SMALL_FOLDERS, expected, shared_folders

FILE = MD2_SMALL / "tokenizer.json"
TOKENIZER = Tokenizer.from_file(FILE)
LIBRARY = tokenizers.Tokenizer.from_file(str(FILE))
CONTROL = sorted(id for id, token in LIBRARY.get_added_tokens_decoder().items() if token.special)
ID_OF_BYTE = {
    TOKENIZER.token_bytes(id)[0]: id for id in range(TOKENIZER.vocab_size) if len(TOKENIZER.token_bytes(id)) == 1
}

some_ids = st.lists(st.integers(0, TOKENIZER.vocab_size + 3), max_size=40)
# Bytes near the edges of UTF-8's rules: starts of each length, continuations, surrogates, overlong, too high.
some_bytes = st.lists(
    st.sampled_from(b"a\x7f\x80\x8f\x90\x9f\xa0\xbf\xc0\xc2\xdf\xe0\xe1\xed\xef\xf0\xf1\xf4\xf5\xff"), max_size=12
)


def stream(ids: list[int]) -> str:
    decoder = TextDecoder(TOKENIZER.token_bytes)
    return "".join([decoder.push(id) for id in ids]) + decoder.flush()


@pytest.mark.parametrize("folder", shared_folders(), ids=lambda folder: folder.name)
def test_query_prompt_holds_the_ids_of_the_reference(folder):
    tokenizer = Tokenizer.from_file(folder / "tokenizer.json")
    for case in expected(folder)["images"]:
        question = next(call["args"]["question"] for call in case["calls"] if call["skill"] == "query")
        ids, prompt = tokenizer.encode(question), case["query_prompt_tokens"]
        assert any(prompt[start : start + len(ids)] == ids for start in range(len(prompt)))


@given(st.text())
def test_any_text_comes_back_from_its_ids(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@given(st.text())
def test_text_is_encoded_as_the_library_does_where_it_spells_no_control_token(text):
    assert TOKENIZER.encode(text) == LIBRARY.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("folder", SMALL_FOLDERS, ids=lambda folder: folder.name)
def test_text_that_spells_a_control_token_stays_text(folder):
    tokenizer = Tokenizer.from_file(folder / "tokenizer.json")
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for token in library.get_added_tokens_decoder().values():
        text = f"before {token.content}{token.content} after"
        ids = tokenizer.encode(text)
        assert not set(ids) & set(CONTROL)
        assert tokenizer.decode(ids) == text


@given(some_ids)
def test_decoding_any_ids_equals_the_library(ids):
    assert TOKENIZER.decode(ids) == LIBRARY.decode(ids)


@given(some_bytes)
def test_decoding_any_bytes_equals_the_library(data):
    ids = [ID_OF_BYTE[byte] for byte in data]
    assert TOKENIZER.decode(ids) == LIBRARY.decode(ids)
    assert stream(ids) == LIBRARY.decode(ids)


@given(some_ids)
def test_pieces_of_a_stream_join_to_the_whole_text(ids):
    assert stream(ids) == TOKENIZER.decode(ids)


@given(st.text(), st.data())
def test_stream_of_whole_characters_never_shows_a_broken_one(text, data):
    pieces = []
    decoder = TextDecoder(TOKENIZER.token_bytes)
    for byte in text.encode():
        pieces.append(decoder.push(ID_OF_BYTE[byte]))
        pieces.append(decoder.push(data.draw(st.sampled_from(CONTROL))))
    assert "".join(pieces) == text
    assert decoder.flush() == ""
    assert all(text.startswith("".join(pieces[:count])) for count in range(len(pieces)))


def test_unfinished_character_shows_only_when_the_stream_ends():
    decoder = TextDecoder(TOKENIZER.token_bytes)
    assert [decoder.push(ID_OF_BYTE[byte]) for byte in b"a\xe2\x82"] == ["a", "", ""]
    assert decoder.flush() == "\ufffd"


def test_control_tokens_and_unknown_ids_decode_to_nothing():
    assert TOKENIZER.decode([*CONTROL, TOKENIZER.vocab_size, 10**9]) == ""


def test_vocabulary_counts_the_control_tokens():
    assert TOKENIZER.vocab_size == LIBRARY.get_vocab_size(with_added_tokens=True) == 640


def changed(tmp_path: Path, **changes: object) -> Path:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(FILE.read_text()) | changes))
    return path


def added(id: int, content: str) -> dict[str, object]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"id": id, "content": content, **flags}


@pytest.mark.parametrize("content", ["    ", "na\u00efve", "\u4f60\u597d", "\u0120the"])
def test_added_token_that_is_no_control_token_decodes_as_the_library_does(tmp_path, content):
    tokens = json.loads(FILE.read_text())["added_tokens"]
    path = changed(tmp_path, added_tokens=[*tokens, added(640, content)])
    ids = [640, 70, 640]
    assert Tokenizer.from_file(path).decode(ids) == tokenizers.Tokenizer.from_file(str(path)).decode(ids)


def test_settings_for_training_do_not_touch_a_prompt(tmp_path):
    path = changed(
        tmp_path,
        truncation={"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        padding={
            "strategy": {"Fixed": 64},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "<|endoftext|>",
        },
    )
    text = "What is in this image?"
    assert Tokenizer.from_file(path).encode(text) == TOKENIZER.encode(text)


@pytest.mark.parametrize(("decoder", "name"), [(None, "no decoder"), ({"type": "Fuse"}, "Fuse decoder")])
def test_tokenizer_that_does_not_spell_bytes_is_refused(tmp_path, decoder, name):
    with pytest.raises(CheckpointError, match=name):
        Tokenizer.from_file(changed(tmp_path, decoder=decoder))


@pytest.mark.parametrize("content", ["", "{}", "no json", '{"version": "9"}'])
def test_file_that_is_no_tokenizer_is_refused_by_name(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(CheckpointError, match=str(path)):
        Tokenizer.from_file(path)


def test_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError, match=r"absent\.json"):
        Tokenizer.from_file(tmp_path / "absent.json")


def test_an_id_beyond_all_vocabularies_is_refused(tmp_path):
    data = json.loads((MD2_SMALL / "tokenizer.json").read_text(encoding="utf-8"))
    data["model"]["vocab"]["far away"] = 4_000_000_000
    (tmp_path / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(CheckpointError, match="has a token of id 4000000000"):
        Tokenizer.from_file(tmp_path / "tokenizer.json")
