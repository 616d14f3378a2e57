"""Models without a spec, computed by transformers: slow, but right. One sequence after the other, in tiles of 32 positions.

A tile holds the absolute positions [32 t, 32 t + 32), and all of it is computed whenever one of its positions is asked for,
filled up behind the last known token; what stands before it is read from the cache. So every product and every attention has
the same shape for a position whatever the company, the chunks and the hits, and a row's bits are the same too (batch
invariance), at one number of threads. Mixtures of experts are an exception: how many of a tile's rows an expert gets depends on
what fills it up.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
import transformers
from torch import Tensor

from cloister.backends.base import FloatArray, ForwardBatch, KVLayout, MemoryNeed, Program, StepOutput, Wants, Weights
from cloister.backends.factories import FOREIGN_FAMILY
from cloister.backends.spec import DecoderSpec
from cloister.types.errors import ConfigError, ModelError

TILE: Final = 32
NUMERICS: Final = 1
_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_AUTO: Any = transformers.AutoModelForCausalLM  # its constructors carry no types
_logger = logging.getLogger(__name__)

Pages = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer, [num_slots, num_heads, head_dim]."""


class FallbackBackend:
    """Builds programs that transformers computes (protocol `backends.base.Backend`).

    Raises:
        ConfigError: a setting is not one of those that it has.
    """

    def __init__(self, *, num_threads: int, device: str, dtype: str, numerics: str, kv_dtype: str | None = None) -> None:
        if dtype not in _DTYPES:
            raise ConfigError(f"transformers computes in {', '.join(_DTYPES)} here, not in {dtype!r}", param="dtype")
        if numerics != "exact":
            raise ConfigError("a model without a spec has one way to be computed; leave `numerics` out", param="numerics")
        if kv_dtype not in (None, dtype):
            raise ConfigError(f"a model without a spec keeps KV in {dtype} too; leave kv_dtype out", param="kv_dtype")
        self._device, self._dtype, self._num_threads = torch.device(device), _DTYPES[dtype], num_threads
        self.fingerprint = f"transformers-{transformers.__version__}-{torch.__version__}-{dtype}-{num_threads}-{NUMERICS}"

    def need(self, spec: DecoderSpec, weights: Weights, *, block_size: int, max_batched_tokens: int) -> MemoryNeed:
        """Says what `build` and `step` will take, from a model that has shapes and no numbers."""
        with torch.device("meta"):
            model = _open(_AUTO.from_config, self._config(weights), dtype=self._dtype).eval()
        shapes = _probe(model, torch.device("meta"))
        slot_bytes = sum(heads * (keys + values) for heads, keys, values in shapes) * self._dtype.itemsize
        tile_bytes = 4 * TILE * (spec.vocab_size + 32 * spec.hidden_size)
        return MemoryNeed(
            weights_bytes=sum(parameter.numel() for parameter in model.parameters()) * self._dtype.itemsize,
            kv_block_bytes=(slot_bytes + 8) * block_size,
            activations_bytes=tile_bytes + 2 * slot_bytes * spec.max_positions,  # a sequence's cache, gathered
        )

    def build(
        self, spec: DecoderSpec, weights: Weights, kv: KVLayout, *, identity: str | None = None, beside: Program | None = None
    ) -> FallbackProgram:
        """Loads the model.

        Raises:
            ModelError: transformers cannot load it, or it keeps something else than keys and values by position.
        """
        torch.set_num_threads(self._num_threads)
        logging_of_theirs: Any = transformers.utils.logging
        logging_of_theirs.disable_progress_bar()  # standard error is for lines, which may be JSON
        model = _open(_AUTO.from_pretrained, _path(weights), dtype=self._dtype, trust_remote_code=False, use_safetensors=True)
        name = type(model).__name__
        _logger.warning("%s has no spec here: transformers computes it, slowly, one sequence after the other", name)
        return FallbackProgram(model.to(self._device).eval(), spec, kv, self._device)

    def _config(self, weights: Weights) -> Any:
        return _open(transformers.AutoConfig.from_pretrained, _path(weights), trust_remote_code=False)


