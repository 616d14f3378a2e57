"""One layer under calibration: the text that reaches it, in the float model and in the one in few bits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cloister.backends.spec import LayerSpec
from cloister.quant.base import FloatArray, KVDtype
from cloister.quant.calibration.statistics import InputStatistics
from cloister.quant.folding import FloatTensors
from cloister.quant.forward import LayerForward, LayerTensors


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
        """Replaces both inputs by the layer's outputs, that of the model in few bits computed with `tensors`."""
        true_run = LayerForward(self.layer, self.tensors, self._eps)
        run = LayerForward(self.layer, tensors, self._eps, self._kv_dtype)
        for number in range(len(self._hidden)):
            self._true_hidden[number] = true_run(self._true_hidden[number])
            self._hidden[number] = run(self._hidden[number])


def _observe(run: LayerForward, window: FloatArray, wanted: Sequence[str]) -> dict[str, FloatArray]:
    found: dict[str, FloatArray] = {}
    for name, rows in run.steps(window):
        if name in wanted:
            found[name] = rows
        if len(found) == len(wanted):
            break
    return found
