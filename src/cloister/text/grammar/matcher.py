"""Following grammars with llguidance, over the tokens of one model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from cloister.text.grammar.source import LIMITS, write_source
from cloister.text.tokenizer import Tokenizer
from cloister.types.grammar import Grammar

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
