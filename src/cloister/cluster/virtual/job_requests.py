"""The requests of a scenario's jobs. Pure."""

from __future__ import annotations

from typing import Final

from cloister.cluster.virtual.adapters import adapter_digest
from cloister.cluster.virtual.byte_tokenizer import VOCAB_SIZE
from cloister.cluster.virtual.grammars import GRAMMARS
from cloister.cluster.virtual.scenario import Job
from cloister.types.request import BeamSearch, Request, SamplingParams
from cloister.types.scope import Scope, ScopeKind

RAISED: Final = 8.0
"""Added to the logits of a job's letters, which are then above all others."""


def prompt_of(job: Job) -> bytes:
    """Returns the tokens of a job's prompt; one that kills engines has another prompt than all that do not."""
    return job.prompt.encode() if job.kills_after is None else b"\1" + job.prompt.encode()


def make_request(job: Job, request_id: str, token_ids: list[int] | None = None, vocab_size: int = VOCAB_SIZE) -> Request:
    """Returns the request of a job.

    Args:
        token_ids: of its prompt, for a model whose tokens are no bytes.
        vocab_size: of that model, which as large a share of its tokens ends answers as of `VOCAB_SIZE`.
    """
    return Request(
        request_id=request_id,
        token_ids=list(prompt_of(job)) if token_ids is None else token_ids,
        sampling=SamplingParams(
            n=job.n,
            temperature=job.temperature,
            seed=job.seed,
            stop=(job.stop,) if job.stop else (),
            stop_token_ids=tuple(range(job.num_stop_ids * vocab_size // VOCAB_SIZE)),
            max_tokens=job.max_tokens,
            min_tokens=job.min_tokens,
            logprobs=2 if job.logprobs else None,
            prompt_logprobs=1 if job.prompt_logprobs else None,
            ignore_eos=job.ignores_eos,
            frequency_penalty=job.frequency_penalty,
            logit_bias=dict.fromkeys(job.letters.encode(), RAISED),
            grammar=GRAMMARS[job.grammar].write() if job.grammar else None,
            beams=BeamSearch(width=job.beams, length_penalty=job.length_penalty) if job.beams else None,
        ),
        adapter=adapter_digest(job.adapter) if job.adapter else None,
        scope=Scope(ScopeKind.TENANT, b"tenant %d" % job.tenant),
        tenant=f"tenant {job.tenant}",
        priority=job.priority,
        timeout_s=job.timeout_s,
    )
