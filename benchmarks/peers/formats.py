"""Other engines in each of their number formats, on the weights of a public model.

The folder of peers is that of `roster`: `v1` is a virtual environment with what llama-cpp-python needs, `v2` one with OpenVINO
and optimum-intel, whose export of Gemma 3 wants a transformers before 5. Converted models are kept beside the public one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np

from benchmarks.harness import ROOT, console
from benchmarks.peers.logits import Job
from benchmarks.perplexity import Case, FloatArray, Row

LLAMA_KINDS: Final = ("F32", "BF16", "Q8_0", "Q4_0", "Q4_K_M")
_TIMEOUT_S: Final = 3600.0


class PeerFailed(Exception):
    """Another engine could not convert the model or compute with it; the text says why."""


def list_llama(folder: Path, case: Case, num_threads: int) -> list[Row]:
    """Returns the rows of llama.cpp; their files are written by llama-quantize from the weights of the published one."""
    python, programs = folder / "v1" / "bin" / "python", folder / "lb" / "bin"
    package = next(iter(folder.glob("llama_cpp_python-*/")), None)
    if package is None or not python.exists() or not (programs / "llama-quantize").exists():
        console.print(f"llama.cpp is not in {folder}, left out", style="yellow")
        return []
    environment = {"PYTHONPATH": str(package), "LLAMA_CPP_LIB_PATH": str(programs)}

    def open_kind(kind: str | None, kv: str) -> tuple[float, Iterator[FloatArray]]:
        file = case.file if kind is None else convert_llama(programs, case, kind)
        job = partial(Job, "llama", str(file), case.windows.tolist(), num_threads=num_threads, settings={"kv": kv})
        return file_bits(file), run_peer(python, job, environment)

    rows = [Row("llama.cpp: GGUF as stored", partial(open_kind, None, "f16"))]
    rows += [Row(f"llama.cpp: {kind}", partial(open_kind, kind, "f16")) for kind in LLAMA_KINDS]
    return rows + [Row(f"llama.cpp: BF16, KV {kv.upper()}", partial(open_kind, "BF16", kv)) for kv in ("q8_0", "q4_0")]


def convert_llama(programs: Path, case: Case, kind: str) -> Path:
    """Returns the model in one of llama.cpp's formats, made from its float32 if it is not there."""
    file = case.file.parent / f"{case.name}-{kind}.gguf"
    if not file.exists():
        source = case.file if kind == "F32" else convert_llama(programs, case, "F32")
        unfinished = file.with_suffix(".partial")
        command = [str(programs / "llama-quantize"), "--allow-requantize", str(source), str(unfinished), kind, "1"]
        convert(command)
        unfinished.replace(file)
    return file


def file_bits(file: Path) -> float:
    """Returns bits per weight of a GGUF file, its header left out."""
    from gguf import GGUFReader

    tensors = GGUFReader(file).tensors
    return 8 * sum(int(tensor.n_bytes) for tensor in tensors) / sum(int(tensor.n_elements) for tensor in tensors)


def list_openvino(folder: Path, case: Case, num_threads: int) -> list[Row]:
    """Returns the rows of OpenVINO; optimum-cli converts the weights."""
    programs = folder / "v2" / "bin"
    if not (programs / "optimum-cli").exists():
        console.print(f"OpenVINO is not in {folder}, left out", style="yellow")
        return []

    def open_kind(kind: str, *flags: str) -> tuple[float, Iterator[FloatArray]]:
        model = case.file.parent / f"openvino-{kind}"
        weights = model / "openvino_model.bin"
        if not weights.exists():
            export_openvino(programs, case.directory, model, kind, *flags)
        job = partial(Job, "openvino", str(model), case.windows.tolist(), num_threads=num_threads)
        return 8 * weights.stat().st_size / case.num_weights, run_peer(programs / "python", job, {})

    return [
        Row("OpenVINO: fp32", partial(open_kind, "fp32")),
        Row("OpenVINO: int8", partial(open_kind, "int8")),
        Row("OpenVINO: int4, groups of 64", partial(open_kind, "int4", "--group-size", "64")),  # 128 divides no 576
    ]


def export_openvino(programs: Path, source: Path, model: Path, kind: str, *flags: str) -> None:
    """Writes a checkpoint in OpenVINO's format, in place of what was there.

    Args:
        programs: folder with optimum-cli.
        kind: number format of the weights, as optimum-cli names it.

    Raises:
        PeerFailed: it could not; the text says why.
    """
    unfinished = model.with_name(f"{model.name}.part")
    shutil.rmtree(unfinished, ignore_errors=True)
    command = [str(programs / "optimum-cli"), "export", "openvino", "-m", str(source), "--weight-format", kind]
    convert([*command, "--task", "text-generation-with-past", *flags, str(unfinished)])
    shutil.rmtree(model, ignore_errors=True)
    unfinished.rename(model)


def convert(command: Sequence[str]) -> None:
    """Runs a program that writes a model."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        raise PeerFailed(f"{Path(command[0]).name} ended with status {done.returncode}: {done.stderr[-1000:]}")


def run_peer(python: Path, job: Callable[..., Job], environment: Mapping[str, str]) -> Iterator[FloatArray]:
    """Yields what another engine computes, in a process of its own that writes it to a file first."""
    with TemporaryDirectory() as scratch:
        out = Path(scratch) / "logits.npy"
        paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment, "PYTHONPATH": os.pathsep.join(paths)}
        command = [str(python), "-m", "benchmarks.peers.logits", json.dumps(asdict(job(out=str(out))))]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        if done.returncode:
            raise PeerFailed(f"its worker ended with status {done.returncode}: {done.stderr[-2000:]}")
        yield from np.load(out, mmap_mode="r")
