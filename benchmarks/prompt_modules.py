"""M6, M19: documents that are encoded separately, beside full prefill: right answers, and the time to the first token.

Prompt Cache (Gim et al. 2024), APE (Yang et al. 2025), KVLink (Yang et al. 2025). Each prompt has notes with an invented number
each, and asks for one of them. It is computed as one text, as one text with the newlines that fill up blocks, and with each
note encoded separately; without notes nobody can know the number.

With --tune, APE's temperature and scale are chosen on these notes, and tried on others: about people, with a word each.

With --adapter, KVLink's link tokens are tried on both: those of an adapter, such as `training/links.py` writes, and newlines in
their place, which nobody trained.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.harness import Bench, make_parser, make_progress, open_engine
from cloister.backends.tensors import dequantized
from cloister.engine import EngineCore
from cloister.models import load, locate
from cloister.models.adapters import LINKS_FILE
from cloister.models.safetensors import write_tensors
from cloister.server.documents import join_documents
from cloister.server.prompt_schemas import Layout, ModuleInput, PromptSchemaBody
from cloister.server.schemas import ModuleChoice
from cloister.text import Tokenizer
from cloister.types.documents import Documents
from cloister.types.events import Submit
from cloister.types.request import AdapterInfo, Request, SamplingParams

NUM_NEWLINES = 5
"""Link tokens of a document where newlines stand in their place."""
KINDS = ("one text", "one text, filled up", "separately", "modules of a schema", "no notes")
NUM_NOTES = (2, 4, 8)
SENTENCES = (4, 16, 32)
"""Further sentences of each of eight notes where time is measured."""
PLACES = (
    "harbour", "library", "museum", "bakery", "station", "garden", "theatre", "hospital", "airport", "castle", "market",
    "school", "stadium", "factory", "chapel", "lighthouse",
)  # fmt: skip
FILLER = (
    "It opens early in the morning.", "Many people visit it in summer.", "The roof was repaired two years ago.",
    "A small road leads to it.", "There is a bench in front of it.", "The walls are painted white.",
    "Nobody remembers who built it.", "It stands near the river.",
)  # fmt: skip
PREFIX = "Read these notes. Then answer the question with the number that they give.\n\n"


PEOPLE = (
    "Anna", "Boris", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Irene", "James", "Karen", "Louis", "Maria", "Nora",
    "Oscar", "Paula",
)  # fmt: skip
WORDS = (
    "apple", "river", "candle", "silver", "window", "tiger", "garden", "orange", "thunder", "marble", "violin", "pepper",
    "button", "falcon", "desert", "ladder",
)  # fmt: skip
HABITS = (
    "Every morning there is coffee with two neighbours.", "The train to the office takes an hour.", "Two cats live there too.",
    "On Sundays the bicycle stays at home.", "The old piano is out of tune.", "A sister lives in another country.",
    "Last year there was a long journey.", "The kitchen was painted in spring.",
)  # fmt: skip
OTHER_PREFIX = "These are notes about people. Answer the question with the secret word that a note gives.\n\n"


@dataclass(frozen=True, slots=True)
class Question:
    """Notes, what is asked, and the number or word that is right."""

    notes: list[str]
    text: str
    number: str
    prefix: str = PREFIX


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--models", default="cloister-5m,smollm2-135m", help="names or directories, with commas")
    parser.add_argument("--num-questions", type=int, default=24, help="for each number of notes")
    parser.add_argument("--tune", action="store_true", help="choose temperature and scale, and nothing else")
    parser.add_argument("--adapter", type=Path, help="try the link tokens of this directory, for one model, and nothing else")
    parser.add_argument("--temperatures", default="1,0.8,0.6,0.4", help="to choose from, with commas")
    parser.add_argument("--scales", default="1.2,1.1,1,0.9", help="to choose from, with commas")
    parser.add_argument("--num-rounds", type=int, default=3, help="prompts of each length that are timed")
    options = parser.parse_args()
    bench = Bench(
        "prompt_modules" if options.adapter is None else "link_tokens",
        f"Documents encoded separately, {options.models}",
        "a hit in another order answers sooner the longer the documents are; fewer answers are right than with full prefill, "
        "since the models were not trained for it",
    )
    for name in options.models.split(","):
        if options.adapter is not None:
            try_links(bench, options, name)
            continue
        engine = open_engine(options, model=name, prefix_cache=True, max_model_len=8192 if name != "cloister-5m" else None)
        tokenizer = Tokenizer(locate(name))
        if options.tune:
            tune_weights(bench, options, name, engine, tokenizer)
            continue
        judge_answers(bench, options, name, engine, tokenizer)
        time_hits(bench, options, name, engine, tokenizer)
    return bench.finish(options)


def draw(rng: random.Random, num_notes: int, num_sentences: int) -> Question:
    places = rng.sample(PLACES, num_notes)
    numbers = [str(rng.randrange(1000, 10000)) for _ in places]
    notes = []
    for place, number in zip(places, numbers, strict=True):
        sentences = [rng.choice(FILLER) for _ in range(num_sentences)]
        sentences.insert(rng.randrange(num_sentences + 1), f"The number of the {place} is {number}.")
        notes.append(f"Note about the {place}: {' '.join(sentences)}\n")
    asked = rng.randrange(num_notes)
    text = f"\nQuestion: What is the number of the {places[asked]}?\nAnswer: The number of the {places[asked]} is"
    return Question(notes, text, numbers[asked])


def draw_person(rng: random.Random, num_notes: int, num_sentences: int) -> Question:
    """Returns a question of another text."""
    people, words = rng.sample(PEOPLE, num_notes), rng.sample(WORDS, num_notes)
    notes = []
    for person, word in zip(people, words, strict=True):
        sentences = [rng.choice(HABITS) for _ in range(num_sentences)]
        sentences.insert(rng.randrange(num_sentences + 1), f"The secret word of {person} is {word}.")
        notes.append(f"About {person}: {' '.join(sentences)}\n")
    asked = rng.randrange(num_notes)
    text = f"\nQuestion: What is the secret word of {people[asked]}?\nAnswer: The secret word of {people[asked]} is"
    return Question(notes, text, words[asked], OTHER_PREFIX)


def make_request(
    kind: str,
    question: Question,
    tokenizer: Tokenizer,
    block_size: int,
    max_tokens: int = 8,
    weights: tuple[float, float] = (1.0, 1.0),
    num_chosen: int | None = None,
    adapter: AdapterInfo | None = None,
    has_links: bool = True,
) -> Request:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    digest = None if adapter is None else adapter.digest
    num_links = adapter.num_links if adapter is not None and has_links else 0
    if kind in ("one text", "no notes"):
        notes = question.notes if kind == "one text" else []
        tokens = tokenizer.encode("".join([question.prefix, *notes, question.text]), add_special_tokens=True)
        return Request(request_id=kind, token_ids=tokens, sampling=sampling, adapter=digest)
    if kind == "modules of a schema":
        modules = [ModuleInput(name=f"note-{number}", text=note) for number, note in enumerate(question.notes)]
        layout = Layout(PromptSchemaBody(name="notes", prefix=question.prefix, modules=[*modules]), tokenizer, block_size)
        asked = tokenizer.encode(question.text, add_special_tokens=False)
        placed = layout.join([ModuleChoice(name=module.name) for module in modules[:num_chosen]], asked, num_links)
        return Request(
            request_id=kind, token_ids=placed.token_ids, sampling=sampling, documents=placed.documents, adapter=digest
        )
    prompt = join_documents(question.prefix, question.notes, question.text, tokenizer, block_size, num_links)
    weighed = Documents(prompt.documents.starts, prompt.documents.end, *weights, num_links=num_links)
    documents = weighed if kind == "separately" else None
    return Request(request_id=kind, token_ids=prompt.token_ids, sampling=sampling, documents=documents, adapter=digest)


def ask(engine: EngineCore, request: Request, name: str) -> tuple[str, float, int]:
    """Returns the answer, the seconds to its first token, and how many tokens of the prompt were cached."""
    engine.input_queue.put(Submit(msgspec.structs.replace(request, request_id=name)))
    started_s, first_s, text, num_cached, is_done = time.perf_counter(), 0.0, "", 0, False
    while not is_done:
        brought = engine.step()
        for output in () if brought is None else brought.outputs:
            if output.error is not None:
                raise RuntimeError(output.error)
            first_s = first_s or time.perf_counter() - started_s
            text, num_cached, is_done = text + output.text, output.num_cached_tokens, output.finish_reason is not None
    return text, first_s, num_cached


def judge_answers(bench: Bench, options: argparse.Namespace, name: str, engine: EngineCore, tokenizer: Tokenizer) -> None:
    rng, rows = random.Random(options.seed), []
    with make_progress() as progress:
        for num_notes in NUM_NOTES:
            right = dict.fromkeys(KINDS, 0)
            num_same = 0
            for number in progress.track(range(options.num_questions), description=f"{name}, {num_notes} notes"):
                question = draw(rng, num_notes, 3)
                answers = {}
                for kind in KINDS:
                    request = make_request(kind, question, tokenizer, engine.model.document_block_size)
                    answers[kind] = ask(engine, request, f"{num_notes} {number} {kind}")[0]
                    right[kind] += answers[kind].strip().startswith(question.number)
                num_same += answers["separately"] == answers["one text, filled up"]
            rows.append([num_notes, *(right[kind] / options.num_questions for kind in KINDS), num_same / options.num_questions])
    headers = ("notes", *KINDS, "separately as filled up")
    bench.print_rows(f"{name}: share of right answers ({options.num_questions} questions each)", headers, rows)
    bench.check(f"{name}: right without notes", max(row[KINDS.index("no notes") + 1] for row in rows), high=0.1)


def tune_weights(bench: Bench, options: argparse.Namespace, name: str, engine: EngineCore, tokenizer: Tokenizer) -> None:
    """Chooses temperature and scale by right answers about places, and reports both texts with those and without."""
    rng = random.Random(options.seed + 2)
    questions = [draw(rng, num_notes, 3) for num_notes in NUM_NOTES for _ in range(options.num_questions)]
    others = [draw_person(rng, num_notes, 3) for num_notes in NUM_NOTES for _ in range(options.num_questions)]
    temperatures, scales = ([float(each) for each in given.split(",")] for given in (options.temperatures, options.scales))
    shares: dict[tuple[float, float], float] = {}
    with make_progress() as progress:
        for weights in progress.track(list(product(temperatures, scales)), description=f"{name}: temperatures and scales"):
            shares[weights] = sum(judge(engine, tokenizer, questions, "separately", weights)) / len(questions)
    rows = [[temperature, *(shares[temperature, scale] for scale in scales)] for temperature in temperatures]
    headers = ("temperature", *(f"scale {scale}" for scale in scales))
    bench.print_rows(f"{name}: right answers about places ({len(questions)} questions)", headers, rows)
    best = max(shares, key=lambda weights: (shares[weights], -abs(weights[0] - 1) - abs(weights[1] - 1)))
    judged: list[list[Any]] = []
    for text, asked in (("places, tuned on", questions), ("people", others)):
        ways: list[tuple[str, tuple[float, float] | None]] = [
            ("one text", None), ("separately", (1.0, 1.0)), ("separately", best), (KINDS[3], None), ("no notes", None)
        ]  # fmt: skip
        for kind, chosen in ways:
            right = judge(engine, tokenizer, asked, kind, chosen or (1.0, 1.0))
            size = options.num_questions
            of_size = [sum(right[place : place + size]) / size for place in range(0, len(right), size)]
            judged.append([text, kind, "" if chosen is None else f"{chosen[0]}, {chosen[1]}", *of_size])
    headers = ("text", "computed as", "temperature, scale", *(f"{num_notes} notes" for num_notes in NUM_NOTES))
    bench.print_rows(f"{name}: share of right answers ({options.num_questions} questions each)", headers, judged)
    bench.check(f"{name}: right without notes", max(max(row[3:]) for row in judged if row[1] == "no notes"), high=0.2)


def judge(
    engine: EngineCore, tokenizer: Tokenizer, questions: Sequence[Question], kind: str,
    weights: tuple[float, float] = (1.0, 1.0), adapter: AdapterInfo | None = None, has_links: bool = True,
) -> list[bool]:  # fmt: skip
    """Returns which questions are answered right."""
    right, size = [], engine.model.document_block_size
    for number, question in enumerate(questions):
        request = make_request(kind, question, tokenizer, size, weights=weights, adapter=adapter, has_links=has_links)
        answer = ask(engine, request, f"{kind} {weights} {adapter is None or adapter.name} {has_links} {number}")[0]
        right.append(answer.strip().startswith(question.number))
    return right


def try_links(bench: Bench, options: argparse.Namespace, name: str) -> None:
    """Compares link tokens of an adapter, newlines in their place, and no links."""
    model, tokenizer = load(locate(name)), Tokenizer(locate(name))
    table = dequantized(model.weights.read("embed.weight"))
    newline = table[tokenizer.encode("\n", add_special_tokens=False)[-1]].astype(np.float32)
    with tempfile.TemporaryDirectory() as folder:
        write_tensors(Path(folder) / LINKS_FILE, {"link_tokens": np.tile(newline, (NUM_NEWLINES, 1))})
        lora = f"trained={options.adapter},newlines={folder}"
        longest = 8192 if name != "cloister-5m" else None
        engine = open_engine(options, model=name, prefix_cache=True, max_model_len=longest, lora=lora)
        adapters = {adapter.name: adapter for adapter in engine.adapters.loaded}
        if options.num_questions:
            judge_links(bench, options, name, engine, tokenizer, adapters)
        time_links(bench, options, name, engine, tokenizer, adapters["newlines"])


def judge_links(
    bench: Bench, options: argparse.Namespace, name: str, engine: EngineCore, tokenizer: Tokenizer,
    adapters: Mapping[str, AdapterInfo],
) -> None:  # fmt: skip
    rng, size = random.Random(options.seed + 3), options.num_questions
    ways: list[tuple[str, str, bool]] = [
        ("one text", "", False), ("separately", "", False), (KINDS[3], "", False), ("separately", "newlines", True),
        (KINDS[3], "newlines", True), ("one text", "trained", False), ("separately", "trained", False),
        ("separately", "trained", True), (KINDS[3], "trained", False), (KINDS[3], "trained", True),
        ("no notes", "trained", False),
    ]  # fmt: skip
    rows: list[list[Any]] = []
    with make_progress() as progress:
        for text, drawn in (("places", draw), ("people", draw_person)):
            questions = [drawn(rng, num_notes, 3) for num_notes in NUM_NOTES for _ in range(size)]
            for kind, adapter, has_links in progress.track(ways, description=f"{name}, {text}"):
                right = judge(engine, tokenizer, questions, kind, adapter=adapters.get(adapter), has_links=has_links)
                of_size = [sum(right[place : place + size]) / size for place in range(0, len(right), size)]
                rows.append([text, kind, adapter, "yes" if has_links else "", *of_size])
    headers = ("text", "computed as", "adapter", "links", *(f"{num_notes} notes" for num_notes in NUM_NOTES))
    bench.print_rows(f"{name}: share of right answers ({size} questions each)", headers, rows)
    bench.check(f"{name}: right without notes", max(max(row[4:]) for row in rows if row[1] == "no notes"), high=0.2)


def time_links(
    bench: Bench, options: argparse.Namespace, name: str, engine: EngineCore, tokenizer: Tokenizer, adapter: AdapterInfo
) -> None:
    """Times the first token behind eight cached documents, with links and without, beside one text; all with an adapter that
    changes no product."""
    rng, rows, size = random.Random(options.seed + 4), [], engine.model.document_block_size
    for num_sentences in SENTENCES:
        times: dict[tuple[str, bool], list[float]] = {
            ("one text", False): [],
            ("separately", False): [],
            ("separately", True): [],
        }
        for number in range(options.num_rounds):
            question = draw(rng, 8, num_sentences)
            ask(engine, make_request("separately", question, tokenizer, size, 1, adapter=adapter), f"{num_sentences} {number}")
            for kind, has_links in times:
                asked = shuffle(rng, question)
                request = make_request(kind, asked, tokenizer, size, 1, adapter=adapter, has_links=has_links)
                times[kind, has_links].append(ask(engine, request, f"{num_sentences} {number} {kind} {has_links}")[1])
        medians = [1e3 * statistics.median(each) for each in times.values()]
        rows.append([len(request.token_ids), *medians, medians[0] / medians[2]])
    headers = ("prompt tokens", "one text", "separately, cached", "the same with links", "one text against that")
    bench.print_rows(f"{name}: time to first token, ms (median of {options.num_rounds})", headers, rows)
    bench.check(f"{name}: one text against cached documents with links, longest prompt", rows[-1][-1], low=2.0)


def time_hits(bench: Bench, options: argparse.Namespace, name: str, engine: EngineCore, tokenizer: Tokenizer) -> None:
    rng, rows = random.Random(options.seed + 1), []
    size = engine.model.document_block_size
    for num_sentences in SENTENCES:
        times: dict[str, list[float]] = {"one text": [], "all new": [], "another order": [], "modules": [], "some modules": []}
        lengths: list[int] = []
        for number in range(options.num_rounds):
            question = draw(rng, 8, num_sentences)
            requests = [
                ("one text", make_request("one text", question, tokenizer, size, 1)),
                ("all new", make_request("separately", question, tokenizer, size, 1)),
                ("another order", make_request("separately", shuffle(rng, question), tokenizer, size, 1)),
                ("modules", make_request(KINDS[3], question, tokenizer, size, 1)),
                ("some modules", make_request(KINDS[3], question, tokenizer, size, 1, num_chosen=6)),
            ]
            if len(requests[1][1].token_ids) >= engine.model.max_model_len:
                break
            for kind, request in requests:
                times[kind].append(ask(engine, request, f"{num_sentences} {number} {kind}")[1])
            lengths.append(len(requests[1][1].token_ids))
        if lengths:
            medians = {kind: 1e3 * statistics.median(each) for kind, each in times.items()}
            rows.append([round(statistics.median(lengths)), *medians.values(), medians["one text"] / medians["another order"]])
    headers = (
        "prompt tokens", "one text", "separately, all new", "separately, hit in another order", "modules, all new",
        "six of eight modules, hit", "hit in another order against one text",
    )  # fmt: skip
    bench.print_rows(f"{name}: time to first token, ms (median of {options.num_rounds})", headers, rows)
    bench.check(f"{name}: a hit of the longest prompt against one text", rows[-1][-1], low=2.0)


def shuffle(rng: random.Random, question: Question) -> Question:
    """Returns the same notes and question with the notes in an order in which none stands where it stood."""
    shift = rng.randrange(1, len(question.notes))
    notes: Sequence[str] = question.notes
    return Question([*notes[shift:], *notes[:shift]], question.text, question.number)


if __name__ == "__main__":
    sys.exit(main())
