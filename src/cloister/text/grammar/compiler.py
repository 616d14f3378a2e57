"""Compiles grammars over a model's vocabulary with llguidance (the protocols of `executor.grammar`)."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from cloister.text.tokenizer import Tokenizer
from cloister.types.errors import InvalidRequestError
from cloister.types.request import Grammar, GrammarKind

_REFUSED: Final = "the grammar cannot be followed with this model: it is too large, or nothing can satisfy it; make it simpler"


class GrammarCompiler:
    """Compiles grammars for one model. Thread-safe; nothing of a grammar is kept.

    Args:
        tokenizer: of the model.
        vocab_size: columns of its logits; it may have fewer tokens, or more.
        eos_token_ids: what may end an answer; every other control token is barred.

    Attributes:
        num_words: 32-bit words of a mask: one bit a column, and one for an end that the model cannot choose if it has none.
    """

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.eos_token_ids = tuple(token_id for token_id in eos_token_ids if 0 <= token_id < vocab_size)
        self.num_words = (vocab_size + (not self.eos_token_ids) + 31) // 32
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._vocabulary: Vocabulary | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the vocabulary was read."""
        return self._vocabulary is not None

    def compile(self, grammar: Grammar) -> GrammarMatcher:
        """Returns a matcher that stands at the beginning of an answer.

        The first call loads the library and reads the vocabulary, which takes a second for 150,000 tokens: an engine that
        follows no grammar has neither.

        Raises:
            InvalidRequestError: the grammar cannot be followed.
        """

        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(self._tokenizer, self._vocab_size, self.eos_token_ids)
        matcher = self._vocabulary.compile(grammar)
        if matcher is None:
            raise InvalidRequestError(_REFUSED)
        return matcher


# Grammars in the notation of llguidance, the library that follows them.


WHITESPACE: Final = r"[ ]|\n[ ]{0,32}"
"""What may stand once between the parts of a JSON text. Without a bound, a model can write spaces until it is cut off."""

LIMITS: Final = LLParserLimits(max_items_in_row=6_000, max_lexer_states=30_000, max_grammar_size=300_000, verbose_errors=False)
"""Work of the library in one piece: it gives up by itself, after 20 ms of one mask or so. A state takes 1 to 2 KB. Each of
1,000 optional properties (`schema.MAX_PROPERTIES`) takes 4 items of a row, and 5 where other names are free too."""


def write_source(grammar: Grammar) -> str:
    """Returns a grammar for the library, which says later whether it can be followed.

    Raises:
        ValueError: it is no JSON, where it has to be.
    """
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return _of_schema(grammar.source)
        case GrammarKind.JSON_OBJECT:
            return _of_schema('{"type": "object"}')
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.source)
        case GrammarKind.CHOICE:
            choices = " | ".join(json.dumps(choice) for choice in json.loads(grammar.source))
            return LLMatcher.grammar_from_lark(f"start: {choices}")
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(grammar.source)


def _of_schema(schema: str) -> str:
    return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": WHITESPACE})


# Following grammars with llguidance, over the tokens of one model.


MaskArray = npt.NDArray[np.uint32]

_END: Final = b"<end of the answer>"
_NO_TOKEN: Final = b""


class Vocabulary:
    """A model's tokens as the library needs them.

    Args:
        vocab_size: columns of the model's logits; columns without a token are barred.
        eos_token_ids: tokens that may end an answer.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        tokens = _Tokens(tokenizer, vocab_size, eos_token_ids)
        self._tokenizer = LLTokenizer(
            TokenizerWrapper(tokens), eos_token=tokens.eos_token_ids, slices=LLTokenizer.json_slices()
        )

    def compile(self, grammar: Grammar) -> GrammarMatcher | None:
        """Returns a matcher at the beginning of an answer, or None if the grammar cannot be followed."""
        try:
            matcher = LLMatcher(self._tokenizer, write_source(grammar), log_level=0, limits=LIMITS)
        except ValueError:
            return None
        return None if matcher.is_error() else GrammarMatcher(matcher)


class GrammarMatcher:
    """One answer's place in its grammar. Not thread-safe."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    def is_complete(self) -> bool:
        """Whether the answer satisfies the grammar and nothing can follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def accept(self, token_ids: list[int]) -> bool:
        """Goes on by some tokens; False if the grammar does not let them follow, or takes too much work."""
        return self._matcher.consume_tokens(token_ids)

    def fill(self, mask: MaskArray) -> bool:
        """Says which tokens may follow: bit i % 32 of word i // 32, [num_words] uint32; False if it takes too much work.

        Computes outside of the interpreter lock.
        """
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        return not self._matcher.is_error()

    def copy(self) -> GrammarMatcher:
        return GrammarMatcher(self._matcher.deep_copy())


class _Tokens:
    """What the library reads by name: bytes of tokens, which of them control the model, and a way to cut text."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        num_tokens = min(vocab_size, tokenizer.vocab_size)
        self.tokens = [tokenizer.read_bytes(token_id) for token_id in range(num_tokens)]
        self.tokens += [_NO_TOKEN] * (vocab_size - num_tokens)
        special = {token_id for token_id in tokenizer.special.control_ids if token_id < vocab_size}
        self.eos_token_ids = list(eos_token_ids)
        if not eos_token_ids:  # the library needs one: a token behind all others, which no model can choose
            self.eos_token_ids = [vocab_size]
            self.tokens.append(_END)
        self.special_token_ids = sorted(special | set(self.eos_token_ids))
        self.eos_token_id = self.eos_token_ids[0]
        self.bos_token_id = tokenizer.bos_token_id

    def __call__(self, text: bytes | str) -> list[int]:
        known = text.decode(errors="replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(known, parse_special=False)
