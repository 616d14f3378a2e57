"""Whole answers on one shape, ours in each number format beside transformers' continuous batching and vLLM.

`python -m benchmarks.gpu.answers SHAPE --models DIR --records FILE`; with `--peers` the other engines, else ours.
Random weights, random prompts, greedy, no prefix reused.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu.models import FORMS, LAYER_BITS, PEAKS, WRITTEN, Form
from benchmarks.gpu.records import Record, Records
from benchmarks.peers.engines import Cloister, Launch, Vllm, check_lengths
from benchmarks.peers.shapes import Roof, Shape
from benchmarks.peers.work import NUM_NEW, Engine, Figure, Tokens, take_sample, warm_up

DECODE: Final = Figure("decode", "decode", 512, "decode after 512")
FIGURES: Final = (
    Figure("prefill2048", "prefill", 2048, "prefill 2048"),
    DECODE,
    *(Figure(f"together{count}", "together", count, f"{count} at once") for count in (16, 64, 256)),
)
PEER_FIGURES: Final = tuple(figure for figure in FIGURES if figure.kind == "together" and figure.size <= 64)
"""The others are built for many requests, and one alone takes transformers very long."""
TINY_FIGURES: Final = (DECODE, Figure("together2", "together", 2, "2 at once"))
CONTEXT: Final = 2304
NUM_WARMING: Final = 1
NUM_SAMPLES: Final = 3
_COMPANY: Final = (15, 63)
"""Others beside a request, under which its answer must stay the same (batch invariance)."""


class OnDevice(Cloister):
    """Our engine, which also shows what it answered."""

    def answer(self, prompts: Sequence[Sequence[int]], num_new: int) -> list[list[int]]:
        sampling = self._sampling(temperature=0.0, max_tokens=num_new, ignore_eos=True)
        answers = self._llm.generate([list(prompt) for prompt in prompts], sampling)
        return [list(answer.outputs[0].token_ids) for answer in answers]


class GenerateBatch:
    """Continuous batching of transformers, bf16; its manager is kept, so that its cache and its graphs are made once."""

    def __init__(self, launch: Launch) -> None:
        torch, transformers = import_module("torch"), import_module("transformers")
        loader = transformers.AutoModelForCausalLM
        model = loader.from_pretrained(launch.model, dtype=torch.bfloat16, attn_implementation="sdpa")
        self._model = model.to(launch.settings["device"]).eval()
        self._make_settings: Callable[..., Any] = transformers.GenerationConfig
        self._options: dict[str, Any] = {"persistent_manager": True}
        if launch.settings["device"] == "cpu":  # it would take all the host's memory
            config = transformers.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=256)
            self._options["continuous_batching_config"] = config
        count = launch.settings["max_num_seqs"] if launch.settings["device"] == "cuda" else 2
        self.generate(Tokens(launch.vocab_size, 1).draw_mixed(count), NUM_NEW)  # it sizes its cache by the first call

    def generate(self, prompts: Sequence[Sequence[int]], num_new: int) -> None:
        settings = self._make_settings(max_new_tokens=num_new, do_sample=False, eos_token_id=-1, pad_token_id=0)
        answers = self._model.generate_batch([list(prompt) for prompt in prompts], generation_config=settings, **self._options)
        check_lengths([len(answer.generated_tokens) for answer in answers.values()], len(prompts), num_new)

    def close(self) -> None:
        """Ends with its process."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures ours, or every other engine that is installed; one that fails is recorded and left."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape")
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--records", type=Path, required=True)
    parser.add_argument("--peers", action="store_true", help="the other engines, on the fewer figures that they have time for")
    parser.add_argument("--interpreter", action="store_true")
    options = parser.parse_args(arguments)
    records = Records(options.records, f"answers-{options.shape}")
    peaks = records.find("peaks")
    figures = TINY_FIGURES if options.interpreter else PEER_FIGURES if options.peers else FIGURES
    for name, form, start in _peers(options.interpreter) if options.peers else _ours():
        folder = options.models / f"{options.shape}-{form}"
        if not _await_folder(folder):
            records.add("failed", engine=name, form=form, reason="its checkpoint was not written")
            continue
        try:
            shape = Shape.read(options.shape, folder)
            launch = _launch(name, shape, folder, options.interpreter)
            _measure(start(launch), name, form, shape, figures, peaks, records)
        except Exception as error:
            records.add("failed", engine=name, form=form, reason=f"{type(error).__name__}: {str(error)[:300]}")
        _free_memory()
    return 0


