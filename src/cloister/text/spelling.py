"""The parts of a tokenizer.json that depend on the vocabulary: byte encoding, pre-tokenization, added and special tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from cloister.types.errors import ModelError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Spelling(Protocol):
    """Turns the text of a vocabulary entry into the bytes that it stands for.

    Attributes:
        num_leading_spaces: how many spaces at the very start of a text the tokenizer put there itself.
    """

    @property
    def num_leading_spaces(self) -> int: ...

    def to_bytes(self, token: str) -> bytes: ...

    def added_bytes(self, token: str) -> bytes:
        """Returns the bytes of an added token, which is spelled as it is written, save for SentencePiece's spaces."""
        ...


class ByteLevelSpelling:
    """GPT-2's alphabet: every byte is one printable character (Radford et al. 2019, section 2.2)."""

    num_leading_spaces = 0

    def __init__(self) -> None:
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in printable]
        self._bytes = {chr(byte): byte for byte in printable}
        self._bytes |= {chr(0x100 + place): byte for place, byte in enumerate(others)}

    @property
    def alphabet(self) -> Mapping[str, int]:
        """The characters that stand for bytes, and those bytes."""
        return self._bytes

    def to_bytes(self, token: str) -> bytes:
        try:
            return bytes([self._bytes[char] for char in token])
        except KeyError:
            return token.encode()

    def added_bytes(self, token: str) -> bytes:
        return token.encode()


@dataclass(frozen=True, slots=True)
class SentencePieceSpelling:
    """Text with replacements, and byte tokens for what the vocabulary has no letters for (Kudo and Richardson 2018).

    Attributes:
        replacements: (written in the vocabulary, meant), such as ("▁", " ").
        byte_fallback: `<0x0A>` is a byte.
    """

    replacements: tuple[tuple[str, str], ...]
    byte_fallback: bool
    num_leading_spaces: int

    def to_bytes(self, token: str) -> bytes:
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return self.added_bytes(token)

    def added_bytes(self, token: str) -> bytes:
        for written, meant in self.replacements:
            token = token.replace(written, meant)
        return token.encode()


@dataclass(frozen=True, slots=True)
class WordPieceSpelling:
    """Words in pieces (Schuster and Nakajima 2012; BERT): what does not begin a word begins with `prefix`.

    Spaces are not in the vocabulary: each word gets one before it. What the normalizer took away stays away.
    """

    prefix: str
    num_leading_spaces: int = 1

    def to_bytes(self, token: str) -> bytes:
        if token.startswith(self.prefix):
            return token[len(self.prefix) :].encode()
        return b" " + token.encode()

    def added_bytes(self, token: str) -> bytes:
        return b" " + token.encode()