class FallbackProgram(Program):
    """A model of transformers with a paged cache beside it; has no capability beside logits."""

    def __init__(self, model: Any, spec: DecoderSpec, kv: KVLayout, device: torch.device) -> None:
        self._model, self._device = model, device
        self._vocab_size, self._block_size = spec.vocab_size, kv.block_size
        num_slots = kv.num_blocks * kv.block_size
        self._tokens = torch.zeros(num_slots, dtype=torch.long, device=device)
        self._pages: Pages = [
            tuple(torch.zeros(num_slots, heads, size, dtype=model.dtype, device=device) for size in (keys, values))  # type: ignore[misc]
            for heads, keys, values in _probe(model, device)
        ]

    @torch.no_grad()
    def step(self, batch: ForwardBatch, wants: Wants) -> StepOutput:
        """Computes one step (`backends.base.Program.step`).

        Raises:
            ValueError: the batch has token trees, which this program does not compute.
        """
        self._check(wants)
        if batch.parents is not None:
            raise ValueError("a model without a spec computes no token trees")
        logits = np.empty((len(batch.logit_rows), self._vocab_size), np.float32)
        for seq in range(len(batch.context_lens)):
            first, last = (int(place) for place in batch.query_starts[seq : seq + 2])
            if first == last:
                continue
            rows = np.flatnonzero((batch.logit_rows >= first) & (batch.logit_rows < last))
            wanted = {int(batch.positions[batch.logit_rows[row]]): row for row in rows}
            self._compute(batch.token_ids[first:last], batch.block_tables[seq], int(batch.positions[first]), wanted, logits)
        return StepOutput(logits=logits) if wants.logits else StepOutput()

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks (source, target) in every layer."""
        for source, target in pairs:
            for tensor in self._stores():
                tensor[self._block(target)] = tensor[self._block(source)]

    def wipe_blocks(self, block_ids: Sequence[int]) -> None:
        """Overwrites blocks with zeros in every layer."""
        for block in block_ids:
            for tensor in self._stores():
                tensor[self._block(block)] = 0

    def _compute(self, token_ids: Any, table: Any, start: int, wanted: dict[int, Any], logits: FloatArray) -> None:
        """Computes the tiles of one sequence that its new tokens lie in, and files the rows of logits that are wanted."""
        end = start + len(token_ids)
        positions = np.arange(start // TILE * TILE, end)
        slots = self._slots(table, end)
        self._tokens[slots[start:end]] = torch.from_numpy(np.asarray(token_ids, np.int64)).to(self._device)
        for first in range(positions[0], end, TILE):
            count = min(TILE, end - first)
            found = self._run_tile(slots, first, count)
            for position in range(max(first, start), first + count):
                if position in wanted:
                    logits[wanted[position]] = found[position - first].float().cpu().numpy()[: self._vocab_size]

    def _run_tile(self, slots: Tensor, first: int, count: int) -> Tensor:
        """Computes `count` positions from `first` on, files their keys and values, and returns logits [TILE, vocab]."""
        cache: Any = transformers.DynamicCache()
        before, new = slots[:first], slots[first : first + count]
        tokens = torch.zeros(1, TILE, dtype=torch.long, device=self._device)
        tokens[0, :count] = self._tokens[new]
        if first:
            for layer, pages in enumerate(self._pages):
                keys, values = (page[before].transpose(0, 1)[None] for page in pages)
                cache.update(keys, values, layer)
        found = self._model(input_ids=tokens, use_cache=True, **{_cache_argument(self._model): cache})
        for layer, pages in zip(cache.layers, self._pages, strict=True):
            for page, states in zip(pages, (layer.keys, layer.values), strict=True):
                page[new] = states[0, :, first : first + count].transpose(0, 1)
        logits: Tensor = found.logits[0]
        return logits

    def _slots(self, table: Any, end: int) -> Tensor:
        """Returns the slots of a sequence's positions, [end]."""
        positions = np.arange(end)
        blocks = np.asarray(table, np.int64)[positions // self._block_size]
        return torch.from_numpy(blocks * self._block_size + positions % self._block_size).to(self._device)

    def _stores(self) -> list[Tensor]:
        return [self._tokens, *(page for pages in self._pages for page in pages)]

    def _block(self, number: int) -> slice:
        return slice(number * self._block_size, (number + 1) * self._block_size)


def _path(weights: Weights) -> str:
    path = getattr(weights, "path", None)
    if path is None:
        raise ModelError(f"only a model of the family {FOREIGN_FAMILY!r} is computed by transformers")
    return str(path)


def _open(opener: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls transformers, whose errors are of many kinds. It never runs code that a model brings."""
    try:
        return opener(*args, **kwargs)
    except Exception as error:
        raise ModelError(
            f"the architecture is none of Cloister's own, and transformers {transformers.__version__} cannot open the model "
            f"({type(error).__name__}); it may be damaged, or need a newer transformers, or code of its own, which is never run"
        ) from None


def _cache_argument(model: Any) -> str:
    """Returns what `forward` calls the cache: later versions of transformers warn of the older name."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


@torch.no_grad()
def _probe(model: Any, device: torch.device) -> list[tuple[int, int, int]]:
    """Returns (heads, size of a key, size of a value) of each layer's cache.

    Raises:
        ModelError: it keeps something else than keys and values by position.
    """
    try:
        tokens = torch.zeros(1, TILE, dtype=torch.long, device=device)
        cache: Any = transformers.DynamicCache()
        model(input_ids=tokens, use_cache=True, **{_cache_argument(model): cache})
        shapes = [(tuple(layer.keys.shape), tuple(layer.values.shape)) for layer in cache.layers]
    except Exception:
        shapes = []
    if not shapes or any(len(keys) != 4 or keys[2] != TILE or values[:3] != keys[:3] for keys, values in shapes):
        raise ModelError(
            "the model keeps something else than keys and values by position (a recurrent state, perhaps), "
            "which is not supported"
        )
    return [(keys[1], keys[3], values[3]) for keys, values in shapes]
