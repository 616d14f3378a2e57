"""Captured graphs of decode steps: hundreds of launches become one.

A graph has fixed sizes, so a decode step is padded to the next of few sizes; its integers are copied to where the graph reads
them. Graphs are captured when a size first comes up, share one pool of memory, and the least recently used one makes room.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from cloister.backends.torch.cuda.inputs import IntArray, Padding, StepUploader, num_integers
from cloister.backends.torch.cuda.memory import CAPTURED_SEQS

MAX_GRAPHS: Final = 64


@dataclass(frozen=True, slots=True)
class GraphOutputs:
    """What a captured step leaves on the device, in memory that all graphs share.

    Attributes:
        logits: [num_seqs, vocab] float32.
        largest: [num_seqs] int32, the token of the largest logit (`triton.elementwise`).
    """

    logits: Tensor
    largest: Tensor


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    integers: Tensor
    outputs: GraphOutputs


class DecodeGraphs:
    """Graphs by the sizes that they were captured for.

    Args:
        compute: launches a step on the device from its arrays there.
    """

    def __init__(self, uploader: StepUploader, compute: Callable[[list[Tensor]], GraphOutputs]) -> None:
        self._uploader, self._compute = uploader, compute
        self._captured: OrderedDict[Padding, _Captured] = OrderedDict()
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, arrays: list[IntArray], padding: Padding) -> GraphOutputs:
        """Computes a step of these sizes; the outputs are overwritten by the next one."""
        captured = self._captured.get(padding)
        if captured is None:
            captured = self._capture(arrays, padding)
        self._captured.move_to_end(padding)
        self._uploader.send(arrays, captured.integers)
        captured.graph.replay()
        return captured.outputs

    def _capture(self, arrays: list[IntArray], padding: Padding) -> _Captured:
        """Captures a step; it is computed once before, so that everything is compiled (which a capture must not do)."""
        integers = torch.empty(num_integers(arrays), dtype=torch.int32, device="cuda")
        parts = self._uploader.send(arrays, integers)
        self._compute(parts)
        torch.cuda.synchronize()
        while len(self._captured) >= MAX_GRAPHS:
            self._captured.popitem(last=False)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            outputs = self._compute(parts)
        self._captured[padding] = _Captured(graph, integers, outputs)
        return self._captured[padding]


def pad_decode(num_seqs: int, table_width: int, num_items: int, num_joins: int) -> Padding | None:
    """Returns the sizes for a decode step, or None if it is too large to be worth a graph.

    Args:
        num_items, num_joins: the most of any shape of layer.
    """
    if num_seqs > CAPTURED_SEQS:
        return None
    step = 8 if num_seqs <= 64 else 32
    seqs = _power_of_two(num_seqs) if num_seqs <= 8 else -(-num_seqs // step) * step
    return Padding(
        num_seqs=seqs,
        table_width=_power_of_two(table_width),
        num_items=max(seqs, _power_of_two(num_items)),
        num_joins=max(seqs, _power_of_two(num_joins)) if num_joins else 0,
    )


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
