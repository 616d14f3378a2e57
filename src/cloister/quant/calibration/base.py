"""The base of calibration: a layer's float weights and sample inputs in, quantized weights out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from cloister.backends.spec import LayerSpec
from cloister.backends.tensors import Tensor, rotate_blocks
from cloister.quant.base import FloatArray, KVDtype, NumberFormat
from cloister.quant.folding import FloatTensors
from cloister.quant.forward import LayerForward, LayerTensors
from cloister.types.registry import Registry

# Calibration statistics: sums over tokens, never a token's own values.


@dataclass(slots=True)
class InputStatistics:
    """Of one projection's inputs x [num_tokens, in], as they arrive in a model in few bits.

    Attributes:
        gram: [in, in] float32, the sum of x^T x over tokens.
        cross: [in, in] float32, the sum of y^T x, where y are the inputs of the same tokens in the float model.
        peaks: [in] greatest |x|.
        sums: [in] float64, the sum of |x|.
    """

    num_tokens: int
    gram: FloatArray
    cross: FloatArray
    peaks: FloatArray
    sums: npt.NDArray[np.float64]

    @classmethod
    def of(cls, num_inputs: int) -> InputStatistics:
        """Statistics of no token yet."""
        square = (num_inputs, num_inputs)
        return cls(
            num_tokens=0,
            gram=np.zeros(square, np.float32),
            cross=np.zeros(square, np.float32),
            peaks=np.zeros(num_inputs, np.float32),
            sums=np.zeros(num_inputs),
        )

    def add(self, rows: FloatArray, true_rows: FloatArray) -> None:
        """Takes in some tokens' inputs [num_tokens, in], here and in the float model."""
        magnitudes = np.abs(rows)
        self.num_tokens += len(rows)
        self.gram += rows.T @ rows
        self.cross += true_rows.T @ rows
        self.peaks = np.maximum(self.peaks, magnitudes.max(0))
        self.sums += magnitudes.sum(0)

    @property
    def mean_squares(self) -> FloatArray:
        """[in] mean of x^2: what a squared error of a weight costs, as far as its own input goes."""
        means: FloatArray = np.diagonal(self.gram) / np.float32(max(1, self.num_tokens))
        return means

    @property
    def mean_magnitudes(self) -> FloatArray:
        """[in] mean of |x|."""
        return (self.sums / max(1, self.num_tokens)).astype(np.float32)

    def rotated(self, rotation: int) -> FloatArray:
        """Returns the Gram matrix [in, in] of the inputs rotated in blocks of `rotation` (`backends.tensors.rotate_blocks`)."""
        return rotate_blocks(np.ascontiguousarray(rotate_blocks(self.gram, rotation).T), rotation)

    def divided_by(self, factors: FloatArray) -> InputStatistics:
        """Returns the statistics of the inputs divided by `factors` [in]."""
        gram, cross = (square / factors / factors[:, None] for square in (self.gram, self.cross))
        return InputStatistics(self.num_tokens, gram, cross, self.peaks / factors, self.sums / factors)


# One layer under calibration, with its inputs in the float model and in the quantized one.


