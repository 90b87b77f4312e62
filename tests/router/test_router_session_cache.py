"""What is kept of earlier prompts gives the ids and hashes of whole ones, for its own tenant, within its bound."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from baton.hashing import block_hashes, packed_ids, root_hash
from router import session_cache, text_cuts
from router.detokenizer import TokenTable
from router.piece_encoder import PieceEncoder
from router.session_cache import ByteBoundedLru, HashCache
from router.text_cuts import TextCuts
from router.tokenizer import INLINE_CHARS
from router.tokenizer import Tokenizer as RouterTokenizer
from tests.tiny_models import SPECIAL_TOKENS

LLAMA = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN = LLAMA.replace(r"\p{N}{1,3}", r"\p{N}")
ROOT = root_hash("f" * 32, "float32")

ODD = "ab cd  'sS.,\n\r\t<|>\u00a0\u3000\u00b2\u0301é日\U0001f468\u200d0129_-"
# Everything a splitting rule or an added token might trip over: runs of spaces, line ends, marks, digits, cut names.
TEXTS = st.text(
    alphabet=st.one_of(
        st.sampled_from(ODD),
        st.characters(codec="utf-8"),
    ),
    max_size=200,
)
PARTS = st.lists(
    TEXTS
    | st.sampled_from(
        ["<|im_start|>", "<|im_end|>\n", "<|im_", "b<|im_start|>", " <|sep|> ", "<|w|>", "end ab", "   x"]
    ),
    max_size=8,
).map("".join)


@functools.cache
def merging_tokenizer() -> str:
    """A byte-level BPE that merges over every edge it is not kept from: a cut in a wrong place changes its tokens.

    It learns from whole lines of the characters that TEXTS draws, so that merges lie over spaces, marks and line ends.
    """
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    draw = random.Random(0)
    lines = ["".join(draw.choices(ODD + "   ab", k=40)) for _ in range(600)]
    trainer = trainers.BpeTrainer(
        vocab_size=4_000,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(lines, trainer)
    return str(made.to_str())


def byte_level(name: str) -> Tokenizer:
    """That vocabulary under the splitting rule of a family of models."""
    made = Tokenizer.from_str(merging_tokenizer())
    digits = pre_tokenizers.Digits(individual_digits=True)
    made.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    regex = {"llama": LLAMA, "qwen": QWEN}.get(name)
    if regex is not None:
        split = pre_tokenizers.Split(Regex(regex), "isolated")
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    if name == "qwen":
        made.normalizer = normalizers.NFC()
    if name == "bos":
        made.post_processor = processors.TemplateProcessing(
            single=["<|im_start|>", "$A"], special_tokens=[("<|im_start|>", 1)]
        )
    if name == "odd":  # each of its added tokens swallows or looks at what stands around it
        made.add_special_tokens(
            [
                AddedToken("<|sep|>", lstrip=True, rstrip=True),
                AddedToken("<|w|>", single_word=True),
                AddedToken("end", rstrip=True),
            ]
        )
    if name == "overlap":  # a name that may begin before another and reach over it
        made.add_special_tokens([AddedToken("b<|im", normalized=False)])
    if name == "unknown":
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(r"\w+ \w+"), "isolated"), made.pre_tokenizer]
        )
    return made


KINDS = ("smollm", "llama", "qwen", "bos", "odd", "overlap", "unknown")


@pytest.fixture(autouse=True)
def _short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut wherever a text may be cut at all."""
    monkeypatch.setattr(text_cuts, "PIECE_CHARS", 1)


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_encoded_apart_have_the_ids_of_the_whole(kind: str) -> None:
    whole = byte_level(kind)
    encoder, cuts = PieceEncoder(whole.to_str()), TextCuts(json.loads(whole.to_str()))

    @settings(max_examples=80, deadline=None)
    @given(PARTS)
    def check(text: str) -> None:
        assert list(encoder.begin(text, b"").finish()) == whole.encode(text, add_special_tokens=False).ids
        assert "".join(cuts.pieces(text)) == text

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_that_grows_turn_by_turn_has_the_ids_of_the_whole_at_every_turn(kind: str) -> None:
    whole = byte_level(kind)
    encoder = PieceEncoder(whole.to_str())

    @settings(max_examples=30, deadline=None)
    @given(st.lists(PARTS, min_size=2, max_size=5), st.integers(0, 30))
    def check(turns: list[str], edit: int) -> None:
        text = ""
        for turn in turns:
            text = text[: max(0, len(text) - edit)] + turn
            assert list(encoder.begin(text, b"").finish()) == whole.encode(text, add_special_tokens=False).ids

    check()


