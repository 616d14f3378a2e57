"""Families beside llama.cpp and OpenVINO on the same random weights in 8 bits, in turns.

    python -m benchmarks.family_speed --llama DIR --bin DIR/build/bin       DIR: the source of llama.cpp, with its converter
    python -m benchmarks.family_speed ... --openvino VENV/bin/python        VENV has openvino-genai, optimum-intel[openvino]

Cloister and llama.cpp serve one GGUF file in Q8_0, OpenVINO GenAI what optimum-intel exports of the same checkpoint in int8.
All take turns at each figure, so that a machine whose speed drifts disturbs them alike. Samples of all runs add up in
FILES/samples.json, so that the work can be cut into pieces (`--families`); `--rounds 0` prints what is there; delete it to
begin anew. GCC 12 miscompiles ggml's tile configuration on machines with AMX (SIGILL): compile llama.cpp with clang there.
"""

from __future__ import annotations

import json
import os
import statistics
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
from benchmarks.peers.engines import OPENVINO_SETTINGS, Cloister, Launch
from benchmarks.peers.formats import PeerFailed, convert, export_openvino
from benchmarks.peers.llama import LlamaPrograms
from benchmarks.peers.meter import Usage
from benchmarks.peers.process import InWorker, WorkerError
from benchmarks.peers.shapes import complete_config, make_tokenizer, write_checkpoint
from benchmarks.peers.work import FIGURES, Tokens
from benchmarks.peers.worker import InProcess, Subject
from tests.model_factory import make_model

MEASURED: Final = ("prefill512", "decode", "together8")
PEERS: Final = {"llama": ("llama.cpp", 1.2), "openvino": ("OpenVINO", 1.0)}
"""Names of the other engines, and the least that our speed should be of theirs."""
COLUMNS: Final = ("cloister", *PEERS, "others")
CONTEXT: Final = 2048
KV_TOKENS: Final = 8192
KV_TOKEN_BYTES: Final = 1 << 17
"""Enough for any of these: memory of the cache that nobody writes to is not taken."""
LAYERS: Final = 8
VOCAB_SIZE: Final = 32000
"""Of all but the shapes of `benchmarks.peers`; real ones have up to 262,144 words."""
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
    "import sys; llama = sys.argv.pop(1); sys.path[:0] = [llama, llama + '/gguf-py']; "
    "import convert_hf_to_gguf, gguf; from conversion.base import TextModel; "
    "TextModel.get_vocab_base_pre = lambda self, tokenizer: 'gpt-2'; "
    "TextModel.tensor_force_quant = lambda self, name, new_name, bid, n_dims: "
    "('attn_k_b.' in new_name or 'attn_v_b.' in new_name) and gguf.GGMLQuantizationType.BF16; "
    "convert_hf_to_gguf.main()"
)
"""llama.cpp's converter, which knows no hash of a tokenizer that was made here.

The halves of `kv_b_proj` stay in bfloat16. In 8 bits llama.cpp lays them out for AMX, whose kernel refuses permuted inputs, as
latent attention has them, and no other kernel reads that layout: it ends with "cur_backend_id != -1".
"""
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
            deeper = {"max_position_embeddings": 4096, **config, **DEEPER[family], "vocab_size": VOCAB_SIZE}
            yield family, name_shape(name, deeper), deeper


def name_shape(name: str, config: Mapping[str, Any]) -> str:
    """Returns a name of `benchmarks.families` with this config's number of layers, and nothing of what goes beyond windows."""
    parts = [part for part in name.split(", ") if not part.endswith(" layers") and not part.startswith("beyond ")]
    num_layers = config["num_hidden_layers"] if "num_hidden_layers" in config else len(config["layers_block_type"])
    return ", ".join([*parts, f"{num_layers} layers"])


def is_current(model: Path, config: Mapping[str, Any]) -> bool:
    """Whether a model is there and was written with this config, which lies beside it."""
    record = find_record(model)
    return model.exists() and record.exists() and record.read_text(encoding="utf-8") == json.dumps(config)


def find_record(model: Path) -> Path:
    """Returns the file that holds the config that a model was written with."""
    return model.with_name(f"{model.name}.json")


