"""No message shows what a user sent, however it is printed."""

import pytest

from cloister.types.request import Embedding, Grammar, GrammarKind, Request, SamplingParams, SequenceOutput, TokenLogprobs
from cloister.types.scope import Scope, ScopeKind
from cloister.types.step import NewSequence, Sample, StepPlan, StepResult, Stop

MARK = 987654321
GRAMMAR = Grammar(GrammarKind.REGEX, "MARKED")
SAMPLING = SamplingParams(stop=("MARKED",), stop_token_ids=(MARK,), logit_bias={MARK: 1.0}, grammar=GRAMMAR)
LOGPROBS = TokenLogprobs(MARK, -1.0, ((MARK, -1.0),), b"MARKED", (b"MARKED",))
NEW = NewSequence(seq_id=1, token_ids=[MARK], num_prompt_tokens=1, sampling=SAMPLING, seed=0, stop_token_ids=(MARK,))


@pytest.mark.parametrize(
    "message",
    [
        Request(request_id="r", token_ids=[MARK], sampling=SAMPLING, scope=Scope(ScopeKind.TENANT, b"MARKED")),
        SequenceOutput(request_id="r", index=0, text="MARKED", token_ids=[MARK], logprobs=[LOGPROBS], stop_reason="MARKED"),
        StepPlan(plan_id=0, arrivals=[NEW]),
        StepResult(plan_id=0, samples=[Sample(1, [MARK], [LOGPROBS])], prompt_logprobs={1: [LOGPROBS]}),
        StepResult(plan_id=0, embeddings={1: Embedding(b"MARKED..")}),
        Stop(1, "MARKED"),
        GRAMMAR,
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_printed_message_shows_no_content(message):
    for text in (repr(message), str(message), f"{message}"):
        assert str(MARK) not in text
        assert "MARKED" not in text
