"""Checks answers against the program of virtual engines, without an engine. Pure."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from cloister.backends.base import SAMPLING_METADATA
from cloister.cluster.virtual.byte_tokenizer import EOS, VOCAB_SIZE
from cloister.cluster.virtual.checks import GOOD_ENDS, JobAnswer, has_wrong_prompt, match_logprobs
from cloister.cluster.virtual.engine_shape import EngineShape
from cloister.cluster.virtual.grammars import GRAMMARS, AnswerRule, derive, find_next, may_end
from cloister.cluster.virtual.history_program import FloatArray, history_logits, prefix_logits, salt_of
from cloister.cluster.virtual.scenario import Job
from cloister.executor.logprobs import token_logprobs
from cloister.executor.sampling import Sampler
from cloister.scheduler.admission import EngineLimits, find_refusal
from cloister.types.request import FinishReason, TokenLogprobs


def match_program(answers: Sequence[JobAnswer], shape: EngineShape) -> bool:
    """Whether answers have the tokens that the program chooses, the right text, and the right end.

    All tokens of all answers are checked at once, in a twentieth of the time that an engine takes.
    """
    return all(_is_whole(answer, shape) for answer in answers) and _are_chosen(answers, shape)


def _are_chosen(answers: Sequence[JobAnswer], shape: EngineShape) -> bool:
    """Whether the program chooses each token of the answers, with its log-probability."""
    logits, sampling, token_ids = [], [], []
    for answer in answers:
        prompt, how, salt = answer.request.token_ids, answer.request.sampling, salt_of(shape.weights, answer.job.adapter)
        if how.beams is not None:
            if not _are_best(answer, shape, salt):
                return False
            continue
        for index, given in enumerate(answer.token_ids):
            if given:
                raw = prefix_logits([*prompt, *given[:-1]], len(prompt), VOCAB_SIZE, salt)
                expected = [] if how.logprobs is None else _list_logprobs(raw, given, how.logprobs)
                if not match_logprobs(answer.logprobs[index], expected):
                    return False
                logits.append(_process(raw, given, answer))
                positions = range(len(prompt), len(prompt) + len(given))
                sampling += [
                    (how.temperature, 0, how.top_k, how.top_p, how.min_p, how.seed or 0, index, position)
                    for position in positions
                ]
                token_ids += given
        if how.prompt_logprobs is not None and answer.prompt_logprobs:
            raw = prefix_logits(prompt[:-1], 1, VOCAB_SIZE, salt)
            if has_wrong_prompt(answer, [None, *_list_logprobs(raw, prompt[1:], how.prompt_logprobs)]):
                return False
        elif answer.prompt_logprobs or (how.prompt_logprobs is not None and answer.token_ids[0]):
            return False
    if not token_ids:
        return True
    metadata = np.array(sampling, SAMPLING_METADATA)
    metadata["row"] = np.arange(len(metadata))
    return np.array_equal(Sampler(VOCAB_SIZE).sample(np.concatenate(logits), metadata), token_ids)


def _are_best(answer: JobAnswer, shape: EngineShape, salt: int) -> bool:
    """Whether the answers are the best ones that a beam search finds."""
    if not any(answer.token_ids):
        return True
    best = _search_beams(answer, min(answer.job.max_tokens, shape.max_model_len - len(answer.request.token_ids)), salt)
    return all(not given or [given] == best[index : index + 1] for index, given in enumerate(answer.token_ids))


def _search_beams(answer: JobAnswer, num_most: int, salt: int) -> list[list[int]]:
    """Returns the best answers of a beam search, best first, as `transformers` finds them."""
    prompt, width, stops = answer.request.token_ids, answer.job.beams, _stops(answer)
    num_candidates = max(2, 1 + len(stops)) * width
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    found: list[tuple[float, list[int]]] = []
    for length in range(1, num_most + 1):
        logits = np.stack([history_logits([*prompt, *token_ids], VOCAB_SIZE, salt) for _, token_ids in beams])
        likely = token_logprobs(logits, np.zeros(len(beams), np.int64), np.full(len(beams), num_candidates))
        ranked = sorted(
            (-beam[0] - logprob, place, token)
            for place, (beam, each) in enumerate(zip(beams, likely, strict=True))
            for token, logprob in each.top
        )[:num_candidates]
        longer = [(-loss, [*beams[place][1], token]) for loss, place, token in ranked]
        ends = [token_ids[-1] in stops or length == num_most for _, token_ids in longer]
        ended = [each for each, is_end in zip(longer[:width], ends, strict=False) if is_end]
        found += [(score / length**answer.job.length_penalty, token_ids) for score, token_ids in ended]
        found = sorted(found, key=lambda each: -each[0])[:width]
        beams = [each for each, is_end in zip(longer, ends, strict=True) if not is_end][:width]
        if not beams or (len(found) == width and beams[0][0] / length**answer.job.length_penalty <= found[-1][0]):
            break
    return [token_ids for _, token_ids in found]


def _list_logprobs(logits: FloatArray, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """Returns the log-probability of each token, and of the most likely ones, from its row of logits."""
    exact = logits.astype(np.float64)
    logprobs = exact - np.log(np.exp(exact).sum(axis=1, keepdims=True))
    best = np.argsort(-exact, axis=1, kind="stable")[:, :num_top]
    return [
        TokenLogprobs(token, float(row[token]), tuple((int(each), float(row[each])) for each in top))
        for token, row, top in zip(token_ids, logprobs, best, strict=True)
    ]


def _process(logits: FloatArray, given: Sequence[int], answer: JobAnswer) -> FloatArray:
    """Returns what tokens are chosen from: logits after penalties, biases, masks of ends and of the grammar."""
    job, scores = answer.job, logits
    if job.frequency_penalty:
        seen = np.zeros(logits.shape)
        seen[np.arange(1, len(given)), given[:-1]] = 1
        scores = (scores - np.float64(job.frequency_penalty) * seen.cumsum(axis=0)).astype(np.float32)
    if job.letters:
        scores = scores.copy()
        scores[:, list(job.letters.encode())] += np.float32(answer.request.sampling.logit_bias[job.letters.encode()[0]])
    if job.min_tokens:
        scores = scores.copy()
        scores[: job.min_tokens, list(_stops(answer))] = -np.inf
    if job.grammar:
        scores = scores.copy()
        rule = GRAMMARS[job.grammar].rule
        for row, token in zip(scores, given, strict=True):
            row[~_allow(rule, ends=not job.ignores_eos)] = -np.inf
            rule = derive(rule, token)
    return scores


@cache
def _allow(rule: AnswerRule, *, ends: bool) -> npt.NDArray[np.bool_]:
    """Returns which tokens may follow, [VOCAB_SIZE]."""
    allowed = np.zeros(VOCAB_SIZE, np.bool_)
    allowed[list(find_next(rule))] = True
    allowed[EOS] = ends and may_end(rule)
    return allowed


def _stops(answer: JobAnswer) -> tuple[int, ...]:
    """Returns the tokens that end an answer."""
    sampling = answer.request.sampling
    return (*(() if sampling.ignore_eos else (EOS,)), *sampling.stop_token_ids)


def _is_whole(answer: JobAnswer, shape: EngineShape) -> bool:
    """Whether each complete sequence has the right text and end, and no other goes beyond its end."""
    limits = EngineLimits(shape.max_model_len, shape.max_num_seqs, shape.num_blocks * shape.block_size, shape.block_size)
    if answer.refusal is not None:
        return True
    if find_refusal(answer.request, limits) is not None:
        return not (any(answer.token_ids) or any(end in GOOD_ENDS for ends in answer.ends for end in ends))
    for index, ends in enumerate(answer.ends):
        num_read, text, end = _read(answer, index, shape)
        given = next(iter(ends), None)
        if num_read < len(answer.token_ids[index]) or given is FinishReason.REJECTED:
            return False
        if given in GOOD_ENDS and (answer.texts[index], given) != (text, end):
            return False
    return True


def _read(answer: JobAnswer, index: int, shape: EngineShape) -> tuple[int, str, FinishReason | None]:
    """Returns the number of tokens up to the end of a sequence, its text, and its finish reason; None if it does not end."""
    request, token_ids = answer.request, answer.token_ids[index]
    sampling, stops = request.sampling, _stops(answer)
    assert sampling.max_tokens is not None
    num_most = min(sampling.max_tokens, shape.max_model_len - len(request.token_ids))
    num_complete = _count_until_complete(answer.job, token_ids)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text, searched = "", 0
    for number, token in enumerate(token_ids, start=1):
        may_stop = number > sampling.min_tokens
        if may_stop and token in stops:
            return number, text + decoder.decode(b"", final=True), FinishReason.STOP
        text += decoder.decode(bytes([token])) if token < EOS else ""
        if not may_stop:
            searched = len(text)
        found = [(text.index(stop, searched), stop) for stop in sampling.stop if stop in text[searched:]]
        if may_stop and found:
            return number, text[: min(found)[0]], FinishReason.STOP
        if number == num_complete:
            return number, text + decoder.decode(b"", final=True), FinishReason.STOP
        if number == num_most:
            return number, text, FinishReason.LENGTH
    return len(token_ids), text, None


def _count_until_complete(job: Job, token_ids: Sequence[int]) -> int | None:
    """Returns the number of tokens after which the grammar is complete; None if it is not."""
    if not job.grammar:
        return None
    rule = GRAMMARS[job.grammar].rule
    for number, token in enumerate(token_ids, start=1):
        rule = derive(rule, token)
        if not find_next(rule):
            return number
    return None
