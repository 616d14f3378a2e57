"""The engine in this process, with the embedded model."""

import json
import subprocess
import sys
import threading

import numpy as np
import pytest

from cloister import LLM, CloisterError, Grammar, GrammarKind, SamplingParams
from cloister.scheduler import Scheduler
from cloister.types.events import Preempted, Scheduled
from tests.arrivals import hold_steps_until
from tests.slow_engine import slow_down

PROMPTS = [
    "The CREATE INDEX command",
    "A decorator is a function that",
    "In PostgreSQL, VACUUM reclaims storage occupied by dead tuples. " * 6,
    "import",
    "The following table lists the functions that are available for text. " * 3,
]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)


def fingerprint(completion):
    """Tokens, and log-probabilities to the last bit."""
    output = completion.outputs[0]
    return output.token_ids, [(entry.logprob, entry.top) for entry in output.logprobs]


@pytest.fixture(scope="module")
def llm():
    with LLM("cloister-5m", num_threads=1, max_num_seqs=16) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(llm):
    """Each prompt's answer when nobody else is there and nothing is cached."""
    with LLM("cloister-5m", num_threads=1, prefix_cache=False) as fresh:
        return [fingerprint(fresh.generate([prompt], GREEDY)[0]) for prompt in PROMPTS]


def test_answers_are_the_same_to_the_last_bit_in_company(llm, alone):
    together = llm.generate(PROMPTS * 3, GREEDY)
    assert [fingerprint(completion) for completion in together] == alone * 3


def test_answers_are_the_same_to_the_last_bit_from_the_prefix_cache(llm, alone):
    llm.generate(PROMPTS, GREEDY)
    again = llm.generate(PROMPTS, GREEDY)
    assert again[2].num_cached_tokens > 0
    assert [fingerprint(completion) for completion in again] == alone


@pytest.mark.parametrize("block_size", [1, 5, 256])
def test_answers_are_the_same_to_the_last_bit_at_any_block_size(alone, block_size):
    with LLM("cloister-5m", num_threads=1, block_size=block_size, max_model_len=1024) as other:
        assert [fingerprint(completion) for completion in other.generate(PROMPTS, GREEDY)] == alone


def test_answers_are_the_same_to_the_last_bit_in_chunks_and_on_two_threads(alone, monkeypatch):
    monkeypatch.setattr("cloister.backends.torch.schedule.WORTH_SHARING", 0.0)
    with LLM("cloister-5m", max_batched_tokens=7, num_threads=2, max_num_seqs=5) as other:
        assert [fingerprint(completion) for completion in other.generate(PROMPTS, GREEDY)] == alone


def test_answers_are_the_same_to_the_last_bit_after_preemption(alone, monkeypatch):
    hold_steps_until(monkeypatch, len(PROMPTS))
    with LLM(
        "cloister-5m", num_threads=1, max_model_len=256, kv_memory_mb=0.38, block_size=4, prefix_cache=False, speculate="none"
    ) as tight:
        events = []
        tight.subscribe(events.append)
        answers = tight.generate(PROMPTS, GREEDY)
        assert any(isinstance(event, Preempted) for event in events), "the test must be tight enough to preempt"
    assert [fingerprint(completion) for completion in answers] == alone


@pytest.mark.parametrize("policy", ["mlfq", "cfs", "qoe", "reorder"])
def test_answers_are_the_same_to_the_last_bit_in_any_order(alone, monkeypatch, policy):
    monkeypatch.setattr("cloister.scheduler.policies.qoe.INTERVAL_S", 0.0)
    monkeypatch.setattr("cloister.scheduler.policies.cfs.SLICE_TOKENS", 4)
    slots, kv_memory_mb = (8, 0.38) if policy == "reorder" else (2, 2.0)
    hold_steps_until(monkeypatch, min(len(PROMPTS) * 2, slots * 2))  # as many as an LLM submits at once
    shape = {"max_model_len": 256, "kv_memory_mb": kv_memory_mb, "block_size": 4, "max_num_seqs": slots}
    with LLM(
        "cloister-5m", num_threads=1, scheduler=policy, prefix_cache=policy != "reorder", speculate="none", **shape
    ) as engine:
        events = []
        engine.subscribe(events.append)
        answers = engine.generate(PROMPTS * 2, GREEDY)
        assert any(isinstance(event, Preempted) for event in events), "the test must be tight enough to preempt"
    assert [fingerprint(completion) for completion in answers] == alone * 2


def test_a_seed_means_the_same_tokens_in_any_company(llm):
    sampling = SamplingParams(temperature=1.0, top_p=0.9, seed=7, max_tokens=20, ignore_eos=True)
    (one,) = llm.generate([PROMPTS[0]], sampling)
    many = llm.generate([PROMPTS[0]] * 4 + PROMPTS[1:], sampling)
    assert [completion.outputs[0].token_ids for completion in many[:4]] == [one.outputs[0].token_ids] * 4