def test_known_splitting_rules_are_cut_between_words_and_unknown_ones_before_added_tokens_only() -> None:
    def pieces(kind: str) -> list[str]:
        return list(TextCuts(json.loads(byte_level(kind).to_str())).pieces("<|im_start|>one two<|im_end|>. 3 four"))

    for kind in ("smollm", "llama", "qwen"):
        assert pieces(kind) == ["<|im_start|>one", " two", "<|im_end|>. 3 four"]
    assert pieces("unknown") == ["<|im_start|>one two", "<|im_end|>. 3 four"]


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}},
        {"pre_tokenizer": {"type": "Metaspace", "prepend_scheme": "first"}},
        {"model": {"type": "BPE", "dropout": 0.1}},
    ],
)
def test_a_tokenizer_of_another_kind_gets_no_cuts_between_words(change: Mapping[str, object]) -> None:
    data = json.loads(byte_level("smollm").to_str()) | {"added_tokens": []}
    assert list(TextCuts(data).pieces("one two three")) == ["one", " two", " three"]
    assert list(TextCuts({**data, **change}).pieces("one two three")) == ["one two three"]


async def test_plain_prompts_keep_the_special_tokens_that_the_model_wants_around_them() -> None:
    whole = byte_level("bos")
    made = RouterTokenizer(whole.to_str(), TokenTable.from_tokenizer_json(whole.to_str(), 4_096), None)
    for text in ("hello there you", "<|im_start|>x", "a b " * INLINE_CHARS):
        assert list(await made.encode(text, field="prompt", max_tokens=10_000)) == whole.encode(text).ids
    made.close()


def test_a_turn_that_adds_little_has_little_left_to_encode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_cuts, "PIECE_CHARS", 1_024)
    encoder = PieceEncoder(byte_level("smollm").to_str())
    text = "a router takes each prompt to a worker that reads it once " * 400
    assert encoder.begin(text, b"").num_chars_left == len(text)
    encoder.begin(text, b"").finish()
    assert encoder.begin(text, b"").num_chars_left == 0
    assert encoder.begin(text + "and more", b"").num_chars_left < 1_024 + 100


def test_what_one_tenant_had_encoded_is_unknown_to_another() -> None:
    encoder = PieceEncoder(byte_level("smollm").to_str())
    encoder.begin("one two", b"tenant a").finish()
    assert encoder.begin("one two", b"tenant a").num_chars_left == 0
    assert encoder.begin("one two", b"tenant b").num_chars_left == len("one two")


def test_truncation_that_a_tokenizer_json_asks_for_cuts_no_prompt() -> None:
    made = byte_level("smollm")
    made.enable_truncation(4)
    assert len(PieceEncoder(made.to_str()).begin("0 1 2 3 4 5 6 7", b"").finish()) == 15


# -- hashes ------------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 400), st.lists(st.integers(0, 3), max_size=300)), min_size=1, max_size=6),
    st.sampled_from([1, 3, 16]),
)
def test_continued_hashes_are_those_of_the_whole_prompt(turns: list[tuple[int, list[int]]], block_size: int) -> None:
    cache, ids = HashCache(), list[int]()
    for keep, added in turns:
        ids = ids[:keep] + added
        begun = cache.begin(ROOT, packed_ids(ids), block_size)
        assert begun.finish() == block_hashes(ROOT, ids, block_size)
        assert (
            0
            <= cache.begin(ROOT, packed_ids(ids), block_size).num_tokens_left
            < (session_cache.RUN_BLOCKS + 1) * block_size
        )


def test_prompts_that_share_a_beginning_share_its_hashes_but_not_across_roots() -> None:
    cache, common = HashCache(), list(range(10_000))
    cache.begin(ROOT, packed_ids([*common, 1]), 16).finish()
    other = root_hash("f" * 32, "float32", b"another tenant")
    assert cache.begin(ROOT, packed_ids([*common, 2]), 16).num_tokens_left < 64 * 16 + 16
    assert cache.begin(other, packed_ids([*common, 1]), 16).num_tokens_left == 10_001
    assert cache.begin(other, packed_ids([*common, 1]), 16).finish() == block_hashes(other, [*common, 1], 16)


def test_ids_are_hashed_as_four_bytes_each_lowest_first() -> None:
    assert packed_ids([1, 0x01020304]) == bytes([1, 0, 0, 0, 4, 3, 2, 1])


# -- the bound ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 3_000))))
def test_the_bound_holds_and_what_was_used_last_stays(puts: list[tuple[int, int]]) -> None:
    kept: ByteBoundedLru[int, int] = ByteBoundedLru(4_000)
    for key, num_bytes in puts:
        kept.put(key, num_bytes, num_bytes)
        assert kept.get(key) == num_bytes
        assert 0 < kept.num_bytes <= 4_000


def test_the_entry_not_used_for_longest_goes_and_one_that_is_too_large_is_not_kept() -> None:
    entry = session_cache.ENTRY_BYTES + 100
    kept: ByteBoundedLru[str, str] = ByteBoundedLru(2 * entry)
    kept.put("a", "A", 100)
    kept.put("b", "B", 100)
    assert kept.get("a") == "A"
    kept.put("c", "C", 100)
    kept.put("d", "D", 2 * entry)
    assert [kept.get(key) for key in "abcd"] == ["A", None, "C", None]