class LayerTrial:
    """Runs windows through a layer with whatever tensors a calibrator has come up with so far.

    Args:
        tensors: the float model's.
        true_hidden, hidden: [num_windows, length, hidden] what reaches the layer in the float model, and in the other.
    """

    def __init__(
        self,
        layer: LayerSpec,
        tensors: FloatTensors,
        true_hidden: FloatArray,
        hidden: FloatArray,
        norm_eps: float,
        kv_dtype: KVDtype,
    ) -> None:
        self.layer, self.tensors = layer, tensors
        self._true_hidden, self._hidden = true_hidden, hidden
        self._eps, self._kv_dtype = norm_eps, kv_dtype
        self._walked: LayerTensors | None = None

    def walk(self, tensors: LayerTensors) -> Iterator[tuple[str, InputStatistics]]:
        """Yields the statistics of each of the layer's inputs, in the order in which it computes, running the text once.

        The caller puts the matrices that read those inputs into `tensors` before it asks for the next. After the last one
        both inputs are the layer's outputs.
        """
        true_run = LayerForward(self.layer, self.tensors, self._eps)
        run = LayerForward(self.layer, tensors, self._eps, self._kv_dtype)
        true_steps = [true_run.steps(window) for window in self._true_hidden]
        steps = [run.steps(window) for window in self._hidden]
        name, true_rows, rows = _take_turns(true_steps, steps)
        while name != "out":
            if name != "keys":
                statistics = InputStatistics.of(rows[0].shape[1])
                statistics.add(np.concatenate(rows), np.concatenate(true_rows))
                yield name, statistics
            name, true_rows, rows = _take_turns(true_steps, steps)
        self._true_hidden[:], self._hidden[:] = true_rows, rows
        self._walked = tensors

    def watch(self, tensors: LayerTensors, wanted: Sequence[str]) -> dict[str, InputStatistics]:
        """Returns the statistics of some inputs (named as in `LayerForward.steps`) while the layer has these tensors."""
        true_run = LayerForward(self.layer, self.tensors, self._eps)
        run = LayerForward(self.layer, tensors, self._eps, self._kv_dtype)
        found: dict[str, InputStatistics] = {}
        for true_window, window in zip(self._true_hidden, self._hidden, strict=True):
            true_rows, rows = _observe(true_run, true_window, wanted), _observe(run, window, wanted)
            for name in wanted:
                found.setdefault(name, InputStatistics.of(rows[name].shape[1])).add(rows[name], true_rows[name])
        return found

    def key_sizes(self) -> FloatArray:
        """Returns the root mean square of each channel of the keys after rotation, [num_kv_heads, head_dim]."""
        run = LayerForward(self.layer, self.tensors, self._eps)
        squares = [np.square(_observe(run, window, ["keys"])["keys"]).mean(0) for window in self._hidden]
        sizes: FloatArray = np.sqrt(np.mean(squares, axis=0, dtype=np.float32))
        return sizes

    def advance(self, tensors: LayerTensors) -> None:
        """Replaces both inputs by the layer's outputs, that of the model in few bits computed with `tensors`.

        Where `walk` has done so with those very tensors, nothing is left to do.
        """
        if self._walked is tensors:
            return
        true_run = LayerForward(self.layer, self.tensors, self._eps)
        run = LayerForward(self.layer, tensors, self._eps, self._kv_dtype)
        for number in range(len(self._hidden)):
            self._true_hidden[number] = true_run(self._true_hidden[number])
            self._hidden[number] = run(self._hidden[number])


def _take_turns(
    true_steps: Sequence[Iterator[tuple[str, FloatArray]]], steps: Sequence[Iterator[tuple[str, FloatArray]]]
) -> tuple[str, list[FloatArray], list[FloatArray]]:
    """Runs every window up to its next step; returns the step's name, and what flows there in the float model and in ours."""
    names, rows = zip(*map(next, [*true_steps, *steps]), strict=True)
    (name,) = set(names)
    return name, list(rows[: len(true_steps)]), list(rows[len(true_steps) :])


def _observe(run: LayerForward, window: FloatArray, wanted: Sequence[str]) -> dict[str, FloatArray]:
    found: dict[str, FloatArray] = {}
    for name, rows in run.steps(window):
        if name in wanted:
            found[name] = rows
        if len(found) == len(wanted):
            break
    return found


INPUTS_OF: Mapping[str, str] = {
    "q.weight": "qkv", "k.weight": "qkv", "v.weight": "qkv", "o.weight": "o",
    "gate.weight": "gate_up", "up.weight": "gate_up", "down.weight": "down",
}  # fmt: skip
"""Each projection, and the inputs that it reads, in the order in which a layer computes."""


class Calibrator(ABC):
    """A way to choose the codes of a layer.

    Attributes:
        name: its name in `CALIBRATORS`.
        uses_text: whether it runs text at all.
        rotates: whether what it finds still stands once inputs are rotated; factors for single channels do not.
    """

    name: ClassVar[str]
    uses_text: ClassVar[bool]
    rotates: ClassVar[bool]

    @abstractmethod
    def calibrate(self, tensors: FloatTensors, trial: LayerTrial, number_format: NumberFormat) -> dict[str, Tensor]:
        """Returns the layer's tensors, projections in the format; norms and biases may have taken factors in.

        Args:
            tensors: in float32, under their canonical names less `layers.L.`.
            trial: runs the calibration text through the layer.
        """


CALIBRATORS: Registry[Calibrator] = Registry("calibration method")
