"""Text completions on a real engine: forms of prompts, echo, log-probabilities of the older format."""

from __future__ import annotations

import math

import httpx
import openai
import pytest

from tests.server.running_server import MODEL, RunningServer, ScriptedEngine, says, serving_script


@pytest.fixture(scope="module")
def sdk(thinking: RunningServer):
    with openai.OpenAI(base_url=f"{thinking.url}/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


def complete(sdk, prompt, **more):
    return sdk.completions.create(model=MODEL, prompt=prompt, **{"max_tokens": 4, "temperature": 0, **more})


def test_text_and_its_tokens_are_the_same_prompt(sdk):
    text, tokens = complete(sdk, "once"), complete(sdk, list(b"once"))
    assert text.choices[0].text == tokens.choices[0].text
    assert text.usage.prompt_tokens == tokens.usage.prompt_tokens == 4


def test_a_list_of_prompts_is_answered_in_order(sdk):
    alone = [complete(sdk, prompt).choices[0].text for prompt in ("one", "two", "three")]
    together = complete(sdk, ["one", "two", "three"])
    assert [choice.text for choice in together.choices] == alone
    assert [choice.index for choice in together.choices] == [0, 1, 2]
    assert together.usage.completion_tokens == 12
    as_tokens = complete(sdk, [list(b"one"), list(b"two"), list(b"three")])
    assert [choice.text for choice in as_tokens.choices] == alone


def test_n_of_each_prompt_stand_side_by_side(sdk):
    reply = complete(sdk, ["one", "two"], n=2, temperature=1, seed=3)
    alone = [complete(sdk, prompt, n=2, temperature=1, seed=3) for prompt in ("one", "two")]
    assert [c.text for c in reply.choices] == [c.text for one in alone for c in one.choices]


def test_a_stream_of_several_prompts_gives_the_same_texts(sdk):
    whole = complete(sdk, ["one", "two"], max_tokens=8)
    texts = {0: "", 1: ""}
    for chunk in complete(sdk, ["one", "two"], max_tokens=8, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert [texts[0], texts[1]] == [choice.text for choice in whole.choices]


def test_echo_repeats_the_prompt(sdk):
    answer = complete(sdk, "once").choices[0].text
    assert complete(sdk, "once", echo=True).choices[0].text == "once" + answer
    assert complete(sdk, list(b"once"), echo=True).choices[0].text == "once" + answer
    streamed = complete(sdk, "once", echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == "once" + answer


def test_logprobs_of_the_older_format_line_up(sdk):
    logprobs = complete(sdk, "once", logprobs=2).choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == len(logprobs.text_offset) == 4
    for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert top[token] == logprob == max(top.values())
        assert len(top) == 2


def test_zero_logprobs_give_the_chosen_token_alone(sdk):
    logprobs = complete(sdk, "once", logprobs=0).choices[0].logprobs
    assert [list(top) for top in logprobs.top_logprobs] == [[token] for token in logprobs.tokens]


@pytest.mark.parametrize("n", [1, 2])
def test_echo_with_logprobs_covers_the_prompt(sdk, n):
    asked = {"echo": True, "logprobs": 1, "n": n, "temperature": 1, "seed": 5}
    reply = complete(sdk, "ab€c", **asked)
    for choice in reply.choices:
        logprobs = choice.logprobs
        assert logprobs.tokens[:2] == ["a", "b"]
        assert logprobs.tokens[2:5] == ["bytes:\\xe2", "bytes:\\x82", "bytes:\\xac"]
        assert logprobs.token_logprobs[0] is None
        assert logprobs.top_logprobs[0] is None
        assert all(value is not None for value in logprobs.token_logprobs[1:])
        assert logprobs.text_offset[:7] == [0, 1, 2, 2, 2, 3, 4]
        assert len(logprobs.tokens) == 6 + 4
    streamed = {i: [] for i in range(n)}
    for chunk in complete(sdk, "ab€c", **asked, stream=True):
        if chunk.choices[0].logprobs:
            streamed[chunk.choices[0].index] += chunk.choices[0].logprobs.token_logprobs
    assert [streamed[i] for i in range(n)] == [choice.logprobs.token_logprobs for choice in reply.choices]


def test_a_prompt_can_be_scored_without_an_answer(sdk):
    scored = complete(sdk, "once upon", echo=True, logprobs=0, max_tokens=0)
    with_answer = complete(sdk, "once upon", echo=True, logprobs=0, max_tokens=1)
    assert scored.choices[0].text == "once upon"
    assert scored.choices[0].finish_reason == "length"
    assert scored.choices[0].logprobs.token_logprobs == with_answer.choices[0].logprobs.token_logprobs[:-1]
    assert scored.usage.completion_tokens == 0
    assert sum(scored.choices[0].logprobs.token_logprobs[1:]) < 0
    assert not any(map(math.isinf, scored.choices[0].logprobs.token_logprobs[1:]))


def test_the_last_usage_chunk_of_a_stream_counts_everything(sdk):
    chunks = list(complete(sdk, ["one", "two"], n=2, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 16
    assert chunks[-1].usage.prompt_tokens == 6


def test_requests_of_one_call_share_its_scope_and_have_ids_of_their_own(model_path):
    engine = ScriptedEngine(says("ok"))
    with serving_script(model_path, engine) as server:
        body = {"model": MODEL, "prompt": ["one", "two"], "best_of": 1}
        reply = httpx.post(f"{server.url}/v1/completions", json=body)
    assert [choice["text"] for choice in reply.json()["choices"]] == ["ok", "ok"]
    first, second = engine.taken
    assert first.scope == second.scope
    assert first.request_id != second.request_id


def test_the_best_of_several_are_those_with_the_likeliest_tokens(sdk):
    drawn = complete(sdk, ["one", "two"], n=5, temperature=1, seed=7, logprobs=0).choices
    best = complete(sdk, ["one", "two"], n=2, temperature=1, seed=7, extra_body={"best_of": 5})
    kept = []
    for first in (0, 5):
        ranked = sorted(drawn[first : first + 5], key=lambda c: -sum(c.logprobs.token_logprobs) / len(c.logprobs.tokens))
        kept += [choice.text for choice in ranked[:2]]
    assert [choice.text for choice in best.choices] == kept
    assert [choice.index for choice in best.choices] == [0, 1, 2, 3]
    assert all(choice.logprobs is None for choice in best.choices)
    assert best.usage.completion_tokens == 40  # of all that were drawn


def test_beam_search_answers_with_its_best_beams_and_one_beam_is_the_greedy_answer(sdk):
    greedy = complete(sdk, "one", max_tokens=6)
    alone = complete(sdk, "one", max_tokens=6, extra_body={"use_beam_search": True})
    assert alone.choices[0].text == greedy.choices[0].text
    found = complete(sdk, ["one", "two"], max_tokens=6, n=2, extra_body={"use_beam_search": True, "best_of": 6})
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in found.choices}) == 4
    assert found.usage.completion_tokens == 24


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"use_beam_search": True, "stream": True}, "stream"),
        ({"use_beam_search": True, "temperature": 0.5}, "temperature"),
        ({"use_beam_search": True, "n": 3, "best_of": 2}, "best_of"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 3, "stream": True}, "stream"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"use_beam_search": True, "best_of": 65}, "n"),
        ({"use_beam_search": True, "response_format": {"type": "json_object"}}, "use_beam_search"),
        ({"use_beam_search": True, "stop": "x"}, "use_beam_search"),
    ],
)
def test_what_contradicts_a_search_is_refused(thinking, fields, param):
    reply = httpx.post(f"{thinking.url}/v1/completions", json={"model": MODEL, "prompt": "x", **fields})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["param"], error["code"]) == (param, error["code"] if param == "n" else "invalid_request")
