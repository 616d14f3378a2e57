"""Link tokens that are trained: what training computes is what an engine does with the adapter that it writes."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch

from cloister.launch import build_engine, resolve_settings
from cloister.models import locate
from cloister.text import Tokenizer
from cloister.types.request import Request, SamplingParams
from tests.equality import ask
from training.links import add_updates, begin_links, make_prompt, open_model, run, train, write
from training.notes import KINDS, draw_lesson

MODEL = "cloister-5m"


def test_notes_have_different_values_and_the_answer_is_the_one_asked_for() -> None:
    for seed in range(50):
        lesson = draw_lesson(Random(seed), 4)
        holders = [note for note in lesson.notes if lesson.answer.strip(" .") in note.split(": ", 1)[-1]]
        assert len(lesson.notes) == 4
        assert holders, "no note has the answer"
        assert not any(name in note for kind in KINDS for name in ("harbour", "secret word") for note in kind.wordings)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks transformers for it
def test_an_engine_computes_what_was_trained(tmp_path: Path) -> None:
    torch.manual_seed(0)
    base, tokenizer = open_model(locate(MODEL)), Tokenizer(locate(MODEL))
    links, model = begin_links(base, tokenizer, 3), add_updates(base, 4)
    prompt = make_prompt(draw_lesson(Random(5), 3), tokenizer, 3, is_placed=False)
    before = run(model, links, prompt).item()
    began = links.detach().clone()
    train(model, tokenizer, links, lambda: None, minutes=0.01, rates=(2e-2, 2e-3), rows=2, seed=0)
    assert not torch.equal(began, links), "nothing was learned"
    after = run(model, links, prompt).item()
    assert after != before
    write(model, links, tmp_path, 4)
    settings = {"model": MODEL, "lora": f"trained={tmp_path}", "dtype": "float32", "num_threads": 1, "weights_cache": ""}
    core = build_engine(resolve_settings(settings, listens=False).engine.config)
    adapter = core.adapters.loaded[0]
    found = 0.0
    for end in range(-prompt.num_answer, 0):  # token by token, as documents have no logprobs of a prompt
        wanted = prompt.token_ids[end]
        sampling = SamplingParams(max_tokens=1, temperature=0.0, logprobs=core.model.vocab_size, ignore_eos=True)
        request = Request(
            request_id=str(end),
            token_ids=prompt.token_ids[:end],
            sampling=sampling,
            documents=prompt.documents,
            adapter=adapter.digest,
        )
        answer = ask(core, [request]).answers[str(end), 0]
        found -= dict(answer.logprobs[0].top)[wanted]
    assert prompt.documents.num_links == adapter.num_links == 3
    assert found / prompt.num_answer == pytest.approx(after, abs=1e-3)
