"""A job's requests side by side: one deadline for all of them, which the engine enforces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from cloister.policy.gate import Admission
from cloister.server.jobs import MAX_SIDE_BY_SIDE, GenerationJob, make_job, run_job
from cloister.types.errors import DeadlineError
from cloister.types.request import FinishReason, Request, SamplingParams, SequenceOutput
from tests.server.running_server import INFO, make_gate, output
from tests.virtual_time import run

TIMEOUT_S = 10.0


def job_of(num_prompts: int, *, stream: bool = False) -> GenerationJob:
    admission: Admission = make_gate().admit(None)
    return make_job(
        [[1, 2]] * num_prompts,
        SamplingParams(max_tokens=1),
        admission,
        INFO,
        prefix="test",
        model_name="test",
        timeout_s=TIMEOUT_S,
        stream=stream,
        include_usage=False,
    )


def engine_that_takes(answer_s: float, taken: list[Request]):
    """An engine that ends every request after `answer_s`, or at its deadline."""

    async def generate(request: Request, *, in_batches: bool) -> AsyncGenerator[SequenceOutput, None]:
        taken.append(request)
        await asyncio.sleep(min(answer_s, request.timeout_s))
        yield output(request, end=FinishReason.STOP if answer_s <= request.timeout_s else FinishReason.TIMEOUT)

    return generate


async def ask(num_prompts: int, answer_s: float, taken: list[Request]) -> int:
    return len([numbered async for numbered in run_job(engine_that_takes(answer_s, taken), job_of(num_prompts))])


def test_requests_that_wait_for_others_of_their_job_have_what_is_left_of_its_time() -> None:
    taken: list[Request] = []
    assert run(ask(MAX_SIDE_BY_SIDE + 1, 4.0, taken)) == MAX_SIDE_BY_SIDE + 1
    assert [round(request.timeout_s, 6) for request in taken] == [TIMEOUT_S] * MAX_SIDE_BY_SIDE + [TIMEOUT_S - 4.0]


def test_a_job_of_many_prompts_ends_at_its_deadline() -> None:
    async def ask_in_vain() -> float:
        with pytest.raises(DeadlineError):
            await ask(3 * MAX_SIDE_BY_SIDE, 6.0, [])
        return asyncio.get_running_loop().time()

    assert run(ask_in_vain()) == pytest.approx(TIMEOUT_S)


@pytest.mark.parametrize("num_prompts", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_only_a_stream_reads_every_token_by_itself(num_prompts: int, stream: bool) -> None:
    asked: list[bool] = []

    async def generate(request: Request, *, in_batches: bool) -> AsyncGenerator[SequenceOutput, None]:
        asked.append(in_batches)
        yield output(request, end=FinishReason.STOP)

    async def ask_all() -> None:
        assert len([numbered async for numbered in run_job(generate, job_of(num_prompts, stream=stream))]) == num_prompts

    run(ask_all())
    assert asked == [not stream] * num_prompts
