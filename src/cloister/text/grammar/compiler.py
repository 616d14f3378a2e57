"""Compiled grammars over a model's vocabulary (protocols of `runner.grammar`)."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from cloister.text.tokenizer import Tokenizer
from cloister.types.errors import InvalidRequestError
from cloister.types.grammar import Grammar

if TYPE_CHECKING:
    from cloister.text.grammar.matcher import GrammarMatcher, Vocabulary

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
        from cloister.text.grammar.matcher import Vocabulary

        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(self._tokenizer, self._vocab_size, self.eos_token_ids)
        matcher = self._vocabulary.compile(grammar)
        if matcher is None:
            raise InvalidRequestError(_REFUSED)
        return matcher
