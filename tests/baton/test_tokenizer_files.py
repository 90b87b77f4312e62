"""The tokenizer built from GGUF metadata: round trips, digits, special tokens, refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from baton.errors import ConfigError
from baton.gguf_header import Value, read_gguf_header
from baton.model_files import load_model_files
from baton.model_store import known_model_path
from baton.tokenizer_files import tokenizer_from_gguf
from tests.tiny_models import make_tiny_gguf, make_tiny_model, tiny_tokenizer

PATH = Path("model.gguf")
TEXTS = ["Hello, world!", "  two  spaces\n\n\tand tabs", "año 1234567890", "👨‍👩‍👧 naïve “quotes”", "don't we'll", ""]


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Value]:
    folder = tmp_path_factory.mktemp("gguf")
    return dict(read_gguf_header(make_tiny_gguf(folder / "tiny.gguf", make_tiny_model(folder / "hf"))).metadata)


@pytest.fixture(scope="module")
def built(metadata: dict[str, Value]) -> Tokenizer:
    return tokenizer_from_gguf(metadata, PATH)


@settings(deadline=None)
@given(st.text(max_size=60) | st.sampled_from(TEXTS))
def test_it_encodes_as_the_tokenizer_it_was_made_from_and_back(built: Tokenizer, text: str) -> None:
    ids = built.encode(text).ids
    assert ids == tiny_tokenizer().encode(text).ids
    assert built.decode(ids, skip_special_tokens=False) == text


def test_a_control_token_is_one_id_wherever_it_stands(built: Tokenizer) -> None:
    ids = built.encode("a<|im_start|>b<|im_end|>").ids
    assert [i for i in ids if i < 3] == [1, 2]
    assert built.decode([1, 2]) == ""  # special: skipped in text
    assert built.decode([1, 2], skip_special_tokens=False) == "<|im_start|><|im_end|>"


def test_every_digit_is_a_token_of_its_own_only_where_the_model_says_so(metadata: dict[str, Value]) -> None:
    merges, tokens = metadata["tokenizer.ggml.merges"], metadata["tokenizer.ggml.tokens"]
    types = metadata["tokenizer.ggml.token_type"]
    assert isinstance(merges, list)
    assert isinstance(tokens, list)
    assert isinstance(types, list)
    with_pair: dict[str, Value] = {
        **metadata,
        "tokenizer.ggml.tokens": [*map(str, tokens), "12"],
        "tokenizer.ggml.token_type": [*map(int, types), 1],
        "tokenizer.ggml.merges": [*map(str, merges), "1 2"],
    }
    assert tokenizer_from_gguf(with_pair, PATH).encode("12").tokens == ["1", "2"]
    assert tokenizer_from_gguf(with_pair | {"tokenizer.ggml.pre": "gpt-2"}, PATH).encode("12").tokens == ["12"]


def test_bos_is_added_where_the_model_says_so(metadata: dict[str, Value]) -> None:
    tokenizer = tokenizer_from_gguf(metadata | {"tokenizer.ggml.add_bos_token": True}, PATH)
    assert tokenizer.encode("a").ids[0] == 1
    assert 1 not in tokenizer.encode("a", add_special_tokens=False).ids


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tokenizer.ggml.pre": "tekken"}, "'tekken' is not supported"),
        ({"tokenizer.ggml.model": "llama"}, "'llama'"),
        ({"tokenizer.ggml.merges": ["no such"]}, "merge"),
        ({"tokenizer.ggml.merges": ["nospace"]}, "merge"),
        ({"tokenizer.ggml.merges": []}, "merges is missing"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "do not fit"),
        ({"tokenizer.ggml.token_type": [1]}, "do not fit"),
    ],
)
def test_what_would_split_text_wrongly_is_refused(
    changed: dict[str, Value], message: str, metadata: dict[str, Value]
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        tokenizer_from_gguf(metadata | changed, PATH)
    assert str(PATH) in caught.value.message


def test_the_built_file_is_kept_and_used_again(tmp_path: Path) -> None:
    gguf = make_tiny_gguf(tmp_path / "tiny.gguf", make_tiny_model(tmp_path / "hf"))
    first = load_model_files(str(gguf))
    written = first.tokenizer_json.stat().st_mtime_ns
    assert load_model_files(str(gguf)) == first
    assert first.tokenizer_json.stat().st_mtime_ns == written


def test_the_demo_models_tokenizer_gives_known_ids() -> None:
    if not known_model_path("smollm2").is_file():
        pytest.skip("smollm2 is not here: run `baton model fetch smollm2`")
    tokenizer = Tokenizer.from_file(str(load_model_files("smollm2").tokenizer_json))
    encoded = tokenizer.encode("<|im_start|>user\nHello 1234<|im_end|>")
    assert encoded.ids == [1, 4093, 198, 19556, 216, 33, 34, 35, 36, 2]
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