def test_without_a_seed_answers_differ(llm):
    sampling = SamplingParams(temperature=1.5, max_tokens=20, ignore_eos=True)
    texts = {completion.text for completion in llm.generate([PROMPTS[0]] * 4, sampling)}
    assert len(texts) > 1


def test_sequences_of_one_request_differ_and_compute_the_prompt_once(llm):
    events = []
    llm.subscribe(events.append)
    (completion,) = llm.generate(["A prompt for several answers"], SamplingParams(n=3, seed=1, max_tokens=12, ignore_eos=True))
    assert len({tuple(output.token_ids) for output in completion.outputs}) == 3
    assert sum(isinstance(event, Scheduled) for event in events) == 1


def test_a_stream_shows_token_by_token_and_adds_up_to_the_answer(llm, alone, monkeypatch):
    step_when_read, outputs = wait_for_reader(monkeypatch), []
    for output in llm.stream(PROMPTS[0], GREEDY):
        outputs.append(output)
        step_when_read.release()
    assert [len(output.token_ids) for output in outputs] == [1] * 24
    assert [token for output in outputs for token in output.token_ids] == alone[0][0]
    assert outputs[-1].finish_reason == "length"


def wait_for_reader(monkeypatch):
    """Has engines make one step more for each release: outputs that their reader is too slow for become one."""
    may_step, plan = threading.Semaphore(), Scheduler.plan

    def plan_when_read(scheduler, now):
        assert not scheduler.requests or may_step.acquire(timeout=300)
        return plan(scheduler, now)

    monkeypatch.setattr(Scheduler, "plan", plan_when_read)
    return may_step


def test_a_stream_that_is_closed_early_gives_its_blocks_back(llm, monkeypatch):
    slow_down(monkeypatch)
    events = []
    llm.subscribe(events.append)
    stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=2000, ignore_eos=True))
    next(stream)
    stream.close()
    llm.generate(["x"], SamplingParams(max_tokens=1))
    assert next(event.reason for event in events if type(event).__name__ == "Ended") == "abort"


def test_threads_may_share_it(llm, alone):
    found = {}

    def ask(number):
        found[number] = fingerprint(llm.generate([PROMPTS[number]], GREEDY)[0])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert [found[number] for number in range(len(PROMPTS))] == alone


def test_a_stop_string_ends_the_answer_and_is_no_part_of_it(llm):
    (whole,) = llm.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    stop = whole.text[10:14]
    (cut,) = llm.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=(stop,)))
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)


def test_prompt_logprobs_come_for_every_token_but_the_first(llm):
    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    (completion,) = llm.generate([PROMPTS[2]], sampling)
    assert len(completion.prompt_logprobs) == len(completion.prompt_token_ids)
    assert completion.prompt_logprobs[0] is None
    assert [entry.token_id for entry in completion.prompt_logprobs[1:]] == completion.prompt_token_ids[1:]


@pytest.mark.parametrize(
    ("prompt", "words"),
    [([10**6], "token id that is not in"), ([1] * 9000, "9000 tokens and the context window holds 8192"), ([], "empty")],
)
def test_a_prompt_that_cannot_run_is_refused_with_what_to_do(llm, prompt, words):
    with pytest.raises(CloisterError, match=words):
        llm.generate([prompt], SamplingParams(max_tokens=1))


def test_a_closed_llm_says_so():
    llm = LLM("cloister-5m", num_threads=1, max_model_len=64, kv_memory_mb=1)
    llm.close()
    llm.close()
    with pytest.raises(CloisterError, match="was closed"):
        llm.generate(["x"])
    with pytest.raises(CloisterError, match="was closed"):
        list(llm.stream("x"))


def test_a_stream_that_gets_no_turn_says_so(monkeypatch):
    with LLM("cloister-5m", num_threads=1, max_model_len=64, kv_memory_mb=1, max_waiting=1, request_timeout_s=0.1) as llm:
        llm._call(llm._llm._room.acquire())
        with monkeypatch.context() as patch:
            patch.setattr("cloister.api.synchronous.CLOSE_TIMEOUT_S", 0.1)
            with pytest.raises(CloisterError, match="send fewer at once"):
                list(llm.stream("x"))


@pytest.mark.parametrize(
    "settings", [{"port": 9000}, {"blok_size": 1}, {"block_size": 0}, {"scheduler": "lottery"}, {"kv_memory_mb": 0.001}]
)
def test_wrong_settings_are_refused(settings):
    with pytest.raises(CloisterError):
        LLM("cloister-5m", **settings)


