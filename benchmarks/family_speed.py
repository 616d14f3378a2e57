"""Families in real widths beside llama.cpp: both serve the same GGUF file of random weights in 8 bits, in turns.

python -m benchmarks.family_speed --llama DIR --bin DIR/build/bin       DIR: the source of llama.cpp, with its converter
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

from benchmarks.families import WIDE
from benchmarks.harness import ROOT, Bench, make_parser, make_progress
from benchmarks.peers.engines import Launch
from benchmarks.peers.process import WorkerError, run_worker
from tests.model_factory import make_model

FIGURES: Final = ("prefill512", "decode", "together8")
LAYERS: Final = 8
WITHOUT_MTP: Final = ("qwen3_next", "qwen3_5_text")
"""Families whose converter expects a layer that predicts further tokens unless it is told otherwise."""
DEEPER: Final[dict[str, dict[str, Any]]] = {
    "gemma3_text": {"num_hidden_layers": 12},
    "gpt_oss": {"num_hidden_layers": LAYERS},
    "deepseek_v2": {"num_hidden_layers": LAYERS},
    "olmo3": {"num_hidden_layers": LAYERS},
    "mamba2": {"num_hidden_layers": 24},
    "qwen3_next": {"num_hidden_layers": LAYERS},
    "qwen3_5_text": {"num_hidden_layers": 12},
    "lfm2": {"num_hidden_layers": 15, "layer_types": ["conv", "conv", "full_attention"] * 5},
    "lfm2_moe": {
        "num_hidden_layers": LAYERS,
        "layer_types": ["conv", "conv", "full_attention", "conv"] * 2,
        "tie_word_embeddings": True,
    },
    "granitemoehybrid": {
        "num_hidden_layers": LAYERS,
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"] * 2,
    },
    "falcon_h1": {"num_hidden_layers": 12},
    "nemotron_h": {},
}
"""Families that came with latent attention, states, windows and mixtures, with more layers than `benchmarks.families` needs."""
CONVERT: Final = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); import convert_hf_to_gguf; from conversion.base import TextModel; "
    "TextModel.get_vocab_base_pre = lambda self, tokenizer: 'gpt-2'; convert_hf_to_gguf.main()"
)
"""llama.cpp's converter; it knows no hash of a tokenizer that was made here."""


def list_models(families: Sequence[str]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yields family, name and config of each model."""
    for family, name, config in WIDE:
        if family in families:
            yield family, name.split(",")[0], {"max_position_embeddings": 4096, **config, **DEEPER[family], "vocab_size": 32000}


def write_file(family: str, config: dict[str, Any], target: Path, llama: Path) -> None:
    """Writes a random model as GGUF in Q8_0. Raises subprocess.CalledProcessError if the converter lacks the family."""
    with tempfile.TemporaryDirectory() as folder:
        source = make_model(Path(folder), family, **config)
        flags = ["--outtype", "q8_0", "--outfile", str(target), *(["--no-mtp"] if family in WITHOUT_MTP else [])]
        command = [sys.executable, "-c", CONVERT, str(llama), str(source), *flags]
        environment = {**os.environ, "PYTHONPATH": str(llama / "gguf-py")}
        subprocess.run(command, check=True, capture_output=True, text=True, env=environment)


def measure(launch: Launch, seed: int, log: Path) -> dict[str, list[float]]:
    """Returns samples of each figure, in tokens per second. Raises WorkerError."""
    reports = run_worker(
        sys.executable, launch, FIGURES, num_samples=2, seed=seed, max_attempts=1, patience_s=10.0, timeout_s=600.0,
        environment={}, log=log,
    )  # fmt: skip
    return {report["name"]: report["samples"] for report in reports if report["kind"] == "figure"}


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--llama", type=Path, required=True, help="source of llama.cpp")
    parser.add_argument("--bin", type=Path, required=True, help="its llama-bench and llama-batched-bench")
    parser.add_argument("--files", type=Path, default=ROOT / "build" / "family_speed", help="where GGUF files are kept")
    parser.add_argument("--families", default=",".join(DEEPER), help="model types")
    parser.add_argument("--rounds", type=int, default=2, help="turns of both engines")
    parser.set_defaults(num_threads=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    bench = Bench(
        "family_speed", "Families beside llama.cpp on the same Q8_0 file", "at least 1.2 times its speed in every cell"
    )
    chosen = list(list_models(options.families.split(",")))
    rows = []
    with make_progress() as progress:
        task = progress.add_task("families", total=len(chosen))
        for number, (family, name, config) in enumerate(chosen):
            progress.update(task, description=name, completed=number)
            rows.append([name, *compare(family, config, options)])
    titles = [title for figure in FIGURES for title in (figure, "llama.cpp", "ratio")]
    bench.print_rows("Tokens per second", ("family", *titles), rows)
    return bench.finish(options)


def compare(family: str, config: dict[str, Any], options: Any) -> list[object]:
    """Returns ours, theirs and the ratio of each figure; a word in place of figures that an engine does not give."""
    options.files.mkdir(parents=True, exist_ok=True)
    file, log = options.files / f"{family}.gguf", options.files / "engines.log"
    if not file.exists():
        try:
            with ProcessPoolExecutor(1, get_context("spawn")) as process:  # which gives back the memory of the checkpoint
                process.submit(write_file, family, config, file, options.llama).result()
        except subprocess.CalledProcessError:
            return ["not converted", "", ""] * len(FIGURES)
    settings: dict[str, dict[str, Any]] = {
        "cloister": {"speculate": "none"},
        "llama": {"bin": str(options.bin), "is_fork": False},
    }
    found: dict[str, dict[str, list[float]]] = {engine: {} for engine in settings}
    for turn in range(options.rounds):
        for engine, own in settings.items():
            launch = Launch(engine, str(file), options.num_threads, 4096, config["vocab_size"], own, 2048, 8192)
            try:
                for figure, samples in measure(launch, options.seed + turn, log).items():
                    found[engine].setdefault(figure, []).extend(samples)
            except WorkerError:
                break
    cells: list[object] = []
    for figure in FIGURES:
        ours, theirs = (statistics.median(found[engine].get(figure) or [0.0]) for engine in ("cloister", "llama"))
        cells += [ours or "refused", theirs or "refused", ours / theirs if ours and theirs else ""]
    return cells


if __name__ == "__main__":
    sys.exit(main())
