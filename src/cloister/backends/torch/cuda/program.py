"""A decoder on a CUDA device: weights, KV cache and the forward pass of one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from cloister.backends import tensors
from cloister.backends.base import Capability, ForwardBatch, IntArray, KVLayout, Program, StepOutput, Wants, Weights
from cloister.backends.spec import DecoderSpec, RopeSpec
from cloister.backends.torch.cache import KVCache
from cloister.backends.torch.cuda.attention import AttentionKernels, PagedAttention
from cloister.backends.torch.cuda.graphs import DecodeGraphs, GraphOutputs, pad_decode
from cloister.backends.torch.cuda.inputs import StepInputs, StepUploader, padded_arrays, step_arrays, unpack
from cloister.backends.torch.cuda.layer import CudaLayer
from cloister.backends.torch.cuda.limits import check_computable, check_numbers, rope_of
from cloister.backends.torch.cuda.matrices import Matrix, MatrixReader
from cloister.backends.torch.cuda.memory import CAPTURED_SEQS
from cloister.backends.torch.cuda.tiles import TileBook
from cloister.backends.torch.layers import RopeTable
from cloister.backends.torch.reading import to_torch
from cloister.backends.torch.triton.elementwise import add_and_norm, find_largest
from cloister.types.errors import EngineError

if TYPE_CHECKING:
    from cloister.backends.torch.cuda.flash_infer import FlashInferAttention

_INTERPRETED_PLACES = 3  # multiprocessors that the interpreter stands for


class CudaProgram(Program):
    """Computes a DecoderSpec with Triton kernels.

    The residual stream and norms are float32, everything else of `dtype`. On a CPU device the kernels must have been imported
    for Triton's interpreter.

    Args:
        is_exact: rows keep their bits in any batch; otherwise cuBLAS multiplies plain weights, and FlashInfer
            attends in steps that prefill.
    """

    capabilities = Capability.GREEDY | Capability.HIDDEN

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Weights,
        kv: KVLayout,
        *,
        dtype: torch.dtype,
        device: torch.device,
        is_exact: bool = True,
    ) -> None:
        check_computable(spec)
        check_numbers(weights)
        if device.type == "cuda":
            self.capabilities |= Capability.ASYNCHRONOUS
        self._spec, self._kv, self._dtype, self._device = spec, kv, dtype, device
        num_places = count_places(device)
        reader = MatrixReader(weights, dtype, device, TileBook(num_places), is_exact)
        self._embedding = to_torch(tensors.dequantized(weights.read("embed.weight"))).to(device, dtype)
        self._layers = [CudaLayer(layer, reader, f"layers.{number}", spec.norm_eps) for number, layer in enumerate(spec.layers)]
        self._norms = [*(layer.attention_norm for layer in self._layers), reader.norm("norm")]
        self._head = self._read_head(weights, reader)
        self._num_positions = min(spec.max_positions, kv.num_blocks * kv.block_size)
        ropes = {rope_of(layer) for layer in spec.layers}
        self._angles = {rope: angle_table(rope, self._num_positions).to(device) for rope in ropes}
        self._cache = KVCache(kv, [layer.grouped_attention for layer in spec.layers], dtype, device)
        self._attention = PagedAttention([layer.heads for layer in self._layers], dtype, device, num_places)
        self._uploader = StepUploader(device)
        self._outputs = GraphOutputs(
            logits=torch.empty(CAPTURED_SEQS, spec.vocab_size, device=device),
            largest=torch.empty(CAPTURED_SEQS, dtype=torch.int32, device=device),
        )
        self._graphs = DecodeGraphs(self._uploader, self._compute_captured) if device.type == "cuda" else None
        self._prefill = None if is_exact else self._open_prefill()

    def step(self, batch: ForwardBatch, wants: Wants) -> StepOutput:
        """Computes one step (`backends.base.Program.step`); what is not wanted stays on the device."""
        return self.launch(batch, wants)()

    @torch.no_grad()
    def launch(self, batch: ForwardBatch, wants: Wants) -> Callable[[], StepOutput]:
        """Launches one step (`backends.base.Program.launch`); what it returns moves what is wanted to the host.

        A decode step that wants no hidden states is replayed (`cuda.graphs`). Hidden states are numbers of `dtype`.
        """
        self._check(wants)
        if batch.parents is not None:
            raise EngineError("the CUDA program computes no token trees yet; draft one sequence, or compute on the CPU")
        if batch.document_ranges is not None:
            raise self._lacks(Capability.DOCUMENT_WEIGHTS)
        captured = None if wants.hidden else self._run_captured(batch)
        if captured is not None:
            return partial(_bring, wants, captured, batch.logit_rows)
        return self._launch(batch, wants)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks (source, target) in every layer."""
        self._cache.copy(pairs)

    def wipe_blocks(self, block_ids: Sequence[int]) -> None:
        """Overwrites blocks with zeros in every layer."""
        self._cache.wipe(block_ids)

    def _read_head(self, weights: Weights, reader: MatrixReader) -> Matrix:
        """A plain tied embedding is kept once."""
        if self._spec.tied_embeddings and isinstance(weights.read("embed.weight"), np.ndarray):
            return reader.plain(self._embedding, None)
        return reader.matrix("embed" if self._spec.tied_embeddings else "head", bias=False)

    def _open_prefill(self) -> FlashInferAttention:
        from cloister.backends.torch.cuda.flash_infer import FlashInferAttention  # an extra: only when it was asked for

        return FlashInferAttention([layer.heads for layer in self._layers], self._kv, self._dtype, self._device)

    def _run_captured(self, batch: ForwardBatch) -> GraphOutputs | None:
        """Replays a decode step, whose outputs have a row for every token; None if the step prefills or is too large."""
        is_decode = len(batch.token_ids) > 0 and bool((np.diff(batch.query_starts) == 1).all())
        if self._graphs is None or not is_decode:
            return None
        self._check_positions(batch)
        works = self._attention.cut(batch)
        num_items = max(len(work.small) for work in works.values())
        num_joins = max(len(work.joins) for work in works.values())
        padding = pad_decode(len(batch.token_ids), batch.block_tables.shape[1], num_items, num_joins)
        if padding is None or any(len(work.large) for work in works.values()):
            return None
        return self._graphs.run(padded_arrays(batch, works, self._kv.block_size, padding), padding)

    def _launch(self, batch: ForwardBatch, wants: Wants) -> Callable[[], StepOutput]:
        """Launches a step kernel by kernel; the head only where something of it is wanted."""
        if len(batch.token_ids) == 0:
            return partial(StepOutput, logits=np.empty((0, self._spec.vocab_size), np.float32))
        normed = self._compute_normed(*self._prepare(batch))
        found = {"hidden": normed.float()} if wants.hidden else {}
        if wants.logits:
            found["logits"] = self._compute_logits(normed)
        elif wants.greedy:
            found["tokens"] = find_largest(self._compute_logits(normed))
        return lambda: StepOutput(**{name: tensor.cpu().numpy() for name, tensor in found.items()})

    def _prepare(self, batch: ForwardBatch) -> tuple[StepInputs, AttentionKernels]:
        """Moves the arrays of a step that is not captured, and readies what attends in it."""
        self._check_positions(batch)
        arrays = step_arrays(batch, self._attention.cut(batch), self._kv.block_size)
        return self._unpack(self._uploader.send(arrays)), self._attention_for(batch)

    def _check_positions(self, batch: ForwardBatch) -> None:
        if int(batch.positions.max()) >= self._num_positions:
            raise EngineError(f"a step reaches past position {self._num_positions - 1}, the last that the program can turn to")

    def _unpack(self, parts: list[Tensor]) -> StepInputs:
        return unpack(parts, self._attention.layers, self._kv.block_size)

    def _attention_for(self, batch: ForwardBatch) -> AttentionKernels:
        """Returns what attends in a step that is not captured, ready for it."""
        if self._prefill is not None:
            self._prefill.plan(batch)
            return self._prefill
        self._attention.begin()
        return self._attention

    def _compute_captured(self, parts: list[Tensor]) -> GraphOutputs:
        """Launches every kernel of a step for every token, with the outputs where every captured step leaves them.

        All that it reads is on the device.
        """
        logits = self._compute_logits(self._compute_normed(self._unpack(parts), self._attention))
        outputs = GraphOutputs(self._outputs.logits[: len(logits)], self._outputs.largest[: len(logits)])
        outputs.logits.copy_(logits)
        outputs.largest.copy_(find_largest(logits))
        return outputs

    def _compute_logits(self, normed: Tensor) -> Tensor:
        return self._head.multiply(normed, torch.float32)

    def _compute_normed(self, step: StepInputs, attention: AttentionKernels) -> Tensor:
        """Launches every kernel before the head, and returns what it reads, [num_logits, hidden]."""
        hidden = self._embedding.index_select(0, step.token_ids).float()
        normed = torch.empty_like(hidden, dtype=self._dtype)
        add_and_norm(hidden, None, self._norms[0], normed, self._spec.norm_eps)
        for number, (layer, slots) in enumerate(zip(self._layers, self._cache.layers, strict=True)):
            angles = self._angles[rope_of(layer.spec)]
            queries = layer.project(normed, step.positions, step.targets, angles, slots)
            mixed = attention.attend(number, layer.heads, queries, slots, step)
            layer.finish(hidden, mixed, normed, self._norms[number + 1])
        return normed.index_select(0, step.logit_rows)


def _bring(wants: Wants, outputs: GraphOutputs, rows: IntArray) -> StepOutput:
    """Moves what is wanted of a captured step to the host, and takes the rows that were asked for."""
    if wants.logits:
        return StepOutput(logits=outputs.logits.cpu().numpy()[rows])
    return StepOutput(tokens=outputs.largest.cpu().numpy()[rows]) if wants.greedy else StepOutput()


def angle_table(spec: RopeSpec, num_positions: int) -> Tensor:
    """Returns [num_positions, 2, head_dim / 2] float32, cosines then sines, with the bits of the reference's."""
    table = RopeTable(spec, torch.device("cpu")).at(torch.arange(num_positions), num_positions)
    return table.squeeze(2).transpose(0, 1).contiguous()


def count_places(device: torch.device) -> int:
    """Returns the multiprocessors of a device."""
    if device.type != "cuda":
        return _INTERPRETED_PLACES
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
