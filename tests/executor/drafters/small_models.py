"""Small models that draft, without files, and a context to draft in."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cloister.backends import BACKENDS
from cloister.backends.availability import why_no_kernels
from cloister.backends.base import KVLayout, Program
from cloister.executor.drafters.base import DrafterContext, DraftRequest
from cloister.executor.state import BatchState, SequenceState
from cloister.types.request import SamplingParams
from cloister.types.step import NewSequence
from tests.driving import RandomWeights, make_spec

VOCAB, BLOCK = 320, 4


class RandomModel:
    """A random decoder (protocol `DraftModel`); equal seeds are equal models."""

    vocab_size = VOCAB
    weights_bytes = 1000

    def __init__(self, seed: int = 0, max_positions: int = 4096) -> None:
        self.max_positions = max_positions
        self._spec = make_spec(hidden=48, intermediate=64, heads=(2, 1), head_dim=24, vocab=VOCAB)
        self._weights = RandomWeights(self._spec, seed)
        name = "torch" if why_no_kernels() is not None else "native"
        self._backend = BACKENDS.get(name)(num_threads=1, device="cpu", dtype="float32")

    def kv_block_bytes(self, block_size: int) -> int:
        return self._backend.need(self._spec, self._weights, block_size=block_size, max_batched_tokens=64).kv_block_bytes

    def build(self, kv: KVLayout) -> Program:
        return self._backend.build(self._spec, self._weights, kv)


def make_context(batch: BatchState, **fields: Any) -> DrafterContext:
    """A context whose sequences are those of `batch`; it opens no files."""

    def refuse(name: str) -> RandomModel:
        raise AssertionError(f"{name} is not to be opened")

    given: dict[str, Any] = {
        "model_path": Path("nowhere"), "vocab_size": VOCAB, "hidden_size": 48, "max_model_len": 4096, "max_num_seqs": 8,
        "block_size": BLOCK, "eos_token_ids": (1,), "files": None, "open_model": refuse, "head_runner": None,
        "open_mtp": lambda: refuse("the layer behind the last"), "sampling_metadata": batch.sampling_metadata,
    }  # fmt: skip
    return DrafterContext(**{**given, **fields})


def make_batch() -> BatchState:
    return BatchState(vocab_size=VOCAB, max_model_len=4096)


def arrive(
    batch: BatchState, seq_id: int, tokens: Sequence[int], blocks: Sequence[int], stops: tuple[int, ...] = (), **sampling: Any
) -> SequenceState:
    """Takes a sequence in whose block table is `blocks`."""
    params = SamplingParams(**{"temperature": 1.0, **sampling})
    batch.arrive(
        NewSequence(
            seq_id=seq_id, token_ids=list(tokens), num_prompt_tokens=len(tokens), sampling=params, seed=7, stop_token_ids=stops
        )
    )
    batch[seq_id].blocks = array("i", blocks)
    return batch[seq_id]


def ask(state: SequenceState, num_drafts: int, *, coupled: bool = True) -> DraftRequest:
    return DraftRequest(state, num_drafts, None, coupled)