def read_spelling(decoder: Mapping[str, Any] | None) -> Spelling:
    """Reads the `decoder` of tokenizer.json.

    Raises:
        ModelError: a decoder of a kind that no supported family uses.
    """
    steps = _flat(decoder)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return ByteLevelSpelling()
    if kinds == ["WordPiece"]:
        return WordPieceSpelling(steps[0].get("prefix", "##"))
    unknown = sorted(set(kinds) - {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"})
    if unknown or not kinds:
        named = ", ".join(unknown) or "none"
        known = "ByteLevel, WordPiece or SentencePiece"
        raise ModelError(f"tokenizer.json has a decoder that is not supported ({named}); use {known}")
    return SentencePieceSpelling(
        replacements=tuple(pair for step in steps for pair in _replacement(step)),
        byte_fallback="ByteFallback" in kinds,
        num_leading_spaces=sum(_stripped(step) for step in steps),
    )


def _flat(decoder: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for part in decoder["decoders"] for step in _flat(part)]
    return [decoder]


def _replacement(step: Mapping[str, Any]) -> list[tuple[str, str]]:
    if step["type"] == "Metaspace":
        return [(step.get("replacement", "▁"), " ")]
    if step["type"] != "Replace":
        return []
    if "String" not in step["pattern"]:
        raise ModelError("tokenizer.json has a decoder that replaces by a pattern, which is not supported")
    return [(step["pattern"]["String"], step["content"])]


def _stripped(step: Mapping[str, Any]) -> int:
    if step["type"] == "Metaspace":
        return int(step.get("prepend_scheme", "always") != "never")
    return int(step.get("start", 0)) if step["type"] == "Strip" and step.get("content") == " " else 0


# Pre-tokenization of byte-level tokenizers, by the names that GGUF files use.
#
# Each is what the tokenizer.json of the models with that name has.


EMBEDDED: Final = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Of the models in the package (`training/tokenizer.py`)."""
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDINGS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDINGS}?|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_V3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN35 = (
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_NO_HAN = r"&&[^\p{Han}]"
_KIMI_UPPER, _KIMI_LOWER = rf"{_UPPER[:-1]}{_NO_HAN}]", rf"{_LOWER[:-1]}{_NO_HAN}]"
_KIMI_K2 = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}*{_KIMI_LOWER}+{_ENDINGS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}+{_KIMI_LOWER}*{_ENDINGS}?|\p{{N}}{{1,3}}|{_REST}"
)
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556"
    "\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102"
    "\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149"
    "\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f"
    "\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f"
    "\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
"""Letters with case of the Unicode version that DeepSeek's first tokenizer was made with."""
TRAILING_SPACE = r"(?<!\s)\s+$"
r"""Equal to `\s+$` of DeepSeek's first tokenizers, which tries every place of a run of spaces: their number squared."""
_EAST_ASIAN = "[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK_LLM = (r"[\r\n]", rf"\s?[{_CASED}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", TRAILING_SPACE, _EAST_ASIAN, r"\p{N}")
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}")


@dataclass(frozen=True, slots=True)
class Split:
    """One way to cut a text.

    Attributes:
        patterns: regular expressions, each cutting what the one before left; matches and what lies between are words.
        adds_bos: a plain text begins with BOS unless the file says otherwise.
        normalizes: text is brought to Unicode's form NFC first.
        takes_whole_words: a word that is in the vocabulary is one token, whatever the merges say.
    """

    patterns: tuple[str, ...]
    adds_bos: bool = False
    normalizes: bool = False
    takes_whole_words: bool = False

    def as_json(self) -> dict[str, Any]:
        """Returns the `pre_tokenizer` of tokenizer.json."""
        cuts = [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            for pattern in self.patterns
        ]
        bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        return {"type": "Sequence", "pretokenizers": [*cuts, bytes_]}


_LLAMA3_SPLIT = Split((_LLAMA3,), adds_bos=True, takes_whole_words=True)
_QWEN2_SPLIT = Split((_QWEN2,), normalizes=True)
_O200K_SPLIT = Split((_O200K,))
_DIGITS_SPLIT = Split((r"\p{N}", _GPT2))

_GPT2_SPLIT = Split((_GPT2,))
_CL100K_SPLIT = Split((_LLAMA3,))

SPLITS: Final[Mapping[str, Split]] = {
    "default": Split((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(("gpt-2", "mpt", "olmo", "granite-docling"), _GPT2_SPLIT),
    **dict.fromkeys(("llama-bpe", "llama-v3", "llama3", "lfm2", "falcon3", "falcon-h1", "pixtral"), _LLAMA3_SPLIT),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2_SPLIT),
    "modern-bert": Split((_GPT2,), normalizes=True),
    "qwen35": Split((_QWEN35,), normalizes=True),
    **dict.fromkeys(("smollm", "command-r", "refact", "starcoder"), _DIGITS_SPLIT),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _O200K_SPLIT),
    "deepseek-llm": Split(_DEEPSEEK_LLM),
    "deepseek-coder": Split(_DEEPSEEK_CODER),
    "deepseek-v3": Split((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK_V3)),
    "kimi-k2": Split((_KIMI_K2,)),
    "glm4": Split((_LLAMA3,), takes_whole_words=True),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _CL100K_SPLIT),
    "tekken": Split((_TEKKEN,), adds_bos=True, takes_whole_words=True),
}


# Added tokens: ids outside the base vocabulary, and which of them are control tokens.


_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """What tokenizer.json and tokenizer_config.json say of tokens with a meaning of their own.

    Attributes:
        added: id -> text of every added token.
        control_ids: ids of the added tokens marked special: turn marks, BOS, EOS. They are not text.
        named: role -> text, such as "bos_token" -> "<s>".
        are_literal: control tokens are found letter by letter. Else they are looked for in normalised text, where more
            than one spelling leads to them.
    """

    added: Mapping[int, str]
    control_ids: frozenset[int]
    named: Mapping[str, str]
    are_literal: bool

    @property
    def control_texts(self) -> tuple[str, ...]:
        """How the control tokens are written, longest first."""
        return tuple(sorted((self.added[i] for i in self.control_ids), key=len, reverse=True))

    @classmethod
    def parse(cls, tokenizer: Mapping[str, Any], config: Mapping[str, Any]) -> SpecialTokens:
        """Merges what both files say; a token is special if either says so.

        Raises:
            ModelError: a file lists added tokens in a form that is not known.
        """
        try:
            entries = [(int(token["id"]), token) for token in tokenizer.get("added_tokens") or []]
            entries += [(int(i), token) for i, token in (config.get("added_tokens_decoder") or {}).items()]
            added = {i: str(token["content"]) for i, token in entries}
            control = [(i, token) for i, token in entries if token.get("special") and token["content"]]
        except (AttributeError, KeyError, TypeError, ValueError):
            raise ModelError("the tokenizer's files list added tokens in an unknown form; download or copy it again") from None
        return cls(
            added=added,
            control_ids=frozenset(i for i, _ in control),
            named={name: text for name in _NAMED if (text := _content(config.get(name)))},
            are_literal=not (tokenizer.get("normalizer") and any(token.get("normalized") for _, token in control)),
        )


def _content(value: object) -> str | None:
    """Returns a token's text, given as a string or as an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


# Tokens put around a plain text: the `post_processor` of tokenizer.json.


def surround(before: Sequence[tuple[str, int]], after: Sequence[tuple[str, int]]) -> dict[str, Any] | None:
    """Returns a `post_processor` that puts (token, id) before and after a text; None where there are none."""
    if not before and not after:
        return None

    def places(tokens: Sequence[tuple[str, int]]) -> list[dict[str, Any]]:
        return [{"SpecialToken": {"id": token, "type_id": 0}} for token, _ in tokens]

    first, second = ({"Sequence": {"id": name, "type_id": place}} for place, name in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": [*places(before), first, *places(after)],
        "pair": [*places(before), first, *places(after), second],
        "special_tokens": {token: {"id": token, "ids": [token_id], "tokens": [token]} for token, token_id in (*before, *after)},
    }
