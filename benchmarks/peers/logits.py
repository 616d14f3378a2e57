"""Logits of given tokens from one engine, in the Python of that engine: `PYTHON -m benchmarks.peers.logits JOB`.

JOB is JSON (`GenerationJob`). Windows are sequences of their own; all rows of logits of all of them become one array in a file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Job:
    """What one worker computes.

    Attributes:
        engine: a name of `ENGINES`.
        model: file or folder of the model.
        windows: token ids, all windows of one length.
        out: the file to write, float32 [num_windows, length, vocab] as numpy saves it.
        settings: what is only this engine's, by name.
    """

    engine: str
    model: str
    windows: Sequence[Sequence[int]]
    out: str
    num_threads: int
    settings: Mapping[str, Any] = field(default_factory=dict)


def run_llama(job: Job) -> Iterator[Any]:
    """Yields the logits of each window from llama.cpp; settings: `kv` ("f16", "q8_0", "q4_0") of keys and values."""
    package = import_module("llama_cpp")
    length = len(job.windows[0])
    kind = {"f16": 1, "q4_0": 2, "q8_0": 8}[job.settings.get("kv", "f16")]  # numbers of ggml's types
    llama = package.Llama(
        job.model,
        n_ctx=length,
        n_batch=length,
        n_ubatch=length,
        n_threads=job.num_threads,
        n_threads_batch=job.num_threads,
        logits_all=True,
        flash_attn=True,  # as llama.cpp's own programs choose; without it values cannot be cached in few bits
        type_k=kind,
        type_v=kind,
        verbose=False,
    )
    for window in job.windows:
        llama.reset()
        llama.eval(list(window))
        yield llama.scores[: len(window)]


def run_openvino(job: Job) -> Iterator[Any]:
    """Yields the logits of each window from OpenVINO's CPU plugin; settings are its properties."""
    numpy, openvino = import_module("numpy"), import_module("openvino")
    core = openvino.Core()
    properties = {"INFERENCE_NUM_THREADS": job.num_threads, **job.settings}
    request = core.compile_model(Path(job.model) / "openvino_model.xml", "CPU", properties).create_infer_request()
    names = {name for tensor in request.model_inputs for name in tensor.get_names()}
    for window in job.windows:
        request.reset_state()
        inputs = {
            "input_ids": numpy.array([window], numpy.int64),
            "attention_mask": numpy.ones((1, len(window)), numpy.int64),
            "position_ids": numpy.arange(len(window), dtype=numpy.int64)[None],
            "beam_idx": numpy.zeros(1, numpy.int32),
        }
        yield request.infer({name: value for name, value in inputs.items() if name in names})["logits"][0]


ENGINES: Final[Mapping[str, Callable[[Job], Iterator[Any]]]] = {"llama": run_llama, "openvino": run_openvino}


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    numpy = import_module("numpy")
    written: Any = None
    for number, rows in enumerate(ENGINES[job.engine](job)):
        if written is None:
            shape = (len(job.windows), *rows.shape)
            written = numpy.lib.format.open_memmap(job.out, "w+", numpy.float32, shape)
        written[number] = rows
    written.flush()


if __name__ == "__main__":
    main()
