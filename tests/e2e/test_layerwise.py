"""Prompts longer than KV memory, with the embedded model: asked of an engine and of a server."""

from types import SimpleNamespace

import pytest

from cloister import LLM, SamplingParams
from cloister.server.embeddings import check_fits
from cloister.server.sampling import check_length
from cloister.types.errors import CloisterError, ConfigError, ContextLengthError, MemoryBudgetError
from cloister.types.request import ModelInfo

SMALL = {
    "num_threads": 1,
    "max_model_len": 512,
    "kv_memory_mb": 1.6,
    "dtype": "float32",
    "backend": "native",
    "max_num_seqs": 4,
}
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0, logprobs=3, ignore_eos=True)
SCORES = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=2)


@pytest.fixture(scope="module")
def small():
    with LLM("cloister-5m", max_prefill_only_len=1000, **SMALL) as llm:
        yield llm


@pytest.fixture(scope="module")
def ample():
    with LLM("cloister-5m", num_threads=1, max_model_len=1024, dtype="float32", backend="native", max_num_seqs=4) as llm:
        yield llm


@pytest.fixture(scope="module")
def prompt():
    return [(7 * i + i * i // 5) % 3000 + 300 for i in range(950)]


def test_a_token_has_the_bits_of_ample_memory(small, ample, prompt):
    one, other = (llm.generate([prompt], ONE_TOKEN)[0].outputs[0] for llm in (small, ample))
    assert one.token_ids == other.token_ids
    assert [(e.logprob, e.top) for e in one.logprobs] == [(e.logprob, e.top) for e in other.logprobs]


def test_every_token_of_a_prompt_is_scored_as_in_ample_memory(small, ample, prompt):
    one, other = (llm.generate([prompt], SCORES)[0].prompt_logprobs for llm in (small, ample))
    assert len(one) == len(prompt)
    assert [entry and entry.logprob for entry in one] == [entry and entry.logprob for entry in other]


def test_vectors_are_those_of_ample_memory(small, ample, prompt):
    assert small.embed([prompt])[0].tobytes() == ample.embed([prompt])[0].tobytes()


def test_an_answer_behind_such_a_prompt_is_refused_with_the_window(small, prompt):
    with pytest.raises(CloisterError, match="512"):
        small.generate([prompt], SamplingParams(max_tokens=2))


def test_a_length_that_memory_does_not_hold_is_refused_at_the_start_with_one_that_it_does():
    with pytest.raises(MemoryBudgetError, match="set it to 1088 or less"):
        LLM("cloister-5m", max_prefill_only_len=4000, **SMALL)
    with pytest.raises(ConfigError, match="trained for 8192"):
        LLM("cloister-5m", max_prefill_only_len=9000, **SMALL)


def test_the_front_lets_through_what_the_engine_takes():
    model = ModelInfo(
        name="m",
        path="",
        max_model_len=512,
        vocab_size=10,
        eos_token_ids=(),
        default_max_tokens=2048,
        max_prefill_only_len=1000,
    )
    check_length(1000, ONE_TOKEN, model, "prompt")
    check_length(1000, SamplingParams(max_tokens=0), model, "prompt")
    for num_tokens, sampling in ((1001, ONE_TOKEN), (600, SamplingParams()), (600, SamplingParams(max_tokens=1, n=2))):
        with pytest.raises(ContextLengthError):
            check_length(num_tokens, sampling, model, "prompt")
    reader = SimpleNamespace(model=model)
    check_fits(reader, 1000, "input")
    with pytest.raises(ContextLengthError, match="1000"):
        check_fits(reader, 1001, "input")
