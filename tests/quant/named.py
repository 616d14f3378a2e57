"""Tensors by name, as weights."""

from __future__ import annotations

from collections.abc import Iterator

from cloister.backends.tensors import Tensor


class NamedTensors:
    """Protocol `backends.base.Weights`."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def form(self, name: str) -> None:
        return None

    def read(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._tensors.items())
