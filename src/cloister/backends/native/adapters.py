"""Low-rank adapters for the native kernels: packed once, when they are loaded, in the type of weights that come as numbers."""

from __future__ import annotations

from typing import Final

from cloister.backends.adapters import AdapterWeights
from cloister.backends.native import _native
from cloister.backends.native.packing import PackedMatrix, Packer

_SITES: Final = ("q", "k", "v", "o", "gate", "up", "down")  # cpp/lora.hpp


class NativeAdapters:
    """The adapters of one program, by slot; the kernels hold pointers into their arrays."""

    def __init__(self, program: _native.Program, packer: Packer) -> None:
        self._program, self._packer = program, packer
        self._held: dict[int, list[PackedMatrix]] = {}

    def load(self, slot: int, adapter: AdapterWeights) -> None:
        """Packs an adapter and puts it in a slot.

        Raises:
            ValueError: it does not fit the products of the program.
        """
        held: list[PackedMatrix] = []
        updates = []
        for product, pair in adapter.updates.items():
            _, layer, name = product.split(".")
            a, b = (self._packer.join([matrix], [None]) for matrix in pair)
            held += (a, b)
            updates.append((int(layer), _SITES.index(name), a.bind(), b.bind()))
        self._program.load_adapter(slot, updates)
        self._held[slot] = held

    def unload(self, slot: int) -> None:
        """Empties a slot."""
        self._program.unload_adapter(slot)
        self._held.pop(slot, None)
