"""The byte-level BPE both models share, its special tokens included in the vocabulary."""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from training.corpus import Document

END_OF_TEXT = "<|endoftext|>"
SYSTEM = "<|system|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
TOOL = "<|tool|>"
END = "<|end|>"
CONTROL_TOKENS = (END_OF_TEXT, END, SYSTEM, USER, ASSISTANT, TOOL)
"""Their ids are their places, 0 to 5. A decoder that skips special tokens drops them."""
CALL_TOKENS = ("<tool_call>", "</tool_call>")
"""One token each, but text: a reader of the answer has to see them."""

# Words with the space before them, digits one by one (so that numbers can be copied and counted), punctuation, space.
PIECES = Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def train_tokenizer(texts: Iterable[str], vocab: int) -> Tokenizer:
    """Learn a byte-level BPE of at most ``vocab`` tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(PIECES, behavior="isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[*CONTROL_TOKENS, *CALL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return show_calls(tokenizer)


def show_calls(tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer with the call tokens made text: a trainer makes every token it is told of special."""
    state = json.loads(tokenizer.to_str())
    for token in state["added_tokens"]:
        token["special"] = token["content"] not in CALL_TOKENS
    return Tokenizer.from_str(json.dumps(state))


def load_tokenizer(path: Path) -> Tokenizer:
    """Read a ``tokenizer.json``."""
    return Tokenizer.from_file(str(path))


def encode_documents(tokenizer: Tokenizer, documents: Iterable[Document]) -> NDArray[np.uint16]:
    """All documents as one row of ids ``[num_tokens]``, each followed by the end-of-text token."""
    end = token_id(tokenizer, END_OF_TEXT)
    rows = []
    for encoding in tokenizer.encode_batch([d.text for d in documents], add_special_tokens=False):
        rows.append(np.array([*encoding.ids, end], dtype=np.uint16))
    return np.concatenate(rows) if rows else np.empty(0, dtype=np.uint16)


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a special token.

    Raises:
        ValueError: if the vocabulary lacks it.
    """
    found = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"the tokenizer has no {token}: it was not made by this recipe")
    return found
