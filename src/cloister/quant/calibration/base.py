"""The protocol of calibration: a layer's float weights and text to run through it in, weights in few bits out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from cloister.backends.tensors import Tensor
from cloister.quant.base import NumberFormat
from cloister.quant.calibration.trial import LayerTrial
from cloister.quant.folding import FloatTensors
from cloister.types.registry import Registry

INPUTS_OF: Mapping[str, str] = {
    "q.weight": "qkv", "k.weight": "qkv", "v.weight": "qkv", "o.weight": "o",
    "gate.weight": "gate_up", "up.weight": "gate_up", "down.weight": "down",
}  # fmt: skip
"""Each projection, and the inputs that it reads, in the order in which a layer computes."""


class Calibrator(Protocol):
    """A way to choose the codes of a layer.

    Attributes:
        name: its name in `CALIBRATORS`.
        uses_text: whether it runs text at all.
        rotates: whether what it finds still stands once inputs are rotated; factors for single channels do not.
    """

    @property
    def name(self) -> str: ...

    @property
    def uses_text(self) -> bool: ...

    @property
    def rotates(self) -> bool: ...

    def calibrate(self, tensors: FloatTensors, trial: LayerTrial, number_format: NumberFormat) -> dict[str, Tensor]:
        """Returns the layer's tensors, projections in the format; norms and biases may have taken factors in.

        Args:
            tensors: in float32, under their canonical names less `layers.L.`.
            trial: runs the calibration text through the layer.
        """
        ...


CALIBRATORS: Registry[Calibrator] = Registry("calibration method")