def test_texts_become_vectors_the_same_bits_alone_and_in_company(llm):
    together = llm.embed([*PROMPTS, [5, 6, 7]])
    assert together.shape == (6, llm.model.hidden_size)
    assert together.dtype == np.float32
    assert np.linalg.norm(together, axis=1) == pytest.approx([1] * 6)
    for prompt, vector in zip(PROMPTS, together, strict=False):
        assert (llm.embed(prompt)[0] == vector).all()
    with LLM("cloister-5m", num_threads=1, max_batched_tokens=7) as chunked:
        assert (chunked.embed([*PROMPTS, [5, 6, 7]]) == together).all()


def test_a_vector_is_the_mean_of_what_the_last_token_of_each_beginning_says(llm):
    tokens = llm.tokenizer.encode(PROMPTS[0], True)
    with LLM("cloister-5m", num_threads=1, pooling="last") as last:
        states = last.embed([tokens[: end + 1] for end in range(len(tokens))], normalize=False)
    assert llm.embed(tokens, normalize=False)[0] == pytest.approx(states.mean(0), abs=1e-5)
    assert llm.embed(tokens, dimensions=10)[0] == pytest.approx(
        states.mean(0)[:10] / np.linalg.norm(states.mean(0)[:10]), abs=1e-5
    )


def test_a_text_is_most_like_itself(llm):
    scores = llm.score(PROMPTS[0], PROMPTS)
    assert scores[0] == pytest.approx(1)
    assert max(scores[1:]) < 0.99
    assert llm.score(PROMPTS, PROMPTS) == pytest.approx([1] * len(PROMPTS))


def test_vectors_and_answers_run_together(llm, alone):
    found = {}
    thread = threading.Thread(target=lambda: found.update(vectors=llm.embed(PROMPTS * 8)))
    thread.start()
    assert [fingerprint(completion) for completion in llm.generate(PROMPTS, GREEDY)] == alone
    thread.join(300)
    assert (found["vectors"] == llm.embed(PROMPTS * 8)).all()


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda llm: llm.embed("x", dimensions=10**6), "dimensions must be from 1 to"),
        (lambda llm: llm.embed([[1] * 9000]), "9000 tokens"),
        (lambda llm: llm.score(["a", "b"], ["a", "b", "c"]), "text_1 has 2 texts and text_2 has 3"),
    ],
)
def test_what_cannot_be_a_vector_is_refused_with_what_to_do(llm, ask, words):
    with pytest.raises(CloisterError, match=words):
        ask(llm)


def test_an_answer_has_the_form_that_its_grammar_gives_it(llm):
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["csv", "json"]}},
        "required": ["name"],
        "additionalProperties": False,
    }
    forms = [Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)), Grammar(GrammarKind.CHOICE, '["yes", "no"]'), None]
    answers = llm.generate(PROMPTS[:3], [SamplingParams(grammar=form, max_tokens=200, seed=1) for form in forms])
    assert json.loads(answers[0].text)["name"] in ("csv", "json")
    assert answers[1].text in ("yes", "no")
    assert answers[2].text


@pytest.mark.parametrize(
    ("kind", "source"),
    [(GrammarKind.REGEX, "("), (GrammarKind.JSON_SCHEMA, "{"), (GrammarKind.CHOICE, "[]"), (GrammarKind.LARK, "")],
)
def test_a_form_that_cannot_be_followed_is_refused(llm, kind, source):
    with pytest.raises(CloisterError, match="`grammar`"):
        llm.generate("x", SamplingParams(grammar=Grammar(kind, source)))


def test_progress_is_told_prompt_by_prompt_or_drawn(llm, capsys):
    told = []
    llm.generate(PROMPTS, SamplingParams(max_tokens=1), on_progress=lambda *counts: told.append(counts))
    assert told == [(number + 1, len(PROMPTS)) for number in range(len(PROMPTS))]
    llm.embed(PROMPTS, on_progress=True)
    captured = capsys.readouterr()
    assert f"{len(PROMPTS)}/{len(PROMPTS)}" in captured.err
    assert captured.out == ""


FORGETFUL = """
import threading
from cloister import LLM, SamplingParams

endless = SamplingParams(max_tokens=4000, ignore_eos=True)
for _ in range(2):
    llm = LLM("cloister-5m", num_threads=1)
    threading.Thread(target=llm.generate, args=("Hello", endless), daemon=True).start()
    llm.generate("Hello", SamplingParams(max_tokens=8, ignore_eos=True))
print("done")
"""


def test_a_program_that_closes_nothing_ends_without_a_crash():
    ended = subprocess.run([sys.executable, "-c", FORGETFUL], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr


def test_parts_that_are_no_text_are_refused(llm):
    with pytest.raises(CloisterError, match="text only"):
        llm.chat([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}])
