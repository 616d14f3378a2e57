"""Writes a datastore: documents as token ids, and their suffixes in order."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from cloister.executor.drafters.datastore import HEADER, HEADS, SORTED_TOKENS, SUFFIXES, TOKENS, VERSION, DatastoreHeader
from cloister.types.errors import ConfigError

MAX_PLACES: Final = (1 << 31) - 1
"""Of tokens and ends of documents: ranks of two suffixes fit into one number."""


def write_datastore(path: Path, documents: Iterable[Sequence[int]], *, num_ids: int, tokenizer: str) -> DatastoreHeader:
    """Writes a datastore of public text; about 40 bytes of memory for each token.

    Args:
        path: directory; files of an earlier datastore in it are replaced.
        documents: the token ids of each, all below `num_ids`.
        tokenizer: digest of the tokenizer that they are of.

    Raises:
        ConfigError: there is no text, or too much.
    """
    width = 2 if num_ids < 1 << 16 else 4
    end = (1 << 8 * width) - 1
    text, num_documents = array("I"), 0
    for document in documents:
        if document:
            text.extend(document)
            text.append(end)
            num_documents += 1
        if len(text) > MAX_PLACES:
            raise ConfigError(f"a datastore holds {MAX_PLACES} tokens at most; give less text", param="text")
    if not num_documents:
        raise ConfigError("the text has no tokens; give files with text in them", param="text")
    tokens = np.frombuffer(text, np.uint32)
    order = sort_suffixes(tokens, bits=8 * width)
    order = order[: len(order) - num_documents]  # the ends of documents sort last
    header = DatastoreHeader(
        version=VERSION,
        tokenizer=tokenizer,
        token_bytes=width,
        num_ids=num_ids,
        num_tokens=len(order),
        num_documents=num_documents,
    )
    path.mkdir(parents=True, exist_ok=True)
    (path / HEADER).unlink(missing_ok=True)  # without it there is no datastore, so none of two halves
    _write(path / TOKENS, tokens.astype(f">u{width}").tobytes())
    _write(path / SUFFIXES, order.astype("<u4").tobytes())
    heads = np.searchsorted(tokens[order], np.arange(num_ids + 1, dtype=np.uint32))
    _write(path / HEADS, heads.astype("<u4").tobytes())
    _write(path / HEADER, msgspec.json.format(msgspec.json.encode(header), indent=2) + b"\n")
    return header


def _write(path: Path, content: bytes) -> None:
    """Puts a new file in the place of the old one, which a server may have mapped."""
    scratch = path.with_name(f"{path.name}.new")
    scratch.write_bytes(content)
    scratch.replace(path)


def sort_suffixes(tokens: npt.NDArray[np.uint32], *, bits: int, depth: int = SORTED_TOKENS) -> npt.NDArray[np.uint32]:
    """Returns the places of all suffixes in the order of their first `depth` tokens, ties in the order of the text.

    Prefix doubling (Karp, Miller and Rosenberg 1972): two ranks by k tokens side by side are a rank by 2 k.

    Args:
        tokens: [num_tokens], each below 2 ** bits; a suffix that ends sorts before those that go on.
        depth: a power of two.
    """
    num_sorted = 64 // bits
    keys = np.zeros(len(tokens), np.uint64)
    for place in range(num_sorted):
        keys |= _behind(tokens, place) << np.uint64(64 - bits * (place + 1))
    while True:
        order = np.argsort(keys, kind="stable").astype(np.uint32)
        if num_sorted >= depth:
            return order
        in_order = keys[order]
        ranks = np.empty(len(keys), np.uint64)
        ranks[order] = np.cumsum(np.append(True, in_order[1:] != in_order[:-1]))
        keys = ranks << np.uint64(32) | _behind(ranks, num_sorted)
        num_sorted *= 2


def _behind(values: npt.NDArray[Any], count: int) -> npt.NDArray[np.uint64]:
    """Returns for each place the value `count` places behind it, 0 behind the end."""
    shifted = np.zeros(len(values), np.uint64)
    shifted[: max(0, len(values) - count)] = values[count:]
    return shifted
