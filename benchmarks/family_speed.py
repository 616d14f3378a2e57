"""Families in real widths beside llama.cpp: both serve the same GGUF file of random weights in 8 bits, in turns.

    python -m benchmarks.family_speed --llama DIR --bin DIR/build/bin       DIR: the source of llama.cpp, with its converter

Both engines take turns at each figure, so that a machine whose speed drifts disturbs both alike. Samples of all runs add up in
FILES/samples.json, so that the work can be cut into pieces (`--families`); `--rounds 0` prints what is there; delete it to
begin anew. GCC 12 miscompiles ggml's tile configuration on machines with AMX (SIGILL): compile llama.cpp with clang there.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

from benchmarks.families import WIDE
from benchmarks.harness import ROOT, Bench, console, make_parser, make_progress
from benchmarks.peers.engines import Cloister, Launch
from benchmarks.peers.llama import LlamaPrograms
from benchmarks.peers.meter import Usage
from benchmarks.peers.shapes import complete_config, make_tokenizer, write_checkpoint
from benchmarks.peers.work import FIGURES, Tokens
from benchmarks.peers.worker import InProcess, Subject
from tests.model_factory import make_model

MEASURED: Final = ("prefill512", "decode", "together8")
GOAL: Final = 1.2
CONTEXT: Final = 2048
KV_TOKENS: Final = 8192
KV_TOKEN_BYTES: Final = 1 << 17
"""Enough for any of these: memory of the cache that nobody writes to is not taken."""
LAYERS: Final = 8
WITHOUT_MTP: Final = ("qwen3_next", "qwen3_5_text")
"""Families whose converter expects a layer that predicts further tokens unless it is told otherwise."""
DEEPER: Final[dict[str, dict[str, Any]]] = {
    "gemma3_text": {"num_hidden_layers": 12},
    "gpt_oss": {"num_hidden_layers": LAYERS},
    "deepseek_v2": {"num_hidden_layers": LAYERS, "q_lora_rank": 768},  # llama.cpp expects whole queries in 26 or 27 layers only
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
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe"] * 2 + ["linear_attention", "full_attention", "moe", "linear_attention"]
    },
}
"""Families that came with latent attention, states, windows and mixtures, with more layers than `benchmarks.families` needs."""
PUBLISHED: Final = {"linear_attention": "mamba", "full_attention": "attention"}
"""Kinds of layers as Granite's published configs name them, which llama.cpp's converter knows."""
SHAPES: Final = {"q30bl4": "Qwen3 30B A3B, 4 layers"}
"""Shapes of `benchmarks.peers`, in full width and with the whole vocabulary."""
CONVERT: Final = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); import convert_hf_to_gguf; from conversion.base import TextModel; "
    "TextModel.get_vocab_base_pre = lambda self, tokenizer: 'gpt-2'; convert_hf_to_gguf.main()"
)
"""llama.cpp's converter; it knows no hash of a tokenizer that was made here."""
Samples = dict[str, dict[str, list[float]]]
"""Tokens per second by figure and engine; "others": cores that other programs took."""


