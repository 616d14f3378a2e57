"""Attention by FlashInfer (Ye et al. 2025), for steps that prefill under `numerics = "fast"`.

It cuts work by what else is in the batch, so it cannot promise batch invariance; captured decode steps keep our kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import flashinfer
import numpy as np
import torch
from torch import Tensor

from cloister.backends.base import ForwardBatch, KVLayout
from cloister.backends.torch.cuda.inputs import StepInputs
from cloister.backends.torch.cuda.memory import WORKSPACE_BYTES
from cloister.backends.torch.triton.attention import Heads


class FlashInferAttention:
    """Attends with one FlashInfer wrapper for each shape of layer (protocol `attention.AttentionKernels`).

    Args:
        layers: the heads of each layer.
    """

    def __init__(self, layers: Sequence[Heads], kv: KVLayout, dtype: torch.dtype, device: torch.device) -> None:
        self._kv, self._dtype = kv, dtype
        self._wrappers: dict[Heads, Any] = {}
        for heads in dict.fromkeys(layers):
            workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
            self._wrappers[heads] = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")

    def plan(self, batch: ForwardBatch) -> None:
        """Decides how the step's attention is cut."""
        size = self._kv.block_size
        num_pages = -(-batch.context_lens // size)
        starts = np.concatenate([[0], np.cumsum(num_pages)]).astype(np.int32)
        pages = np.concatenate([row[:count] for row, count in zip(batch.block_tables, num_pages, strict=True)])
        last = (batch.context_lens - 1) % size + 1
        arrays = (batch.query_starts, starts, pages, last)
        tensors = [torch.from_numpy(np.ascontiguousarray(array, np.int32)) for array in arrays]
        for heads, wrapper in self._wrappers.items():
            wrapper.plan(
                *tensors, heads.num_heads, heads.num_kv_heads, heads.head_dim, size, causal=True,
                sm_scale=math.log(2.0),  # queries are scaled for powers of two
                window_left=heads.window - 1 if heads.window else -1, q_data_type=self._dtype, kv_data_type=self._dtype,
            )  # fmt: skip

    def attend(self, number: int, heads: Heads, queries: Tensor, slots: Tensor, step: StepInputs) -> Tensor:
        """Returns [num_rows, num_heads * head_dim] (`attention.AttentionKernels.attend`)."""
        pages = slots[:-1].view(self._kv.num_blocks, self._kv.block_size, 2, heads.num_kv_heads, heads.head_dim)
        out: Tensor = self._wrappers[heads].run(queries, (pages[:, :, 0], pages[:, :, 1]))
        return out.reshape(len(out), -1)
