"""Which product of a decoder a module of the checkpoint is: adapters are written in the checkpoint's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cloister.backends.adapters import target_shapes
from cloister.backends.base import FloatArray
from cloister.backends.spec import DecoderSpec
from cloister.models.checkpoint import source_of, stored_name
from cloister.models.families import FAMILIES
from cloister.models.family import Family
from cloister.models.sources import TensorSlice, find_place
from cloister.types.errors import ModelError


@dataclass(frozen=True, slots=True)
class AdapterTarget:
    """One product that a module computes, or a part of what it computes.

    Attributes:
        product: its canonical name, such as "layers.0.q".
        inputs: of the module.
        stored_outputs: of the module.
        place: where the product's rows are among the module's.
    """

    product: str
    inputs: int
    stored_outputs: int
    place: TensorSlice

    def rows_of(self, stored: FloatArray) -> FloatArray:
        """Returns the rows of a module's matrix [stored_outputs, rank] that are this product's."""
        outputs, turns = self.place.shape[0], self.place.num_heads
        if not turns:
            return stored[self.place.start : self.place.start + outputs]
        by_head = stored.reshape(turns, self.place.num_parts, -1, stored.shape[1])
        return by_head[:, self.place.part].reshape(outputs, -1)


def find_targets(spec: DecoderSpec) -> Mapping[str, tuple[AdapterTarget, ...]]:
    """Returns module in the checkpoint -> the products that it computes.

    Raises:
        ModelError: the model's family is not known by name.
    """
    family = next((family for family in FAMILIES.values() if family.name == spec.family), None)
    if family is None:
        raise ModelError(f"adapters need a model of a known family, and this one is {spec.family!r}")
    shapes = {f"{product}.weight": shape for product, shape in target_shapes(spec).items()}
    found: dict[str, tuple[AdapterTarget, ...]] = {}
    for name in shapes:
        module = stored_name(family, name).removesuffix(".weight")
        found[module] = (*found.get(module, ()), _target(family, spec, name, shapes))
    return found


def _target(family: Family, spec: DecoderSpec, name: str, shapes: Mapping[str, tuple[int, ...]]) -> AdapterTarget:
    num_heads = spec.layers[int(name.split(".")[1])].attention.num_heads
    place = find_place(source_of(family, name), name, shapes, num_heads)
    stored = place.stored_shape[::-1] if place.source.transposed else place.stored_shape
    return AdapterTarget(name.removesuffix(".weight"), inputs=stored[1], stored_outputs=stored[0], place=place)
