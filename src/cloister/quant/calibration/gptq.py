"""GPTQ (Frantar et al. 2022): rounds weights column by column; the columns left compensate for the error."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from cloister.backends.tensors import ProgressiveTensor, QuantizedTensor, Tensor, rotate_blocks
from cloister.quant.base import THREAT, FloatArray, NumberFormat, reciprocal
from cloister.quant.calibration.base import CALIBRATORS, INPUTS_OF, Calibrator, InputStatistics, LayerTrial
from cloister.quant.folding import FloatTensors
from cloister.quant.nvfp4 import round_to_e2m1

_DAMPING = 0.05  # of the mean of the diagonal (section 3.3, step 3); on 8,192 tokens the paper's 0.01 loses more
_FIT_DAMPING = 0.5  # the fit follows the text more closely than the codes do, and must not learn it by heart
_BLOCK = 128  # inputs that meet the errors of all before them at once (step 2)


class GPTQ(Calibrator):
    """Fits and rounds column by column.

    Each projection is fitted first, by least squares, to give on the inputs that really reach it what the float model's gives
    on its own: so it makes up for what was rounded before it, inputs, keys and values among that. The grid (scales and zeros)
    is the format's own, fixed before any error is passed on, so inputs can be taken in any order whatever the groups: the
    greatest on the Hessian's diagonal comes first.
    """

    name = "gptq"
    rotates = True
    uses_text = True

    def calibrate(self, tensors: FloatTensors, trial: LayerTrial, number_format: NumberFormat) -> dict[str, Tensor]:
        found: dict[str, Tensor] = dict(tensors)
        for inputs, statistics in trial.walk(found):
            rotation = number_format.options.rotation_of(len(statistics.gram))
            gram = statistics.rotated(rotation)
            importance = np.diagonal(gram) / np.float32(max(1, statistics.num_tokens))
            hessian = damped(gram, _DAMPING)
            order = np.argsort(-np.diagonal(hessian), kind="stable")
            factor = feedback(hessian[np.ix_(order, order)])
            correction = fit_inputs(statistics)
            for name in (name for name, read in INPUTS_OF.items() if read == inputs):
                weight = tensors[name] @ correction
                start = number_format.quantize(weight, importance)
                found[name] = choose_codes(rotate_blocks(weight, rotation), start, factor, order)
        return found


def fit_inputs(statistics: InputStatistics) -> FloatArray:
    """Returns C, [in, in], for which a weight W C makes of the inputs x what W makes of those of the float model, y.

    It minimises |x C^T - y|^2 over the text, and stays near the identity where the text says little: C = (y^T x) (x^T x)^-1.
    """
    gram = damped(statistics.gram, _FIT_DAMPING).astype(np.float32)  # damped so much that float32 solves it
    extra = np.diag(np.diagonal(gram) - np.diagonal(statistics.gram))
    fitted: FloatArray = np.linalg.solve(gram, (statistics.cross + extra).T).T
    return fitted


def damped(gram: FloatArray, share: float) -> npt.NDArray[np.float64]:
    """Returns a Gram matrix [in, in] in float64 with a share of the mean of its diagonal added there.

    An input that no token used gets 1 more: whatever its weight, it changes no output.
    """
    diagonal = np.diagonal(gram).astype(np.float64)
    return gram.astype(np.float64) + np.diag(share * diagonal.mean() + (diagonal == 0))


def feedback(gram: npt.NDArray[np.float64]) -> FloatArray:
    """Returns how an input's rounding error is made up for by those after it: M [in, in] float32, upper with ones.

    H = M D M^T with D diagonal. QuIP (Chee et al. 2023, theorem 6) shows that to round w_k + (w - q)[<k] M[<k, k] for k = 0, 1
    and so on is what GPTQ does by the inverse of H, which is then never formed: one Cholesky decomposition, from the end.
    """
    factor = np.linalg.cholesky(gram[::-1, ::-1])[::-1, ::-1]
    scaled: FloatArray = (factor / np.diagonal(factor)).astype(np.float32)
    return scaled


def choose_codes(
    weight: FloatArray, start: QuantizedTensor, factor: FloatArray, order: npt.NDArray[np.int64]
) -> QuantizedTensor:
    """Returns `start` with other codes on the same grid (algorithm 1).

    Args:
        weight: [out, in], rotated as `start` is.
        factor: of the inputs in `order` (`feedback`).
    """
    grid = _Grid.of(start)
    columns = np.ascontiguousarray(weight.T[order])  # [in, out], so that an input's weights lie side by side
    errors, codes = np.empty_like(columns), np.empty(columns.shape, np.uint8)
    for begin in range(0, len(order), _BLOCK):
        end = min(begin + _BLOCK, len(order))
        wanted = columns[begin:end] + factor[:begin, begin:end].T @ errors[:begin]
        for place in range(begin, end):
            aim = wanted[place - begin] + factor[begin:place, place] @ errors[begin:place]
            codes[order[place]], rounded = grid.round(aim, int(order[place]))
            np.subtract(columns[place], rounded, out=errors[place])
    return replace(start, codes=np.ascontiguousarray(codes.T))


@dataclass(frozen=True, slots=True)
class _Grid:
    """Where codes may lie: w = steps * (code - zeros), [num_groups, out] each, codes from `lowest` to `highest`; of `is_e2m1`
    only those of floats."""

    steps: FloatArray
    inverse: FloatArray
    zeros: FloatArray
    lowest: FloatArray
    highest: FloatArray
    group_size: int
    is_e2m1: bool = False

    @classmethod
    def of(cls, tensor: QuantizedTensor) -> _Grid:
        """Returns the grid of a tensor that a format made."""
        if isinstance(tensor, ProgressiveTensor):
            scales = tensor.group_scales.T.astype(np.float32)
            zeros, steps = tensor.zeros.T.astype(np.float32), scales * tensor.channel_scales
            reach = np.floor(127 / scales)  # the int8 level must not leave -127 to 127
            lowest, highest = np.maximum(zeros - reach, 0), np.minimum(zeros + reach, 15)
            return cls(steps, reciprocal(steps), zeros, lowest, highest, tensor.group_size)
        factors = np.float32(1) if tensor.output_scales is None else tensor.output_scales
        steps = np.ascontiguousarray(tensor.scales.T * factors)
        zeros = np.full_like(steps, 2 ** (tensor.bits - 1))
        lowest = np.full_like(steps, 1 if tensor.bits == 8 else 0)
        highest = np.full_like(steps, 2**tensor.bits - 1)
        return cls(steps, reciprocal(steps), zeros, lowest, highest, tensor.group_size, tensor.is_e2m1)

    def round(self, values: FloatArray, number: int) -> tuple[FloatArray, FloatArray]:
        """Returns codes and the weights they stand for, [out] each, of the weights of input `number`."""
        group = number // self.group_size
        levels = values * self.inverse[group]
        codes = (round_to_e2m1(levels) if self.is_e2m1 else np.rint(levels)) + self.zeros[group]
        np.clip(codes, self.lowest[group], self.highest[group], out=codes)
        return codes, (codes - self.zeros[group]) * self.steps[group]


CALIBRATORS.register("gptq", THREAT)(GPTQ())
