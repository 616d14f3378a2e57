"""How byte-level tokenizers cut a text into words before they merge bytes, by the names that GGUF files use.

Each is what the tokenizer.json of the models with that name has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

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

SPLITS: Final[Mapping[str, Split]] = {
    "default": Split((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": Split((_GPT2,)),
    "llama-bpe": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "qwen2": _QWEN2_SPLIT,
    "deepseek-r1-qwen": _QWEN2_SPLIT,
    "smollm": Split((r"\p{N}", _GPT2)),
    "tekken": Split((_TEKKEN,), adds_bos=True, takes_whole_words=True),
}
