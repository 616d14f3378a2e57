"""One HTTP request made ready for the engine: a request per prompt, and what the reply needs to know."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from cloister.privacy.gate import Admission
from cloister.text.answer_parser import AnswerForm
from cloister.types.request import ModelInfo, PoolingParams, Request, SamplingParams


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as its reply repeats it.

    Attributes:
        first_token: its bytes; the log-probabilities that the engine gives begin with the second token.
    """

    text: str
    first_token: bytes


@dataclass(frozen=True, slots=True)
class GenerationJob:
    """What one call of a completion route asks for.

    Attributes:
        job_id: random; also the start of the ids of its requests.
        requests: one per prompt; sequence `index` of prompt `i` is choice `i * n + index`.
        model_name: as the client knows it.
        fingerprint: `system_fingerprint` of the reply.
        echoes: one per prompt when the reply has to repeat it, else none.
        answerless: the answer is only computed for the prompt's log-probabilities (`max_tokens` 0 with `echo`).
        form: what an answer may hold beside text; None if nothing.
        continuous_usage: every chunk of a stream has the counts so far, not only the last one.
        num_kept: answers of each prompt that the reply has, the likeliest by mean log-probability; None for all of them.
        shows_logprobs: the client asked for log-probabilities itself.
    """

    job_id: str
    requests: tuple[Request, ...]
    model_name: str
    fingerprint: str
    stream: bool
    include_usage: bool
    echoes: tuple[Echo, ...] = ()
    answerless: bool = False
    form: AnswerForm | None = field(default=None, repr=False)
    continuous_usage: bool = False
    num_kept: int | None = None
    shows_logprobs: bool = True
    created_s: int = field(default_factory=lambda: int(time.time()))

    @property
    def n(self) -> int:
        """Sequences per prompt."""
        return self.requests[0].sampling.n

    @property
    def num_choices(self) -> int:
        return len(self.requests) * self.n

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(request.token_ids) for request in self.requests)


def make_job(
    prompts: Sequence[list[int]],
    sampling: SamplingParams,
    admission: Admission,
    model: ModelInfo,
    *,
    prefix: str,
    model_name: str,
    timeout_s: float,
    stream: bool,
    include_usage: bool,
    echoes: tuple[Echo, ...] = (),
    answerless: bool = False,
    form: AnswerForm | None = None,
    continuous_usage: bool = False,
    num_kept: int | None = None,
    shows_logprobs: bool = True,
    pooling: PoolingParams | None = None,
    adapter: str | None = None,
) -> GenerationJob:
    """Returns a job for tokenized prompts.

    Args:
        prefix: of the id, such as "chatcmpl".
        timeout_s: deadline of every request of the job, in the engine.
        pooling: the prompts become vectors.
        adapter: digest of the adapter that the prompts are for.
    """
    job_id = f"{prefix}-{secrets.token_hex(12)}"
    requests = tuple(
        Request(
            request_id=f"{job_id}-{i}",
            token_ids=prompt,
            sampling=sampling,
            scope=admission.scope,
            tenant=admission.tenant,
            priority=admission.priority,
            timeout_s=timeout_s,
            pooling=pooling,
            adapter=adapter,
        )
        for i, prompt in enumerate(prompts)
    )
    return GenerationJob(
        job_id=job_id,
        requests=requests,
        model_name=model_name,
        fingerprint=model.fingerprint if adapter is None else f"{model.fingerprint}-{adapter[:16]}",
        stream=stream,
        include_usage=include_usage,
        echoes=echoes,
        answerless=answerless,
        form=form,
        continuous_usage=continuous_usage,
        num_kept=num_kept,
        shows_logprobs=shows_logprobs,
    )
