"""One HTTP request made ready for the engine: a request per prompt, and what the reply needs to know."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from cloister.privacy.gate import Admission
from cloister.types.request import ModelInfo, Request, SamplingParams


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as its reply repeats it.

    Attributes:
        first_token: its bytes; the log-probabilities that the engine gives begin with the second token.
    """

    text: str
    first_token: bytes


@dataclass(frozen=True, slots=True)
class Job:
    """What one call of a completion route asks for.

    Attributes:
        job_id: random; also the start of the ids of its requests.
        requests: one per prompt; sequence `index` of prompt `i` is choice `i * n + index`.
        model_name: as the client knows it.
        fingerprint: `system_fingerprint` of the reply.
        echoes: one per prompt when the reply has to repeat it, else none.
        answerless: the answer is only computed for the prompt's log-probabilities (`max_tokens` 0 with `echo`).
    """

    job_id: str
    requests: tuple[Request, ...]
    model_name: str
    fingerprint: str
    stream: bool
    include_usage: bool
    echoes: tuple[Echo, ...] = ()
    answerless: bool = False
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
) -> Job:
    """Returns a job for tokenized prompts.

    Args:
        prefix: of the id, such as "chatcmpl".
        timeout_s: deadline of every request of the job, in the engine.
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
        )
        for i, prompt in enumerate(prompts)
    )
    return Job(
        job_id=job_id,
        requests=requests,
        model_name=model_name,
        fingerprint=model.fingerprint,
        stream=stream,
        include_usage=include_usage,
        echoes=echoes,
        answerless=answerless,
    )
