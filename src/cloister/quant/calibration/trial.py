"""One layer under calibration: the text that reaches it, in the float model and in the one in few bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
