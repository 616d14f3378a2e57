"""Beam search finds what transformers finds, whatever else runs."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from cloister import LLM, BeamSearch, SamplingParams
from cloister.models import locate
from cloister.types.errors import InvalidRequestError
from tests.thinning import thin

PROMPTS = ["The CREATE INDEX command", "A decorator is a function that", "import", "VACUUM reclaims storage. " * 12]
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def llm():
    with LLM("cloister-5m", num_threads=1, dtype="float32", max_num_seqs=24) as llm:
        yield llm


@pytest.fixture(scope="module")
def reference():
    return AutoModelForCausalLM.from_pretrained(locate("cloister-5m"), dtype=torch.float32)


def search(**fields):
    n = fields.pop("n", 1)
    return SamplingParams(n=n, temperature=0, max_tokens=NUM_TOKENS, beams=BeamSearch(**fields))


def theirs(reference, prompt, sampling, ends):
    """The answers of transformers, ends included."""
    beams = sampling.beams
    found = reference.generate(
        torch.tensor([prompt]), num_beams=beams.width, num_return_sequences=sampling.n, max_new_tokens=NUM_TOKENS,
        length_penalty=beams.length_penalty, early_stopping=beams.early_stopping, do_sample=False,
        eos_token_id=list(ends), pad_token_id=-1,
    )  # fmt: skip
    return [[token for token in row[len(prompt) :].tolist() if token >= 0] for row in found]


@pytest.mark.parametrize(
    "fields",
    thin(
        [
            {"width": 1},
            {"width": 4, "n": 4},
            {"width": 3, "n": 2, "length_penalty": 0.0},
            {"width": 5, "n": 3, "length_penalty": 2.0, "early_stopping": True},
        ],
        2,
    ),
    ids=str,
)
def test_its_answers_are_those_of_transformers(llm, reference, fields):
    sampling = search(**fields)
    completions = llm.generate(PROMPTS, sampling)
    ends = llm.model.eos_token_ids
    for completion in completions:
        assert [o.token_ids for o in completion.outputs] == theirs(reference, completion.prompt_token_ids, sampling, ends)
        text = llm.tokenizer.decode([token for token in completion.outputs[0].token_ids if token not in ends])
        assert completion.outputs[0].text == text


def test_a_token_that_ends_it_early_ends_only_the_answers_that_have_it(llm, reference):
    plain = llm.generate(PROMPTS[:1], search(width=4, n=4))[0]
    end = plain.outputs[1].token_ids[5]
    sampling = SamplingParams(
        n=4, temperature=0, max_tokens=NUM_TOKENS, stop_token_ids=(end,), beams=BeamSearch(width=4, length_penalty=0.5)
    )
    (found,) = llm.generate(PROMPTS[:1], sampling)
    ends = (*llm.model.eos_token_ids, end)
    assert [o.token_ids for o in found.outputs] == theirs(reference, found.prompt_token_ids, sampling, ends)
    assert {(o.token_ids[-1] == end, o.stop_reason) for o in found.outputs} <= {(True, end), (False, None)}
    assert any(o.stop_reason == end for o in found.outputs)


def test_its_answers_are_the_same_in_company_and_in_chunks(llm):
    alone = [llm.generate([prompt], search(width=4, n=2))[0] for prompt in PROMPTS]
    mixed = llm.generate(
        PROMPTS * 2, [search(width=4, n=2)] * 4 + [SamplingParams(temperature=1, seed=1, max_tokens=60, ignore_eos=True)] * 4
    )
    assert [[o.token_ids for o in c.outputs] for c in mixed[:4]] == [[o.token_ids for o in c.outputs] for c in alone]
    with LLM("cloister-5m", num_threads=1, dtype="float32", max_batched_tokens=16, block_size=5, prefix_cache=False) as chunked:
        parts = chunked.generate(PROMPTS, search(width=4, n=2))
    assert [[o.token_ids for o in c.outputs] for c in parts] == [[o.token_ids for o in c.outputs] for c in alone]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stop": ("x",)}, "does not support stop"),
        ({"logprobs": 1}, "does not support logprobs"),
        ({"n": 5}, "n must be from 1 to 2"),
    ],
)
def test_what_it_has_no_place_for_is_refused_by_name(llm, fields, message):
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate("x", SamplingParams(max_tokens=4, beams=BeamSearch(width=2), **fields))
