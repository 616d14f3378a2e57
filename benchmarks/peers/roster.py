"""Who is measured: ourselves in each format, and every peer that a folder holds, on each instruction set.

The folder: `v1`, `v2`, `v3` are virtual environments with transformers, OpenVINO GenAI and vLLM; `lb-ISA/bin` has the programs
of llama.cpp built for one instruction set, `lb/bin` those for all that this processor has, `ik-ISA/bin` those of its fork
ik_llama.cpp. `files` says where models are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

from benchmarks.peers.engines import OPENVINO_SETTINGS, Launch
from benchmarks.peers.files import STORED, ModelFiles, find_files
from benchmarks.peers.isa import UNKNOWN, InstructionSet
from benchmarks.peers.shapes import Shape
from benchmarks.peers.work import BASE, LONG_CONTEXT

IN_PROCESS: Final = (*BASE, "memory", *LONG_CONTEXT)
BITS: Final = {"bf16": 16, "int8": 8, STORED: 5, "int4": 4, "q4_k_m": 4, "qoq": 4}
"""Bits of a weight; formats of equal bits are compared where nobody knows what they lose."""


@dataclass(frozen=True, slots=True)
class Entrant:
    """An engine with one model in one format.

    Attributes:
        peer: whose it is; "cloister" is us.
        number_format: bf16, int8, int4, gguf for a published file as it is, or another.
        isa: name of the instruction set that it is held to; empty where that makes no difference.
        weights_bytes: of the file, or None where only the engine knows.
        first: how it starts for the time to the first token, where that differs.
    """

    peer: str
    number_format: str
    python: str
    launch: Launch
    isa: str = ""
    figures: Sequence[str] = IN_PROCESS
    weights_bytes: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    first: Entrant | None = None

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.peer, self.number_format, self.isa)))

    @property
    def bits(self) -> int:
        return BITS.get(self.number_format, 0)


@dataclass(frozen=True, slots=True)
class Roster:
    """Builds entrants for one folder of peers.

    Attributes:
        formats: ours; peers take part in those of as many bits.
        settings: more settings of ours, by name.
        isas: what everybody is held to in turn.
        best: the most that this processor has: nobody is held to that.
    """

    folder: Path
    num_threads: int
    formats: Sequence[str]
    settings: Mapping[str, Any]
    isas: Sequence[InstructionSet] = (UNKNOWN,)
    best: InstructionSet = UNKNOWN

    def entrants(self, shape: Shape) -> list[Entrant]:
        """Returns everybody who is there, one instruction set after the other."""
        return [entrant for isa in self.isas for entrant in self._list_entrants(shape, isa)]

    def missing(self, shape: Shape) -> list[str]:
        """Names the peers that are not there."""
        wanted = ("transformers", "vllm", "llama.cpp", "openvino")
        present = {(entrant.peer, entrant.isa) for entrant in self.entrants(shape)}
        return [f"{peer} {isa.name}" for isa in self.isas for peer in wanted if (peer, isa.name) not in present]

    def files(self, shape: str) -> ModelFiles:
        """Returns where a shape's models are.

        Raises:
            ModelUnavailable: it is a public model that cannot be fetched.
        """
        return _find_files(self.folder, shape)

    def limits(self, shape: Shape, isa: InstructionSet) -> Entrant:
        """Returns what measures the machine, with a torch of the peers' or our own."""
        python = self._python_with("torch", "v2", "v1", "v3") or sys.executable  # v2 has OpenVINO's products besides
        launch = self._launch("limits", shape, self.files(shape.name).checkpoint, **self._held(isa.openvino, isa))
        return Entrant("limits", "", python, launch, isa.name, (), environment=self._environment(isa))

    def embedded(self, shape: Shape) -> Entrant:
        """Returns our embedded model, for its time to the first token."""
        launch = Launch(
            "cloister", "cloister-5m", self.num_threads, shape.kv_token_bytes, 2048, {**self.settings, "max_model_len": 2048}
        )
        return Entrant("cloister", "embedded", sys.executable, launch, figures=())

    def _list_entrants(self, shape: Shape, isa: InstructionSet) -> Iterator[Entrant]:
        yield from self._cloister(shape, isa)
        bits = {BITS.get(number_format) for number_format in self.formats}
        peers = (self._transformers, self._vllm, self._llama, self._openvino)
        yield from (entrant for list_peer in peers for entrant in list_peer(shape, isa) if entrant.bits in bits)

    def _cloister(self, shape: Shape, isa: InstructionSet) -> Iterator[Entrant]:
        files = self.files(shape.name)
        is_native = self.settings.get("backend", "native") == "native"
        held = self._held({"kernels": isa.name}, isa) if is_native else {}
        for number_format in self.formats:
            is_stored = number_format == STORED
            model = files.stored if is_stored else files.checkpoint
            if model is None:
                continue
            quant = {} if is_stored or number_format == "bf16" else {"quant": number_format}
            # random answers repeat themselves, which drafts are good at: `benchmarks.peers.speculation` measures those
            settings = {"speculate": "none", **quant, **self.settings}
            size = model.stat().st_size if is_stored else None
            environment = self._environment(isa)
            launch = self._launch("cloister", shape, model, **settings, **held)
            yield Entrant(
                "cloister", number_format, sys.executable, launch, isa.name, weights_bytes=size, environment=environment
            )
            if not held:  # a server is a process of its own: no setting tells it another instruction set
                http = self._launch("cloister-http", shape, model, **settings)
                yield Entrant(
                    "cloister over HTTP",
                    number_format,
                    sys.executable,
                    http,
                    isa.name,
                    ("http16", "memory"),
                    weights_bytes=size,
                    environment=environment,
                )

    def _transformers(self, shape: Shape, isa: InstructionSet) -> Iterator[Entrant]:
        if python := self._python_with("transformers", "v1"):
            model = self.files(shape.name).checkpoint
            yield Entrant(
                "transformers",
                "bf16",
                python,
                self._launch("transformers", shape, model),
                isa.name,
                weights_bytes=_checkpoint_bytes(model),
                environment=self._environment(isa),
            )

    def _vllm(self, shape: Shape, isa: InstructionSet) -> Iterator[Entrant]:
        if python := self._python_with("vllm", "v3"):
            model = self.files(shape.name).checkpoint
            environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", **self._environment(isa)}
            launch = self._launch("vllm", shape, model)
            size = _checkpoint_bytes(model)
            yield Entrant("vllm", "bf16", python, launch, isa.name, weights_bytes=size, environment=environment)

    def _llama(self, shape: Shape, isa: InstructionSet) -> Iterator[Entrant]:
        for peer, folder in (("llama.cpp", "lb"), ("ik_llama.cpp", "ik")):
            programs = self.folder / f"{folder}-{isa.name}" / "bin"
            if isa == self.best and not (programs / "llama-bench").exists():
                programs = self.folder / folder / "bin"
            if not (programs / "llama-bench").exists():
                continue
            is_fork = folder == "ik"
            for number_format, model in self.files(shape.name).gguf.items():
                if not model.exists() or (is_fork and number_format == "bf16"):
                    continue
                launch = self._launch("llama", shape, model, bin=str(programs), is_fork=is_fork)
                first = None if is_fork else self._llama_python(shape, number_format, model, programs, isa)
                figures = tuple(name for name in IN_PROCESS if name != "memory") if is_fork else IN_PROCESS
                size = model.stat().st_size
                yield Entrant(peer, number_format, sys.executable, launch, isa.name, figures, size, first=first)

    def _llama_python(
        self, shape: Shape, number_format: str, model: Path, programs: Path, isa: InstructionSet
    ) -> Entrant | None:
        package = next(iter(self.folder.glob("llama_cpp_python-*/")), None)
        python = self._python("v1")
        if package is None or python is None:
            return None
        environment = {"PYTHONPATH": str(package), "LLAMA_CPP_LIB_PATH": str(programs)}
        launch = self._launch("llama-python", shape, model)
        return Entrant("llama.cpp", number_format, python, launch, isa.name, environment=environment)

    def _openvino(self, shape: Shape, isa: InstructionSet) -> Iterator[Entrant]:
        python = self._python("v2")
        for number_format, model in self.files(shape.name).openvino.items() if python else ():
            weights = model / "openvino_model.bin"
            if weights.exists():
                settings = {**OPENVINO_SETTINGS, "properties": self._held(isa.openvino, isa)}
                launch = self._launch("openvino", shape, model, **settings)
                size = weights.stat().st_size
                environment = self._environment(isa)
                yield Entrant(
                    "openvino", number_format, str(python), launch, isa.name, weights_bytes=size, environment=environment
                )

    def _held(self, settings: Mapping[str, Any], isa: InstructionSet) -> dict[str, Any]:
        """Returns settings that hold an engine to less than the processor has."""
        return {} if isa == self.best else dict(settings)

    def _environment(self, isa: InstructionSet) -> dict[str, str]:
        return self._held(isa.environment, isa)

    def _launch(self, engine: str, shape: Shape, model: Path, **settings: Any) -> Launch:
        return Launch(engine, str(model), self.num_threads, shape.kv_token_bytes, shape.vocab_size, settings)

    def _python(self, environment: str) -> str | None:
        path = self.folder / environment / "bin" / "python"
        return str(path) if path.exists() else None

    def _python_with(self, package: str, *environments: str) -> str | None:
        """Returns the Python of the first virtual environment that has a package."""
        having = (name for name in environments if any(self.folder.glob(f"{name}/lib/python3*/site-packages/{package}")))
        return next(filter(None, map(self._python, having)), None)


@cache
def _find_files(folder: Path, shape: str) -> ModelFiles:
    """As `files.find_files`, whose check of a published file's digest takes a while."""
    return find_files(folder, shape)


def _checkpoint_bytes(model: Path) -> int:
    return sum(file.stat().st_size for file in model.glob("*.safetensors"))
