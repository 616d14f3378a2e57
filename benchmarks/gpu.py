"""The GPU path: every kernel against the device's own limits and torch, hybrid batches (B4), and whole answers.

Run it on a machine with a CUDA device: `python -m benchmarks.gpu`. It writes benchmarks/gpu.md. Limits are measured on the
device itself (a copy for bytes, cuBLAS for operations), not taken from a data sheet. Whole answers are compared with
transformers' continuous batching (`generate_batch`) on random weights of a 1B shape, the same prompts, greedy, in turn.
"""

from __future__ import annotations

import argparse
import math
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.gpu_kernels import Case, Hybrid

PAGE = Path(__file__).with_name("gpu.md")
DECODES = ((1, 512), (1, 4096), (1, 32768), (8, 4096), (64, 512), (64, 4096), (64, 16384))
PREFILLS = ((512, 512), (2048, 2048), (8192, 8192), (512, 8192), (2048, 32768))
HYBRIDS = tuple((chunk, count, context) for chunk in (512, 1024, 2048) for count in (16, 64) for context in (4096, 16384))
PRODUCTS = ((4096, 4096), (14336, 4096), (4096, 14336))
ROWS = (1, 16, 64, 512, 2048)
PROMPT_LENGTHS, NUM_NEW = (128, 512), 128

Row = Sequence[object]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 when the page was written, 2 where there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=PAGE, help="page to write")
    parser.add_argument("--kernels-only", action="store_true", help="leave whole answers out")
    options = parser.parse_args(arguments)
    missing = find_missing()
    if missing is not None:
        print(f"nothing was measured: {missing}", file=sys.stderr)
        return 2
    options.output.write_text("\n".join(write_page(options)) + "\n", encoding="utf-8")
    print(f"written: {options.output}")
    return 0


def find_missing() -> str | None:
    """Returns what a measurement lacks here, or None."""
    if find_spec("torch") is None or find_spec("triton") is None:
        return "torch and triton are needed (pip install 'cloister[gpu]')"
    import torch

    return None if torch.cuda.is_available() else "torch finds no CUDA device"


def write_page(options: argparse.Namespace) -> Iterator[str]:
    """Yields the lines of the page, measuring as it goes."""
    import torch

    from benchmarks.gpu_kernels import attention_cases, hybrid_cases, product_cases, row_cases
    from cloister.backends.torch.triton.attention import Heads

    device = torch.device("cuda")
    properties = torch.cuda.get_device_properties(device)
    num_places, heads = properties.multi_processor_count, Heads(32, 8, 128, 0)
    has_fp8 = torch.cuda.get_device_capability() >= (8, 9)
    peaks = measure_peaks(has_fp8)
    yield "# Measured on a GPU"
    yield ""
    yield f"{properties.name}, {num_places} multiprocessors; torch {torch.__version__}, triton {version('triton')}, "
    yield f"Python {platform.python_version()}. Written by `python -m benchmarks.gpu`; medians."
    yield ""
    yield "Measured limits: " + ", ".join(_peak(name, rate) for name, rate in peaks.items()) + "."
    yield from _kernel_table(
        "Attention (32 heads, 8 KV heads of 128)", attention_cases(heads, device, num_places, DECODES, PREFILLS), peaks
    )
    yield from _hybrid_table(hybrid_cases(heads, device, num_places, HYBRIDS))
    products = product_cases(device, num_places, PRODUCTS, ROWS, has_fp8=has_fp8)
    yield from _kernel_table("Products (torch: cuBLAS in bf16)", products, peaks)
    yield from _kernel_table("Rows", row_cases(device, (1, 64, 2048), 4096, 128256), peaks)
    if not options.kernels_only:
        yield from _answers_table()