def list_models(families: Sequence[str]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yields family, name and config of each model.

    Raises:
        SystemExit: there is no such family.
    """
    if unknown := set(families) - DEEPER.keys() - SHAPES.keys():
        raise SystemExit(f"no such families: {', '.join(sorted(unknown))}; there are {', '.join([*SHAPES, *DEEPER])}")
    yield from ((shape, name, complete_config(shape)) for shape, name in SHAPES.items() if shape in families)
    for family, name, config in WIDE:
        if family in families:
            yield family, name.split(",")[0], {"max_position_embeddings": 4096, **config, **DEEPER[family], "vocab_size": 32000}


def write_file(family: str, config: dict[str, Any], target: Path, llama: Path) -> None:
    """Writes a random model as GGUF in Q8_0. Raises subprocess.CalledProcessError if the converter lacks the family."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / family
        if family in SHAPES:
            write_checkpoint(family, source, seed=0)
        else:
            source = make_model(Path(folder), family, **config)
        make_tokenizer(config["vocab_size"]).save(str(source / "tokenizer.json"))  # some converters cut matrices to its size
        (source / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}', encoding="utf-8")
        if family == "granitemoehybrid":
            rename_layers(source / "config.json")
        flags = ["--outtype", "q8_0", "--outfile", str(target), *(["--no-mtp"] if family in WITHOUT_MTP else [])]
        command = [sys.executable, "-c", CONVERT, str(llama), str(source), *flags]
        environment = {**os.environ, "PYTHONPATH": str(llama / "gguf-py")}
        subprocess.run(command, check=True, capture_output=True, text=True, env=environment)


def rename_layers(file: Path) -> None:
    """Gives kinds of layers their published names in a config."""
    config = json.loads(file.read_text(encoding="utf-8"))
    config["layer_types"] = [PUBLISHED.get(kind, kind) for kind in config["layer_types"]]
    file.write_text(json.dumps(config), encoding="utf-8")


def open_engines(file: Path, vocab_size: int, num_threads: int, programs: Path, seed: int) -> dict[str, Subject]:
    """Returns both engines; ours has loaded the file, llama.cpp's programs load it anew for each figure."""

    def launch(engine: str, **settings: Any) -> Launch:
        return Launch(engine, str(file), num_threads, KV_TOKEN_BYTES, vocab_size, settings, CONTEXT, KV_TOKENS)

    ours = InProcess(Cloister(launch("cloister", speculate="none")), Tokens(vocab_size, seed))
    return {"cloister": ours, "llama": LlamaPrograms(launch("llama", bin=str(programs)))}


def measure(
    file: Path, vocab_size: int, num_threads: int, programs: Path, figures: Sequence[str], seed: int, num_rounds: int
) -> Samples:
    """Returns samples of both engines in turns; an engine that refuses the file has none."""
    session = os.getsid(0)
    samples: Samples = {figure: {"cloister": [], "llama": [], "others": []} for figure in figures}
    engines = open_engines(file, vocab_size, num_threads, programs, seed)
    refused = set()
    for name, engine in engines.items():
        try:
            engine.warm_up()
        except RuntimeError as error:
            console.print(f"{name}: {error}", style="yellow", highlight=False)
            refused.add(name)
    for number in range(num_rounds):
        for figure, found in samples.items():
            before = Usage.read(session)
            for name in list(engines)[:: -1 if number % 2 else 1]:
                if name not in refused:
                    found[name] += engines[name].measure(FIGURES[figure], 1)
            found["others"].append(round(Usage.read(session).other_cores_since(before), 2))
    for engine in engines.values():
        engine.close()
    return samples


def run_apart(work: Any, *arguments: Any) -> Any:
    """Calls `work` in a process of its own, which gives back its memory."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(work, *arguments).result()


def compare(family: str, config: dict[str, Any], options: Any) -> Samples | str:
    """Returns samples of both engines, or why there are none."""
    options.files.mkdir(parents=True, exist_ok=True)
    file = options.files / f"{family}.gguf"
    if not file.exists():
        unfinished = file.with_suffix(".part")
        try:
            run_apart(write_file, family, config, unfinished, options.llama)
        except subprocess.CalledProcessError as error:
            return f"not converted: {error.stderr.strip().splitlines()[-1]}"
        unfinished.rename(file)
    arguments = (
        file,
        config["vocab_size"],
        options.num_threads,
        options.bin,
        options.figures.split(","),
        options.seed,
        options.rounds,
    )
    try:
        found: Samples = run_apart(measure, *arguments)
    except (RuntimeError, ValueError, BrokenProcessPool) as error:
        return f"failed: {error}"
    return found


def merge(known: Samples, new: Samples) -> Samples:
    """Returns the samples of both, the known ones first."""
    figures = [figure for figure in MEASURED if figure in known or figure in new]
    columns = ("cloister", "llama", "others")
    return {
        figure: {column: known.get(figure, {}).get(column, []) + new.get(figure, {}).get(column, []) for column in columns}
        for figure in figures
    }


def describe(samples: Samples) -> Iterator[tuple[str, list[object], float | None]]:
    """Yields of each figure its name, a row with the ranges, and the ratio of medians, None where an engine has none."""
    for figure, found in samples.items():
        cells: list[object] = [figure]
        medians = []
        for engine in ("cloister", "llama"):
            values = found[engine]
            medians.append(statistics.median(values) if values else 0.0)
            cells += [medians[-1], f"{min(values):,.4g} to {max(values):,.4g}"] if values else ["refused", ""]
        ratio = medians[0] / medians[1] if all(medians) else None
        yield figure, [*cells, "" if ratio is None else ratio, max(found["others"], default=0.0)], ratio


def report(bench: Bench, known: Mapping[str, Samples]) -> None:
    """Prints what is known of all models, and judges each ratio."""
    rows = []
    for name, samples in known.items():
        for figure, cells, ratio in describe(samples):
            rows.append([name, *cells])
            if ratio is not None:
                bench.check(f"{name}, {figure}: of llama.cpp's speed", ratio, low=GOAL)
    headers = ("model", "figure", "cloister", "range", "llama.cpp", "its range", "ratio", "others, cores")
    bench.print_rows("Tokens per second, medians", headers, rows)


def main() -> int:
    """Measures the models asked for and reports all; returns the exit status."""
    parser = make_parser(__doc__)
    parser.add_argument("--llama", type=Path, required=True, help="source of llama.cpp")
    parser.add_argument("--bin", type=Path, required=True, help="its llama-bench and llama-batched-bench")
    parser.add_argument(
        "--files", type=Path, default=ROOT / "build" / "family_speed", help="where GGUF files and samples are kept"
    )
    parser.add_argument("--families", default=",".join([*SHAPES, *DEEPER]), help="model types, and shapes of benchmarks.peers")
    parser.add_argument("--figures", default=",".join(MEASURED), help="what is measured")
    parser.add_argument("--rounds", type=int, default=2, help="turns of both engines")
    parser.set_defaults(num_threads=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    bench = Bench(
        "family_speed", "Families beside llama.cpp on the same Q8_0 file", f"at least {GOAL} times its speed in every cell"
    )
    chosen = list(list_models(options.families.split(","))) if options.rounds else []
    ledger = options.files / "samples.json"
    known: dict[str, Samples] = json.loads(ledger.read_text(encoding="utf-8")) if ledger.exists() else {}
    with make_progress() as progress:
        for family, name, config in progress.track(chosen, description="models"):
            found = compare(family, config, options)
            if isinstance(found, str):
                console.print(f"{name}: {found}", style="yellow", highlight=False)
                continue
            row = f"{name}, {options.num_threads} thread{'s' if options.num_threads > 1 else ''}"
            known[row] = merge(known.get(row, {}), found)
            ledger.write_text(json.dumps(known, indent=1), encoding="utf-8")
    report(bench, known)
    return bench.finish(options)


if __name__ == "__main__":
    sys.exit(main())
