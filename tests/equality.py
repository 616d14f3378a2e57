"""The same requests with and without drafts: whatever an answer consists of must be equal, to the last bit of a logprob."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from cloister.engine import EngineCore
from cloister.executor.drafters.heads import CARD, read_card
from cloister.launch import build_engine, resolve_settings
from cloister.models import load, locate
from cloister.quant.passages import CALIBRATION
from cloister.text import Tokenizer
from cloister.types.events import Preempted, Scheduled, Stepped, Submit
from cloister.types.request import Grammar, GrammarKind, Request, SamplingParams, SequenceOutput, TokenLogprobs
from tests.adapter_factory import write_adapter
from tests.drafter_factory import equip
from tests.mtp_layers import fit_layer

MODEL: Final = "cloister-5m"
PATIENCE_S: Final = 300.0
"""An engine may wait for so long for what others compute, such as a grammar."""
MAX_MODEL_LEN: Final = 160
ADAPTER: Final = "tuned"
SCHEMA: Final = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"type": "integer"}, "good": {"type": "boolean"}},
    "required": ["name", "size", "good"],
    "additionalProperties": False,
}
WISHES: Final[tuple[dict[str, Any], ...]] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.95},
    {
        "temperature": 0.9, "top_p": 0.95, "frequency_penalty": 0.5, "presence_penalty": 0.2, "repetition_penalty": 1.1,
        "logprobs": 4,
    },
    {"temperature": 0.8, "grammar": Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))},
    {"temperature": 0.0, "logprobs": 2, "adapter": ADAPTER},
    {"temperature": 1.0, "top_k": 50, "n": 2},
    {"temperature": 0.8, "logit_bias": {300: 2.0, 301: -3.0}, "min_tokens": 8, "prompt_logprobs": 1, "ignore_eos": True},
    {"temperature": 1.0, "min_p": 0.02, "adapter": ADAPTER, "stop": (".",)},
)  # fmt: skip
"""What requests ask for in turn, beside a seed."""

TIGHT_MB: Final = {"spec_infer": 0.7, "draft_model": 0.3, "mtp": 0.31}
"""Memory for KV of little more than the longest sequence, where a drafter keeps KV too."""


@dataclass
class Answer:
    """What one sequence said, as clients get it."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    end: tuple[Any, Any] | None = None


@dataclass
class Report:
    """Answers by (request id, index), and what happened on the way to them."""

    answers: dict[tuple[str, int], Answer] = field(default_factory=dict)
    num_preempted: int = 0
    num_hits: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_steps: int = 0


def prepare(folder: Path, documents: Callable[[Path], Sequence[Sequence[int]]] | None = None) -> Path:
    """Copies the embedded model and adds an adapter, and whatever drafters need that was not made for it.

    Args:
        documents: what a datastore is made of, if the model shall have another one than its own.
    """
    path = folder / "model"
    shutil.copytree(locate(MODEL), path)
    write_adapter(folder / ADAPTER, path, rank=4, size=0.2)
    passages = Tokenizer(path).encode(CALIBRATION.read_text()[:30_000])
    fit_layer(path, [passages[start : start + 200] for start in range(0, len(passages) - 200, 200)])
    own = path / "drafters"
    kept = {part.name: shutil.move(part, folder / f"kept-{part.name}") for part in own.iterdir()} if own.is_dir() else {}
    equip(path, documents(path) if documents is not None else [list(range(20, 60))], distance=0.05)
    for name, moved in kept.items():  # what was trained for the model is a better drafter than what is made up here
        shutil.rmtree(own / name, ignore_errors=True)
        shutil.move(moved, own / name)
        if (own / name / CARD).is_file():  # its tokens and hidden states are those of before; its files are not
            card = msgspec.structs.replace(read_card(own / name), fingerprint=load(path).info.fingerprint)
            (own / name / CARD).write_bytes(msgspec.json.encode(card))
    return path


