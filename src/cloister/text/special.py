"""Added tokens of a model: which ids are spelled outside the vocabulary proper, and which of them control the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cloister.types.errors import ModelError

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
            raise ModelError("the tokenizer's files list added tokens in an unknown form; download it again") from None
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
