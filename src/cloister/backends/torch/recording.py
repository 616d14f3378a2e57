"""Spans of the oracle: its methods are watched from outside, so that a program that nobody records runs as always."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from types import ModuleType

from cloister.backends.recording import OperatorSpan, Watched, watch
from cloister.backends.torch.decoder import DecoderLayer


def record(program: object, module: ModuleType, layers: Iterable[DecoderLayer]) -> AbstractContextManager[list[OperatorSpan]]:
    """Records a program's calls (`backends.base.Recording`).

    Args:
        module: where the program finds `attend`; every program of the process finds it there.
    """
    return watch(_list_calls(program, module, layers))


def _list_calls(program: object, module: ModuleType, layers: Iterable[DecoderLayer]) -> Iterator[Watched]:
    yield Watched(program, "_embed", "embed")
    yield Watched(program, "_schedule", "schedule")
    yield Watched(module, "attend", "attention")
    yield Watched(program, "_logits", "head")
    for layer in layers:
        yield Watched(layer, "project", "norm+qkv+rope")
        yield Watched(layer, "finish", "output+mlp_norm+gate_up+down")
