"""What a number format loses in each engine on a public model, as `python -m benchmarks.quality` measured it. Pure but for one
file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.models import MODELS
from benchmarks.peers.files import STORED
from benchmarks.peers.roster import Entrant

MODEL: Final = "smollm2"
_OURS: Final = {
    "bf16": "bfloat16",
    "int8": "int8",
    "int4": "int4, groups of 32",
    "qoq": "qoq, KV int4",
    STORED: "GGUF as stored",
}
_LLAMA: Final = {"bf16": "BF16", "int8": "Q8_0", "int4": "Q4_0", "q4_k_m": "Q4_K_M", STORED: "GGUF as stored"}
_OPENVINO: Final = {"int8": "int8", "int4": "int4, groups of 64"}
_FACTOR = 1.25


@dataclass(frozen=True, slots=True)
class Loss:
    """What is lost.

    Attributes:
        perplexity: over that of the truth, in %.
        rms: of the change of log-probabilities: perplexity of so short a text moves by luck.
    """

    perplexity: float
    rms: float

    def __str__(self) -> str:
        return f"{self.perplexity:+.2f}, {self.rms:.2f}"


@dataclass(frozen=True, slots=True)
class Losses:
    """Losses by the row's label in quality.json; those of the best kernels come first."""

    by_label: Mapping[str, Loss]

    @classmethod
    def read(cls, path: Path) -> Losses:
        """Reads them; there are none where nothing was measured."""
        if not path.exists():
            return cls({})
        rows = json.loads(path.read_text(encoding="utf-8"))["figures"].get(MODELS[MODEL].title, [])
        return cls({str(row["row"]): Loss(row["loss, %"], row["rms of log-probabilities"]) for row in rows})

    def of(self, entrant: Entrant) -> Loss | None:
        """Returns the loss of an engine and format, None where it is not known.

        The same format on other kernels stands in for one that was not measured on these: codes and scales are the same.
        """
        engine, number_format = entrant.launch.engine, entrant.number_format
        if engine == "llama":  # ik_llama.cpp reads the same files, and rounds inputs alike
            return self._find(f"llama.cpp: {_LLAMA.get(number_format)}")
        if engine == "openvino":
            return self._find(f"OpenVINO: {_OPENVINO.get(number_format)}")
        if not engine.startswith("cloister"):
            return None
        form = _OURS.get(number_format)
        if entrant.launch.settings.get("backend") == "torch":
            return self._find(f"torch: {form}")
        exact = self._find(f"native {entrant.isa}: {form}")
        if exact is not None:
            return exact
        return next(
            (loss for label, loss in self.by_label.items() if label.startswith("native ") and label.endswith(f": {form}")), None
        )

    def are_comparable(self, ours: Entrant, peer: Entrant) -> bool:
        """Says whether a peer's format is a fair match for ours: one that changes log-probabilities about as much, or less.

        A published file's own codes are the truth by which losses are counted, so who serves it as stored is compared with who
        does the same. Where a loss is unknown, bits decide.
        """
        if STORED in (ours.number_format, peer.number_format):
            return ours.number_format == peer.number_format
        our_loss, peer_loss = self.of(ours), self.of(peer)
        if our_loss is None or peer_loss is None:
            return ours.bits == peer.bits
        return peer_loss.rms <= _FACTOR * our_loss.rms

    def _find(self, label: str) -> Loss | None:
        return self.by_label.get(label)


def show_loss(loss: Loss | None) -> str:
    return "" if loss is None else str(loss)