def write_models(family: str, config: dict[str, Any], models: Mapping[str, Path], options: Any) -> dict[str, str]:
    """Writes the models, by format, that are not there or were written with another config; returns why any could not be."""
    missing = {kind: model for kind, model in models.items() if not is_current(model, config)}
    failures: dict[str, str] = {}
    if not missing:
        return failures
    options.files.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / family
        run_apart(write_source, family, config, source)
        for kind, model in missing.items():
            find_record(model).unlink(missing_ok=True)
            try:
                WRITERS[kind](source, model, options)
            except PeerFailed as error:
                failures[kind] = f"no {kind} file: {str(error).strip().splitlines()[-1]}"
            else:
                find_record(model).write_text(json.dumps(config), encoding="utf-8")
    return failures


def write_source(family: str, config: dict[str, Any], source: Path) -> None:
    """Writes a random checkpoint as both converters read it."""
    if family in SHAPES:
        write_checkpoint(family, source, seed=0)
    else:
        make_model(source, family, **config)
    make_tokenizer(config["vocab_size"]).save(str(source / "tokenizer.json"))  # some converters cut matrices to its size
    (source / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}', encoding="utf-8")
    if family == "granitemoehybrid":
        rename_layers(source / "config.json")


def write_gguf(source: Path, model: Path, options: Any) -> None:
    """Writes a checkpoint as GGUF in Q8_0. Raises PeerFailed if llama.cpp's converter lacks the family."""
    unfinished = model.with_suffix(".part")
    flags = ["--outtype", "q8_0", "--outfile", str(unfinished), *(["--no-mtp"] if source.name in WITHOUT_MTP else [])]
    convert([sys.executable, "-c", CONVERT, str(options.llama), str(source), *flags])
    unfinished.replace(model)


def write_openvino(source: Path, model: Path, options: Any) -> None:
    """Writes a checkpoint in OpenVINO's format with int8 weights. Raises PeerFailed if optimum-intel lacks the family."""
    export_openvino(options.openvino.parent, source, model, "int8")


WRITERS: Final = {"gguf": write_gguf, "openvino": write_openvino}


def rename_layers(file: Path) -> None:
    """Gives kinds of layers their published names in a config."""
    config = json.loads(file.read_text(encoding="utf-8"))
    config["layer_types"] = [PUBLISHED.get(kind, kind) for kind in config["layer_types"]]
    file.write_text(json.dumps(config), encoding="utf-8")


def open_engines(models: Mapping[str, Path], vocab_size: int, options: Any) -> dict[str, Subject]:
    """Returns the engines whose models are there; ours has loaded the file, the others load it anew for each figure."""

    def launch(engine: str, model: Path, **settings: Any) -> Launch:
        return Launch(engine, str(model), options.num_threads, KV_TOKEN_BYTES, vocab_size, settings, CONTEXT, KV_TOKENS)

    engines: dict[str, Subject] = {}
    if file := models.get("gguf"):
        ours = Cloister(launch("cloister", file, speculate="none"))
        engines["cloister"] = InProcess(ours, Tokens(vocab_size, options.seed))
        engines["llama"] = LlamaPrograms(launch("llama", file, bin=str(options.bin)))
    if folder := models.get("openvino"):
        theirs = launch("openvino", folder, **OPENVINO_SETTINGS)
        engines["openvino"] = InWorker(str(options.openvino), theirs, options.seed, options.files / "openvino.log")
    return engines


def measure(models: Mapping[str, Path], vocab_size: int, options: Any) -> Samples:
    """Returns samples of all engines in turns; an engine that refuses its model has none."""
    session = os.getsid(0)
    engines = open_engines(models, vocab_size, options)
    samples: Samples = {figure: {**{name: [] for name in engines}, "others": []} for figure in options.figures.split(",")}
    refused = set()
    for name, engine in engines.items():
        try:
            engine.warm_up()
        except (RuntimeError, WorkerError) as error:
            console.print(f"{name}: {error}", style="yellow", highlight=False)
            refused.add(name)
    for number in range(options.rounds):
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


def compare(family: str, name: str, config: dict[str, Any], options: Any) -> Samples:
    """Returns samples of the engines, and says why any is missing; there are none if our engine, or the machine, fails."""
    models = {"gguf": options.files / f"{family}.gguf"}
    if options.openvino:
        models["openvino"] = options.files / f"{family}-openvino"
    failures = write_models(family, config, models, options)
    for reason in failures.values():
        console.print(f"{name}: {reason}", style="yellow", highlight=False)
    written = {kind: model for kind, model in models.items() if kind not in failures}
    try:
        found: Samples = run_apart(measure, written, config["vocab_size"], options)
    except (RuntimeError, ValueError, WorkerError, BrokenProcessPool) as error:
        console.print(f"{name}: failed: {error}", style="yellow", highlight=False)
        return {}
    return found