def measure_peaks(has_fp8: bool) -> Mapping[str, float]:
    """Returns bytes per second of a copy, and operations per second of square products, by number format."""
    import torch

    size = 8192
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    square = torch.randn(size, size, device="cuda")
    half, codes = square.bfloat16(), square.to(torch.int8)
    operations = 2.0 * size**3
    peaks = {
        "bytes": 2.0 * source.numel() / time_work(lambda: target.copy_(source)),
        "bfloat16": operations / time_work(lambda: half @ half.t()),
        "int8": operations / time_work(lambda: torch._int_mm(codes, codes.t())),
    }
    if has_fp8:
        eighth, one = half.to(torch.float8_e4m3fn), torch.ones((), device="cuda")
        peaks["float8"] = operations / time_work(
            lambda: torch._scaled_mm(eighth, eighth.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        )
    return peaks


def time_work(work: Callable[[], object]) -> float:
    """Returns the median time of one launch in seconds, with a cold second-level cache."""
    from triton.testing import do_bench

    return float(do_bench(work, warmup=25, rep=200, return_mode="median")) / 1e3


def _kernel_table(title: str, cases: Iterator[Case], peaks: Mapping[str, float]) -> Iterator[str]:
    yield from _header(title, ("kernel", "problem", "us", "of the limit", "bound by", "torch us", "torch / ours"))
    for case in cases:
        elapsed_s = time_work(case.work)
        memory_s, compute_s = case.num_bytes / peaks["bytes"], case.num_operations / peaks[case.peak]
        bound = "memory" if memory_s > compute_s else "arithmetic"
        torch_s = None if case.torch_work is None else time_work(case.torch_work)
        compared = ("", "") if torch_s is None else (f"{torch_s * 1e6:.1f}", f"{torch_s / elapsed_s:.2f}")
        share = f"{max(memory_s, compute_s) / elapsed_s:.0%}"
        yield _row((case.kind, case.problem, f"{elapsed_s * 1e6:.1f}", share, bound, *compared))


def _hybrid_table(cases: Iterator[Hybrid]) -> Iterator[str]:
    """B4: never slower than the two in sequence; the paper reports 1.28x in the mean, 1.59x at most."""
    columns = ("chunk + decodes x context", "in sequence us", "by multiprocessor us", "interleaved us", "best gain")
    yield from _header("Hybrid batches (B4)", columns)
    gains = []
    for case in cases:
        sequence_s, fused_s, interleaved_s = (time_work(work) for work in (case.in_sequence, case.fused, case.interleaved))
        gains.append(sequence_s / fused_s)
        times = [f"{seconds * 1e6:.1f}" for seconds in (sequence_s, fused_s, interleaved_s)]
        yield _row((case.problem, *times, f"{sequence_s / min(fused_s, interleaved_s):.2f}"))
    yield ""
    mean = math.exp(statistics.fmean(math.log(gain) for gain in gains))
    yield f"By multiprocessor, over the two in sequence: mean {mean:.2f}x, {min(gains):.2f}x to {max(gains):.2f}x."


def _answers_table() -> Iterator[str]:
    """Whole answers, ours and those of transformers in turn, three times."""
    yield from _header(
        "Whole answers (1B shape, random weights)", ("prompts at once", "ours tok/s", "generate_batch tok/s", "gain")
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "l1b"
        from benchmarks.peers.shapes import write_checkpoint

        write_checkpoint("l1b", path, seed=0)
        ours, theirs = open_ours(path), open_transformers(path)
        for count in (1, 16, 64):
            prompts = make_prompts(count)
            rates: dict[str, list[float]] = {"ours": [], "theirs": []}
            for _ in range(3):
                rates["ours"].append(ours(prompts))
                rates["theirs"].append(theirs(prompts))
            mine, other = (statistics.median(found) for found in rates.values())
            yield _row((count, f"{mine:,.0f}", f"{other:,.0f}", f"{mine / other:.2f}"))


def make_prompts(count: int) -> list[list[int]]:
    """Returns prompts of spread lengths, the same ones each time."""
    import numpy as np

    rng = np.random.default_rng(count)
    lengths = np.linspace(*PROMPT_LENGTHS, count).astype(int)
    return [rng.integers(1000, 100000, length).tolist() for length in lengths]


def open_ours(path: Path) -> Callable[[list[list[int]]], float]:
    """Returns a function from prompts to new tokens per second."""
    from cloister.llm import LLM
    from cloister.types.request import SamplingParams

    llm = LLM(str(path), device="cuda", dtype="bfloat16", max_model_len=2048, prefix_cache=False)
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)

    def run(prompts: list[list[int]]) -> float:
        started_s = time.perf_counter()
        answers = llm.generate(prompts, sampling)
        return sum(len(answer.outputs[0].token_ids) for answer in answers) / (time.perf_counter() - started_s)

    run(make_prompts(4))
    return run


def open_transformers(path: Path) -> Callable[[list[list[int]]], float]:
    """As `open_ours`, with transformers' continuous batching."""
    import torch
    import transformers

    untyped: Any = transformers
    model = (
        untyped.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="sdpa").to("cuda").eval()
    )
    settings = untyped.GenerationConfig(max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)

    def run(prompts: list[list[int]]) -> float:
        started_s = time.perf_counter()
        answers = model.generate_batch(prompts, generation_config=settings)
        return sum(len(answer.generated_tokens) for answer in answers.values()) / (time.perf_counter() - started_s)

    run(make_prompts(4))
    return run


def _header(title: str, columns: Sequence[str]) -> Iterator[str]:
    yield from ("", f"## {title}", "", _row(columns), "|" + "---|" * len(columns))


def _row(cells: Row) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def _peak(name: str, rate: float) -> str:
    if name == "bytes":
        return f"{rate / 1e9:,.0f} GB/s"
    return f"{rate / 1e12:,.0f} {'TOP' if name == 'int8' else 'TFLOP'}/s in {name}"


if __name__ == "__main__":
    sys.exit(main())
