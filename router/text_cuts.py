"""Where a text may be cut so that the tokens of its pieces, joined, are the tokens of the whole. Pure.

A tokenizer works in stages: it finds added tokens, splits what lies between them into words, and merges bytes within each
word. Whoever cuts where every stage would cut anyway changes nothing. Two such places can be told from a few characters:
    mark   before an added token's name that no other name can begin earlier and reach over. Each added token ends the text
           before it, whatever the tokenizer does with ordinary text.
    word   before a space that stands between two letters, for tokenizers whose splitting rule is one of those below. Read
           them: after anything but whitespace no alternative goes on with a space, so every word that comes to such a space
           ends there; none looks back, so the next word begins as if the text did.
A rule that is not known here gets no word cuts, and a tokenizer that says anything odd about an added token gets no cuts
before it: then pieces are longer, never wrong. tests/router/test_session_cache.py compares with whole encodings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

PIECE_CHARS = 1_024  # the least length of a piece but the last: encoding one takes 0.4 ms, docs/api.md
_NO_CUTS = re.compile(r"(?!)")
_BETWEEN_WORDS = r"(?<=[^\W\d_]) (?=[^\W\d_])"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD_RULES = frozenset(  # of Llama 3 and of Qwen 2 and 3, as their tokenizer.json write them
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + _REST for digits in (r"\p{N}{1,3}", r"\p{N}")
)


class TextCuts:
    """The places of one tokenizer."""

    def __init__(self, tokenizer: Mapping[str, object]) -> None:
        """`tokenizer`: a parsed tokenizer.json."""
        added = tokenizer.get("added_tokens") or []
        assert isinstance(added, Sequence)
        places = [re.escape(name) for name in _marks(added)]
        if _splits_at_words(tokenizer) and not any(_may_hold_a_word_cut(token) for token in added):
            places.append(_BETWEEN_WORDS)
        self._place = re.compile("|".join(places)) if places else _NO_CUTS

    def pieces(self, text: str) -> Iterator[str]:
        """`text` in pieces of at least PIECE_CHARS, except the last. Text that is appended changes only the last one."""
        start = 0
        while place := self._place.search(text, start + PIECE_CHARS):
            yield text[start : place.start()]
            start = place.start()
        yield text[start:]


def _marks(added: Sequence[Mapping[str, object]]) -> list[str]:
    """Names that begin with punctuation which no name has further in, and no name of which looks at its neighbours."""
    names = [str(token["content"]) for token in added]
    unsuitable = {character for name in names for character in name[1:]}
    unsuitable |= {str(token["content"])[:1] for token in added if _is_odd(token) or token["normalized"]}
    return [name for name in names if name[:1] not in unsuitable and not re.match(r"\w|\s|$", name)]


def _is_odd(token: Mapping[str, object]) -> bool:
    """It takes in white space around it, or depends on what stands there."""
    return bool(token["lstrip"] or token["rstrip"] or token["single_word"])


def _may_hold_a_word_cut(token: Mapping[str, object]) -> bool:
    return _is_odd(token) or re.search(_BETWEEN_WORDS, str(token["content"])) is not None


def _splits_at_words(tokenizer: Mapping[str, object]) -> bool:
    model, normalizer = tokenizer.get("model"), tokenizer.get("normalizer")
    drops_merges = isinstance(model, dict) and bool(model.get("dropout"))
    # NFC joins a character with marks that follow it: never over a space.
    plain = normalizer is None or (isinstance(normalizer, dict) and normalizer.get("type") == "NFC")
    return plain and not drops_merges and _cuts_words(tokenizer.get("pre_tokenizer"))


def _cuts_words(splitter: object) -> bool:
    """One stage of a sequence that cuts there is enough where the others only cut further, or nowhere."""
    if not isinstance(splitter, dict):
        return False
    match splitter.get("type"):
        case "Sequence":
            stages = splitter.get("pretokenizers", [])
            return any(map(_cuts_words, stages)) and all(_cuts_words(stage) or _is_local(stage) for stage in stages)
        case "ByteLevel":
            return bool(splitter.get("use_regex", True)) and not splitter.get("add_prefix_space")
        case "Split":
            pattern = splitter.get("pattern", {}).get("Regex")
            return pattern in _WORD_RULES and splitter.get("behavior") == "Isolated" and not splitter.get("invert")
    return False


def _is_local(stage: object) -> bool:
    """It looks at single characters, and keeps a space between letters with its neighbours or apart, wherever it stands."""
    if not isinstance(stage, dict):
        return False
    return stage.get("type") == "Digits" or (
        stage.get("type") == "ByteLevel" and not stage.get("use_regex", True) and not stage.get("add_prefix_space")
    )
