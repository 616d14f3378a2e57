"""Who is measured: ourselves in each format, and every peer that a folder holds.

The folder: `v1`, `v2`, `v3` are virtual environments with transformers, OpenVINO GenAI and vLLM; `lb/bin` has the programs
of llama.cpp; `m/SHAPE`, `g/SHAPE-QUANT.gguf` and `ov/SHAPE-FORMAT` are models.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.peers.engines import Launch
from benchmarks.peers.shapes import Shape

IN_PROCESS: Final = ("prefill512", "prefill2048", "decode", "together8", "together16", "memory")
BITS: Final = {"bf16": 16, "fp16": 16, "int8": 8, "int4": 4, "qoq": 4}
"""Which formats are compared with each other: those of equal bits per weight."""
_GGUF: Final = (("bf16", "bf16"), ("int8", "q8_0"), ("int4", "q4_0"))
_OPENVINO: Final = (("bf16", "fp16"), ("int8", "int8"), ("int4", "int4"))
_OV_CACHE_GIB: Final = 1
_OV_BATCHED_TOKENS: Final = 512


@dataclass(frozen=True, slots=True)
class Entrant:
    """An engine with one model in one format.

    Attributes:
        peer: whose it is; "cloister" is us.
        number_format: bf16, int8, int4, or another of ours.
        weights_bytes: of the file, or None where only the engine knows.
        first: how it starts for the time to the first token, where that differs.
    """

    peer: str
    number_format: str
    python: str
    launch: Launch
    figures: Sequence[str] = IN_PROCESS
    weights_bytes: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    first: Entrant | None = None

    @property
    def name(self) -> str:
        return f"{self.peer} {self.number_format}".strip()

    @property
    def bits(self) -> int:
        return BITS.get(self.number_format, 0)


@dataclass(frozen=True, slots=True)
class Roster:
    """Builds entrants for one folder of peers.

    Attributes:
        settings: more settings of ours, by name.
    """

    folder: Path
    num_threads: int
    formats: Sequence[str]
    settings: Mapping[str, Any]

    def entrants(self, shape: Shape) -> list[Entrant]:
        """Returns everybody who is there."""
        return [
            *self._cloister(shape),
            *self._transformers(shape),
            *self._vllm(shape),
            *self._llama(shape),
            *self._openvino(shape),
        ]

    def missing(self, shape: Shape) -> list[str]:
        """Names the peers that are not there."""
        wanted = ("transformers", "vllm", "llama.cpp", "openvino")
        present = {entrant.peer for entrant in self.entrants(shape)}
        return [peer for peer in wanted if peer not in present]

    def model(self, shape: str) -> Path:
        return self.folder / "m" / shape

    def limits(self, shape: Shape) -> Entrant:
        """Returns what measures the machine, with a torch of the peers' or our own."""
        python = self._python("v1") or sys.executable
        return Entrant("limits", "", python, self._launch("limits", shape, self.model(shape.name)))

    def embedded(self, shape: Shape) -> Entrant:
        """Returns our embedded model, for its time to the first token."""
        launch = Launch(
            "cloister", "cloister-5m", self.num_threads, shape.kv_token_bytes, 2048, {**self.settings, "max_model_len": 2048}
        )
        return Entrant("cloister", "embedded", sys.executable, launch, ())

    def _cloister(self, shape: Shape) -> Iterator[Entrant]:
        for number_format in self.formats:
            quant = {} if number_format == "bf16" else {"quant": number_format}
            settings = {**quant, **self.settings}
            launch = self._launch("cloister", shape, self.model(shape.name), **settings)
            yield Entrant("cloister", number_format, sys.executable, launch)
            http = self._launch("cloister-http", shape, self.model(shape.name), **settings)
            yield Entrant("cloister over HTTP", number_format, sys.executable, http, ("http16", "memory"))

    def _transformers(self, shape: Shape) -> Iterator[Entrant]:
        if python := self._python("v1"):
            model = self.model(shape.name)
            yield Entrant(
                "transformers",
                "bf16",
                python,
                self._launch("transformers", shape, model),
                weights_bytes=_checkpoint_bytes(model),
            )

    def _vllm(self, shape: Shape) -> Iterator[Entrant]:
        if (python := self._python("v3")) and list(self.folder.glob("v3/lib/python3*/site-packages/vllm")):
            model = self.model(shape.name)
            environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
            launch = self._launch("vllm", shape, model)
            yield Entrant("vllm", "bf16", python, launch, weights_bytes=_checkpoint_bytes(model), environment=environment)

    def _llama(self, shape: Shape) -> Iterator[Entrant]:
        programs = self.folder / "lb" / "bin"
        if not (programs / "llama-bench").exists():
            return
        for number_format, quant in _GGUF:
            model = self.folder / "g" / f"{shape.name}-{quant}.gguf"
            if model.exists():
                launch = self._launch("llama", shape, model, bin=str(programs))
                first = self._llama_python(shape, number_format, model, programs)
                yield Entrant(
                    "llama.cpp", number_format, sys.executable, launch, weights_bytes=model.stat().st_size, first=first
                )

    def _llama_python(self, shape: Shape, number_format: str, model: Path, programs: Path) -> Entrant | None:
        package = next(iter(self.folder.glob("llama_cpp_python-*")), None)
        python = self._python("v1")
        if package is None or python is None:
            return None
        environment = {"PYTHONPATH": str(package), "LLAMA_CPP_LIB_PATH": str(programs)}
        launch = self._launch("llama-python", shape, model)
        return Entrant("llama.cpp", number_format, python, launch, environment=environment)

    def _openvino(self, shape: Shape) -> Iterator[Entrant]:
        python = self._python("v2")
        for number_format, suffix in _OPENVINO if python else ():
            model = self.folder / "ov" / f"{shape.name}-{suffix}"
            weights = model / "openvino_model.bin"
            if weights.exists():
                launch = self._launch("openvino", shape, model, cache_gib=_OV_CACHE_GIB, max_batched_tokens=_OV_BATCHED_TOKENS)
                yield Entrant("openvino", number_format, str(python), launch, weights_bytes=weights.stat().st_size)

    def _launch(self, engine: str, shape: Shape, model: Path, **settings: Any) -> Launch:
        return Launch(engine, str(model), self.num_threads, shape.kv_token_bytes, shape.vocab_size, settings)

    def _python(self, environment: str) -> str | None:
        path = self.folder / environment / "bin" / "python"
        return str(path) if path.exists() else None


def _checkpoint_bytes(model: Path) -> int:
    return sum(file.stat().st_size for file in model.glob("*.safetensors"))