def open_core(path: Path, **settings: Any) -> EngineCore:
    """Returns an engine of a prepared model that this thread steps."""
    chosen: dict[str, Any] = {
        "model": str(path), "max_model_len": MAX_MODEL_LEN, "num_threads": 1, "weights_cache": "",
        "lora": f"{ADAPTER}={path.parent / ADAPTER}", "block_size": 8, **settings,
    }  # fmt: skip
    return build_engine(resolve_settings(chosen, listens=False).engine.config)


def drafting(name: str, path: Path, num_drafts: int = 5) -> dict[str, Any]:
    """Returns the settings that make an engine draft."""
    small = {"draft_model": "cloister-draft", "long_spec": f"{path}/small/1", "spec_infer": f"cloister-draft,{path}/small/0"}
    settings: dict[str, Any] = {"speculate": name, "draft_tokens": num_drafts}
    return {**settings, "draft_model": small[name]} if name in small else settings


def tight(name: str) -> dict[str, Any]:
    """Returns settings of so few KV blocks and so small steps that prompts are chunked and sequences preempted."""
    memory = TIGHT_MB.get(name, 0.26)
    return {"max_num_seqs": 16, "prefix_cache": True, "max_batched_tokens": 40, "kv_memory_mb": memory}


def make_requests(prompts: Iterable[Sequence[int]], core: EngineCore, max_tokens: int, again: int = 0) -> list[Request]:
    """Returns a request for each prompt, and some of them a second time, for prefix hits; all of them repeatable."""
    digests = {info.name: info.digest for info in core.adapters.loaded}
    requests = []
    for number, prompt in enumerate(prompts):
        wishes = dict(WISHES[number % len(WISHES)])
        adapter = wishes.pop("adapter", None)
        sampling = SamplingParams(**{"max_tokens": max_tokens, "seed": number, **wishes})
        requests.append(
            Request(
                request_id=f"r{number}",
                token_ids=list(prompt)[: MAX_MODEL_LEN - max_tokens - 1],
                sampling=sampling,
                adapter=None if adapter is None else digests[adapter],
            )
        )
    return requests + [
        msgspec.structs.replace(request, request_id=f"{request.request_id} again") for request in requests[:again]
    ]


def ask(core: EngineCore, requests: Sequence[Request], advance: Callable[[int], None] = lambda _: None) -> Report:
    """Asks everything at once and steps until all is answered."""
    report = Report()
    for request in requests:
        core.input_queue.put(Submit(request))
    num_open = sum(request.sampling.n for request in requests)
    give_up_s = time.monotonic() + PATIENCE_S
    while num_open:
        outputs = core.step()
        if outputs is not None:
            give_up_s = time.monotonic() + PATIENCE_S
        assert time.monotonic() < give_up_s, "the engine has nothing to do while requests wait"
        for output in outputs.outputs if outputs is not None else ():
            _take(report.answers.setdefault((output.request_id, output.index), Answer()), output)
            assert output.error is None, output.error
            if output.finish_reason is not None:
                num_open -= 1
                advance(1)
        for event in outputs.events if outputs is not None else ():
            if isinstance(event, Preempted):
                report.num_preempted += 1
            elif isinstance(event, Scheduled):
                report.num_hits += bool(event.num_cached_tokens and not event.resumed)
            elif isinstance(event, Stepped):
                report.num_steps += 1
                report.num_drafted += sum(sum(each.drafted) for each in event.drafting)
                report.num_accepted += sum(sum(each.accepted) for each in event.drafting)
    return report


def _take(answer: Answer, output: SequenceOutput) -> None:
    answer.text += output.text
    answer.token_ids += output.token_ids
    answer.logprobs += output.logprobs or []
    answer.prompt_logprobs += output.prompt_logprobs or []
    if output.finish_reason is not None:
        answer.end = (output.finish_reason, output.stop_reason)


def differing(found: Report, wanted: Report) -> list[tuple[str, int]]:
    """Names the sequences whose answers are not the very same; an answer asked for again is compared with the first."""
    return [
        (name, index)
        for (name, index), answer in found.answers.items()
        if answer != wanted.answers[name.removesuffix(" again"), index]
    ]
