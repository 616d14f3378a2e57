"""From outputs of the engine to the replies of /completion and /infill."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cloister.server.answers import Usage
from cloister.server.calls import HttpCall
from cloister.server.llamacpp.reading import LlamaJob
from cloister.server.logprobs import LOWEST_LOGPROB
from cloister.server.timings import read_timings
from cloister.types.request import SamplingParams, SequenceOutput, TokenLogprobs


class CompletionWriter:
    """Writes one reply, whole or in events."""

    def __init__(self, asked: LlamaJob, call: HttpCall | None) -> None:
        self._asked = asked
        self._call = call
        self._texts: list[str] = []
        self._tokens: list[int] = []
        self._probs: list[dict[str, Any]] = []
        self._stop_reason: str | int | None = None
        self._finish_reason = ""

    def add(self, output: SequenceOutput) -> dict[str, Any] | None:
        """Takes what one step added; returns its event, if it has something to tell."""
        probs = [_position(entry) for entry in output.logprobs or ()] if self._asked.shows_probs else []
        self._texts.append(output.text)
        self._tokens += output.token_ids
        self._probs += probs
        if output.finish_reason is not None:
            self._finish_reason, self._stop_reason = output.finish_reason.value, output.stop_reason
        if not output.text and not probs:
            return None
        event: dict[str, Any] = {"index": 0, "content": output.text, "tokens": list(output.token_ids), "stop": False}
        return event | ({"completion_probabilities": probs} if probs else {})

    def whole(self, usage: Usage) -> dict[str, Any]:
        """Returns the whole reply."""
        reply = {**self.last(usage), "content": "".join(self._texts)}
        if self._asked.returns_tokens:
            reply["tokens"] = self._tokens
        return reply | ({"completion_probabilities": self._probs} if self._probs else {})

    def last(self, usage: Usage) -> dict[str, Any]:
        """Returns the last event of a stream."""
        job, sampling = self._asked.job, self._asked.job.requests[0].sampling
        word = self._stop_reason if isinstance(self._stop_reason, str) else ""
        return {
            "index": 0,
            "content": "",
            "tokens": [],
            "stop": True,
            "model": job.model_name,
            "tokens_predicted": usage.completion_tokens,
            "tokens_evaluated": usage.prompt_tokens,
            "tokens_cached": usage.prompt_tokens_details.cached_tokens,
            "generation_settings": describe_sampling(sampling),
            "prompt": self._asked.prompt,
            "has_new_line": any("\n" in text for text in self._texts),
            "truncated": False,
            "stop_type": "limit" if self._finish_reason == "length" else "word" if word else "eos",
            "stopping_word": word,
            "timings": dict(self._timings(usage)),
        }

    def _timings(self, usage: Usage) -> Iterator[tuple[str, float]]:
        times = read_timings(self._call, self._asked.job)
        num_computed = usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens
        for name, count, time_s in (
            ("prompt", num_computed, times.prompt_s),
            ("predicted", usage.completion_tokens, times.answer_s),
        ):
            yield f"{name}_n", count
            if time_s is not None:
                yield f"{name}_ms", 1000 * time_s
                yield f"{name}_per_token_ms", 1000 * time_s / max(1, count)
                yield f"{name}_per_second", count / time_s if time_s > 0 else 0.0


def describe_sampling(sampling: SamplingParams) -> dict[str, Any]:
    """Returns how an answer is sampled, in llama.cpp's words."""
    return {
        "seed": -1 if sampling.seed is None else sampling.seed,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "n_predict": -1 if sampling.max_tokens is None else sampling.max_tokens,
        "stop": list(sampling.stop),
        "ignore_eos": sampling.ignore_eos,
    }


def _position(entry: TokenLogprobs) -> dict[str, Any]:
    top = [_token(token_id, text, logprob) for (token_id, logprob), text in zip(entry.top, entry.top_texts, strict=True)]
    return {**_token(entry.token_id, entry.text, entry.logprob), "top_logprobs": top}


def _token(token_id: int, text: bytes, logprob: float) -> dict[str, Any]:
    finite = max(LOWEST_LOGPROB, logprob)
    return {"id": token_id, "token": text.decode(errors="replace"), "bytes": list(text), "logprob": finite}
