"""What the program of virtual engines says of an answer, without any engine. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cloister.backends.base import SAMPLING_METADATA
from cloister.cluster.virtual.checks import GOOD_ENDS, JobAnswer
from cloister.cluster.virtual.engine import EOS, VOCAB_SIZE, EngineShape
from cloister.cluster.virtual.history_program import prefix_logits
from cloister.engine.output_processor import OutputStream
from cloister.executor.sampling import Sampler
from cloister.scheduler.admission import EngineLimits, find_refusal
from cloister.text import Tokenizer
from cloister.types.request import FinishReason
from cloister.types.step import NewSequence, Sample


def are_right(answers: Sequence[JobAnswer], shape: EngineShape, tokenizer: Tokenizer) -> bool:
    """Whether answers have the tokens that the program chooses, and end where and with the text with which they must.

    Token by token the program is asked what follows the tokens before it, for all tokens of all answers at once: some twentieth
    of the time in which an engine would compute them.
    """
    return all(_is_whole(answer, shape, tokenizer) for answer in answers) and _are_chosen(answers, shape.weights)


def _are_chosen(answers: Sequence[JobAnswer], weights: int) -> bool:
    """Whether the program chooses each token of the answers."""
    logits, sampling, token_ids = [], [], []
    for answer in answers:
        prompt, how = answer.request.token_ids, answer.request.sampling
        for index, given in enumerate(answer.token_ids):
            if given:
                logits.append(prefix_logits([*prompt, *given[:-1]], len(prompt), VOCAB_SIZE, weights))
                positions = range(len(prompt), len(prompt) + len(given))
                sampling += [
                    (how.temperature, 0, how.top_k, how.top_p, how.min_p, how.seed or 0, index, position)
                    for position in positions
                ]
                token_ids += given
    if not token_ids:
        return True
    metadata = np.array(sampling, SAMPLING_METADATA)
    metadata["row"] = np.arange(len(metadata))
    return np.array_equal(Sampler(VOCAB_SIZE).sample(np.concatenate(logits), metadata), token_ids)


def _is_whole(answer: JobAnswer, shape: EngineShape, tokenizer: Tokenizer) -> bool:
    """Whether each sequence that ended by itself has its text and ends where it must, and others have gone no further."""
    limits = EngineLimits(shape.max_model_len, shape.max_num_seqs, shape.num_blocks * shape.block_size, shape.block_size)
    if answer.refusal is not None:
        return True
    if find_refusal(answer.request, limits) is not None:
        return not (any(answer.token_ids) or any(end in GOOD_ENDS for ends in answer.ends for end in ends))
    for index, ends in enumerate(answer.ends):
        num_read, text, end = _read(answer, index, shape, tokenizer)
        given = next(iter(ends), None)
        if num_read < len(answer.token_ids[index]) or given is FinishReason.REJECTED:
            return False
        if given in GOOD_ENDS and (answer.texts[index], given) != (text, end):
            return False
    return True


def _read(answer: JobAnswer, index: int, shape: EngineShape, tokenizer: Tokenizer) -> tuple[int, str, FinishReason | None]:
    """Returns how many tokens of a sequence belong to its answer, its text, and how it ends there; None: it does not."""
    request = answer.request
    sampling = request.sampling
    stop_token_ids = (*(() if sampling.ignore_eos else (EOS,)), *sampling.stop_token_ids)
    new = NewSequence(
        seq_id=0,
        token_ids=request.token_ids,
        num_prompt_tokens=len(request.token_ids),
        sampling=sampling,
        seed=sampling.seed or 0,
        index=index,
        stop_token_ids=stop_token_ids,
    )
    stream = OutputStream(new, index, tokenizer, shape.max_model_len)
    stop = stream.take(Sample(new.seq_id, answer.token_ids[index]))
    num_read, is_full = stream.num_tokens, stream.num_tokens == stream.max_output
    if stop is None and not is_full:
        return num_read, stream.text, None
    end = FinishReason.LENGTH if stop is None else FinishReason.STOP
    is_matched = stop is not None and isinstance(stop.reason, str)
    return num_read, stream.text if is_matched else stream.text + stream.finish(is_cut=stop is None), end