def merge(known: Samples, new: Samples) -> Samples:
    """Returns the samples of both, the known ones first."""

    def join(figure: str) -> dict[str, list[float]]:
        old, added = known.get(figure, {}), new.get(figure, {})
        return {column: old.get(column, []) + added.get(column, []) for column in COLUMNS if column in old or column in added}

    return {figure: join(figure) for figure in MEASURED if figure in known or figure in new}


def describe(samples: Samples) -> Iterator[tuple[str, list[object], dict[str, float]]]:
    """Yields of each figure its name, a row with medians, ranges and ratios, and our ratio to each peer that has samples."""
    for figure, found in samples.items():
        ours = found.get("cloister", [])
        ratios = {peer: statistics.median(ours) / statistics.median(found[peer]) for peer in PEERS if ours and found.get(peer)}
        cells: list[object] = [figure, *describe_engine(found, "cloister")]
        for peer in PEERS:
            cells += [*describe_engine(found, peer), ratios.get(peer, "")]
        yield figure, [*cells, max(found.get("others", []), default=0.0)], ratios


def describe_engine(found: Mapping[str, list[float]], engine: str) -> list[object]:
    """Returns the median and the range of an engine's samples."""
    if engine not in found:
        return ["", ""]
    values = found[engine]
    return [statistics.median(values), f"{min(values):,.4g} to {max(values):,.4g}"] if values else ["refused", ""]


def report(bench: Bench, known: Mapping[str, Samples]) -> None:
    """Prints what is known of all models, and judges each ratio."""
    rows = []
    for name, samples in known.items():
        for figure, cells, ratios in describe(samples):
            rows.append([name, *cells])
            for peer, ratio in ratios.items():
                title, goal = PEERS[peer]
                bench.check(f"{name}, {figure}: of {title}'s speed", ratio, low=goal)
    titles = [title for title, _ in PEERS.values()]
    headers = [header for title in titles for header in (title, f"range of {title}", f"ratio to {title}")]
    bench.print_rows("Tokens per second, medians", ("model", "figure", "cloister", "range", *headers, "others, cores"), rows)


def main() -> int:
    """Measures the models asked for and reports all; returns the exit status."""
    parser = make_parser(__doc__)
    parser.add_argument("--llama", type=Path, required=True, help="source of llama.cpp")
    parser.add_argument("--bin", type=Path, required=True, help="its llama-bench and llama-batched-bench")
    parser.add_argument(
        "--openvino", type=Path, default=None, help="Python of an environment with OpenVINO GenAI and optimum-intel"
    )
    parser.add_argument("--files", type=Path, default=ROOT / "build" / "family_speed", help="where models and samples are kept")
    parser.add_argument("--families", default=",".join([*SHAPES, *DEEPER]), help="model types, and shapes of benchmarks.peers")
    parser.add_argument("--figures", default=",".join(MEASURED), help="what is measured")
    parser.add_argument("--rounds", type=int, default=2, help="turns of all engines")
    parser.set_defaults(num_threads=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    prediction = ", ".join(f"at least {goal} times {title}'s speed" for title, goal in PEERS.values())
    bench = Bench("family_speed", "Families beside llama.cpp and OpenVINO on 8-bit weights", f"{prediction}, in every cell")
    chosen = list(list_models(options.families.split(","))) if options.rounds else []
    ledger = options.files / "samples.json"
    known: dict[str, Samples] = json.loads(ledger.read_text(encoding="utf-8")) if ledger.exists() else {}
    with make_progress() as progress:
        for family, name, config in progress.track(chosen, description="models"):
            if found := compare(family, name, config, options):
                row = f"{name}, {options.num_threads} thread{'s' if options.num_threads > 1 else ''}"
                known[row] = merge(known.get(row, {}), found)
                ledger.write_text(json.dumps(known, indent=1), encoding="utf-8")
    report(bench, known)
    return bench.finish(options)


if __name__ == "__main__":
    sys.exit(main())