def _ours() -> Iterator[tuple[str, Form, Callable[[Launch], Engine]]]:
    for form in FORMS:
        yield "cloister", form, OnDevice


def _peers(is_interpreter: bool) -> Iterator[tuple[str, Form, Callable[[Launch], Engine]]]:
    if find_spec("vllm") is not None and not is_interpreter:
        yield "vllm", "bf16", Vllm
    if find_spec("transformers") is not None:
        yield "transformers", "bf16", GenerateBatch


def _await_folder(folder: Path) -> bool:
    """Waits until a checkpoint is whole: its writer goes on beside the stages, and leaves a mark when it is done."""
    while not folder.exists() and not (folder.parent / WRITTEN).exists():
        time.sleep(0.2)  # the stage's limit ends this
    return folder.exists()


def _launch(name: str, shape: Shape, folder: Path, is_interpreter: bool) -> Launch:
    """On a machine without a device our torch back end answers on the CPU: the same engine, other kernels."""
    settings: dict[str, Any] = {"max_num_seqs": 256 if name == "cloister" else PEER_FIGURES[-1].size}
    if name != "vllm":
        settings["device"] = "cuda"
    if is_interpreter:
        settings = {"device": "cpu", "backend": "torch", "max_num_seqs": 64}
    return Launch(
        engine="", model=str(folder), num_threads=2, kv_token_bytes=shape.kv_token_bytes, vocab_size=shape.vocab_size,
        settings=settings, context=CONTEXT, kv_tokens=settings["max_num_seqs"] * 672,
    )  # fmt: skip


def _measure(
    engine: Engine, name: str, form: Form, shape: Shape, figures: Sequence[Figure], peaks: Record | None, records: Records
) -> None:
    """Records speeds, and of ours whether company changed a token and how long the device idled."""
    tokens = Tokens(shape.vocab_size, 0)
    try:
        warm_up(engine, tokens)
        for figure in figures:
            rate, limit = measure(figure, engine, tokens), None
            if peaks is not None:
                weights = shape.weights_bytes(LAYER_BITS[form], 16.0)
                limit = _limit(figure, Roof(shape, peaks["bytes"], peaks[PEAKS[form]], weights))
            records.add("answers", engine=name, form=form, figure=figure.title, rate=rate, limit=limit)
        if isinstance(engine, OnDevice):
            records.add("company", engine=name, form=form, differ=_count_differing(engine, tokens), arrangements=len(_COMPANY))
            records.add("idle", engine=name, form=form, share=_idle_share(engine, tokens))
    finally:
        engine.close()


def measure(figure: Figure, engine: Engine, tokens: Tokens) -> float:
    """Returns the median rate of a figure, whose own shape was warmed up before."""
    for _ in range(NUM_WARMING):
        take_sample(figure, engine, tokens)
    return statistics.median(take_sample(figure, engine, tokens) for _ in range(NUM_SAMPLES))


def _limit(figure: Figure, roof: Roof) -> float:
    if figure.kind == "prefill":
        return roof.prefill(figure.size)
    return roof.decode(figure.size + NUM_NEW / 2) if figure.kind == "decode" else roof.together(figure.size, NUM_NEW)


def _count_differing(engine: OnDevice, tokens: Tokens) -> int:
    """Batch invariance: how many companies changed the answer of a request."""
    prompt = tokens.draw(300)
    alone = engine.answer([prompt], 48)[0]
    return sum(engine.answer([prompt, *tokens.draw_mixed(count)], 48)[0] != alone for count in _COMPANY)


def _idle_share(engine: OnDevice, tokens: Tokens) -> float | None:
    """Returns the share of the time between its first and its last kernel in which the device had none, 64 at once."""
    import torch

    if not torch.cuda.is_available():
        return None
    prompts = tokens.draw_mixed(64)
    engine.answer(prompts, 48)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        engine.answer(prompts, 48)
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if str(event.device_type).endswith("CUDA")
    )
    if not spans:
        return None
    busy: float = 0.0
    end = spans[0][0]
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return float(1.0 - busy / (end - spans[0][0]))


def _free_memory() -> None:
    """Gives the next engine the device's memory."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
