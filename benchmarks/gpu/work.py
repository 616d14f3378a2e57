"""The stages that measure inside a process of their own: `python -m benchmarks.gpu.work STAGE --records FILE`.

Without a device the same stages run small problems in Triton's interpreter, which shows that they work and measures nothing.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from benchmarks.gpu.records import Records
from tests.device import use_interpreter

if TYPE_CHECKING:
    from benchmarks.gpu.kernels import Case


@dataclass(frozen=True, slots=True)
class Sizes:
    """Problems of the kernels.

    Attributes:
        heads: query heads, KV heads, size of a head.
        decodes: (sequences, context).
        prefills: (chunk, context).
        hybrids: (chunk, sequences, context).
        products: (outputs, inputs).
        rows: rows of a product.
        norms: rows of a norm and of logits; `vocab` of these.
        square: rows and columns of the products that give the limits.
        copied: bytes of the copy that does.
    """

    heads: tuple[int, int, int]
    decodes: Sequence[tuple[int, int]]
    prefills: Sequence[tuple[int, int]]
    hybrids: Sequence[tuple[int, int, int]]
    products: Sequence[tuple[int, int]]
    rows: Sequence[int]
    norms: Sequence[int]
    vocab: int
    square: int
    copied: int


REAL: Final = Sizes(
    heads=(32, 8, 128),
    decodes=((1, 512), (1, 4096), (1, 32768), (8, 4096), (64, 512), (64, 4096), (64, 16384)),
    prefills=((512, 512), (2048, 2048), (8192, 8192), (512, 8192), (2048, 32768)),
    hybrids=tuple((chunk, count, context) for chunk in (512, 1024, 2048) for count in (16, 64) for context in (4096, 16384)),
    products=((4096, 4096), (14336, 4096), (4096, 14336)),
    rows=(1, 16, 64, 512, 2048),
    norms=(1, 64, 2048),
    vocab=128256,
    square=8192,
    copied=1 << 30,
)
"""Those of an 8B model."""
TINY: Final = Sizes(
    heads=(4, 2, 16),
    decodes=((1, 40), (3, 20)),
    prefills=((20, 20), (10, 30)),
    hybrids=((16, 3, 24),),
    products=((128, 128),),
    rows=(1, 4),
    norms=(2,),
    vocab=100,
    square=64,
    copied=1 << 16,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one stage to its end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=sorted(WORK))
    parser.add_argument("--records", type=Path, required=True)
    parser.add_argument("--interpreter", action="store_true")
    options = parser.parse_args(arguments)
    if options.interpreter:
        use_interpreter()
    device, sizes = (torch.device("cpu"), TINY) if options.interpreter else (torch.device("cuda"), REAL)
    with torch.no_grad():
        WORK[options.stage](device, sizes, Records(options.records, options.stage))
    return 0


def measure_limits(device: torch.device, sizes: Sizes, records: Records) -> None:
    """Names the device and measures what it can do."""
    from benchmarks.gpu.limits import count_multiprocessors, measure_peaks

    records.add(
        "device",
        name=torch.cuda.get_device_name() if device.type == "cuda" else "Triton's interpreter",
        multiprocessors=count_multiprocessors(device),
        torch=torch.__version__,
        triton=version("triton"),
        python=platform.python_version(),
    )
    records.add("peaks", **measure_peaks(device, size=sizes.square, num_bytes=sizes.copied))


def measure_kernels(device: torch.device, sizes: Sizes, records: Records) -> None:
    """Times every kernel beside the device's limits and torch."""
    from benchmarks.gpu.limits import time_work

    peaks = records.find("peaks")
    if peaks is None:
        raise SystemExit("the device's limits were not measured: add `limits` to --stages")
    for case in _cases(device, sizes):
        elapsed_s = time_work(case.work)
        memory_s, compute_s = case.num_bytes / peaks["bytes"], case.num_operations / peaks[case.peak]
        records.add(
            "kernel",
            table=case.kind,
            problem=case.problem,
            us=elapsed_s * 1e6,
            share=max(memory_s, compute_s) / elapsed_s,
            bound="memory" if memory_s > compute_s else "arithmetic",
            torch_us=None if case.torch_work is None else time_work(case.torch_work) * 1e6,
        )


def _cases(device: torch.device, sizes: Sizes) -> Iterator[Case]:
    from benchmarks.gpu.kernels import attention_cases, product_cases, row_cases
    from benchmarks.gpu.limits import count_multiprocessors, has_fp8
    from cloister.backends.torch.triton.attention import Heads

    num_places = count_multiprocessors(device)
    yield from attention_cases(Heads(*sizes.heads, 0), device, num_places, sizes.decodes, sizes.prefills)
    yield from product_cases(device, num_places, sizes.products, sizes.rows, has_fp8=has_fp8(device))
    yield from row_cases(device, sizes.norms, sizes.products[0][1], sizes.vocab)


def measure_hybrids(device: torch.device, sizes: Sizes, records: Records) -> None:
    """B4: prefill and decode in one launch, never slower than in sequence."""
    from benchmarks.gpu.kernels import hybrid_cases
    from benchmarks.gpu.limits import count_multiprocessors, time_work
    from cloister.backends.torch.triton.attention import Heads

    for case in hybrid_cases(Heads(*sizes.heads, 0), device, count_multiprocessors(device), sizes.hybrids):
        records.add(
            "hybrid",
            problem=case.problem,
            in_sequence_us=time_work(case.in_sequence) * 1e6,
            fused_us=time_work(case.fused) * 1e6,
            interleaved_us=time_work(case.interleaved) * 1e6,
        )


WORK: Final[Mapping[str, Callable[[torch.device, Sizes, Records], None]]] = {
    "limits": measure_limits,
    "kernels": measure_kernels,
    "hybrids": measure_hybrids,
}

if __name__ == "__main__":
    sys.exit(main())
