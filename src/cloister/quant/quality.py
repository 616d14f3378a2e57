"""The cost of a quantization format: perplexity of held-out text, and agreement of the most likely token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cloister.backends.base import Weights
from cloister.backends.spec import DecoderSpec
from cloister.backends.tensors import Tensor, dequantized
from cloister.quant.base import FloatArray, KVDtype
from cloister.quant.forward import LayerForward, check_forward, multiply, rms_norm, soft_cap

Progress = Callable[[], object]
IntArray = npt.NDArray[np.int32]
_LOGIT_ROWS = 128  # rows of logits at once; a vocabulary is wide


@dataclass(frozen=True, slots=True)
class TextScore:
    """The scores of a model on a text.

    Attributes:
        losses: [num_windows, length - 1] float32, minus the log-probability of each token but the first, in nats.
        choices: [num_windows, length - 1] int32, the likeliest token at each of those places.
    """

    losses: FloatArray
    choices: IntArray

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.losses.mean(dtype=np.float64)))

    def agreement(self, other: TextScore) -> float:
        """Returns the share of places at which both would go on with the same token."""
        return float((self.choices == other.choices).mean())


def layer_tensors(weights: Weights, number: int) -> dict[str, Tensor]:
    """Reads one layer's tensors, under their names less `layers.L.`."""
    prefix = f"layers.{number}."
    return {name.removeprefix(prefix): weights.read(name) for name in weights.names() if name.startswith(prefix)}


def embed(spec: DecoderSpec, weights: Weights, windows: IntArray) -> FloatArray:
    """Returns the embeddings [num_windows, length, hidden] of windows [num_windows, length], scaled as the model does."""
    rows = np.asarray(dequantized(weights.read("embed.weight"))[windows], np.float32)
    return rows * np.float32(spec.embedding_scale) if spec.embedding_scale != 1 else rows


def measure(
    spec: DecoderSpec, weights: Weights, windows: IntArray, kv_dtype: KVDtype = "bfloat16", progress: Progress = lambda: None
) -> TextScore:
    """Runs windows of text [num_windows, length] through a model.

    Args:
        progress: called once for every layer and once for the head.

    Raises:
        ConfigError: it is not of a shape that text runs through (`limits`).
    """
    check_forward(spec)
    hidden = embed(spec, weights, windows)
    for number, layer in enumerate(spec.layers):
        run = LayerForward(layer, layer_tensors(weights, number), spec.norm_eps, kv_dtype)
        for window in range(len(windows)):
            hidden[window] = run(hidden[window])
        progress()
    normed = rms_norm(hidden, np.asarray(weights.read("norm.weight"), np.float32), spec.norm_eps)
    outcome = _judge(spec, normed, weights.read("embed.weight" if spec.tied_embeddings else "head.weight"), windows)
    progress()
    return outcome


def _judge(spec: DecoderSpec, normed: FloatArray, head: Tensor, windows: IntArray) -> TextScore:
    rows, targets = normed[:, :-1].reshape(-1, normed.shape[-1]), windows[:, 1:].reshape(-1)
    losses, choices = np.empty(len(rows), np.float32), np.empty(len(rows), np.int32)
    for start in range(0, len(rows), _LOGIT_ROWS):
        part = slice(start, start + _LOGIT_ROWS)
        logits = soft_cap(multiply(rows[part], head) * np.float32(spec.logit_scale), spec.logit_softcap)
        choices[part] = logits.argmax(1)
        chosen = logits[np.arange(len(logits)), targets[part]]
        peaks = logits.max(1)
        losses[part] = np.log(np.exp(logits - peaks[:, None]).sum(1)) + peaks - chosen
    shape = windows[:, 1:].shape
    return TextScore(losses.reshape(shape), choices.reshape(shape))
