"""Output processing, between run and commit of a plan: converts tokens to text, and checks stop tokens and stop strings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from cloister.scheduler import RequestState
from cloister.text import Detokenizer, StopStrings, Tokenizer
from cloister.types.events import Ended, Event, PrefillDone, Progressed, end_output
from cloister.types.request import Embedding, FinishReason, ModelInfo, SequenceOutput, TokenLogprobs
from cloister.types.step import NewSequence, Sample, StepPlan, StepResult, Stop


class OutputStream:
    """The growing answer of one sequence, as text.

    Args:
        new: the scheduler's introduction of the sequence.
        max_model_len: limits its length, like `max_tokens`.

    Attributes:
        num_tokens: length of the answer so far.
        max_output: tokens that it may have.
        text, token_ids, logprobs: output of the last step.
    """

    __slots__ = (
        "_detokenizer",
        "_stop_strings",
        "embedding",
        "index",
        "logprobs",
        "max_output",
        "new",
        "num_tokens",
        "prompt_logprobs",
        "text",
        "token_ids",
    )

    def __init__(self, new: NewSequence, index: int, tokenizer: Tokenizer, max_model_len: int) -> None:
        sampling = new.sampling
        room = max(1, max_model_len - new.num_prompt_tokens)  # a prompt that is computed layer by layer may be longer
        self.new = new
        self.index = index
        self.num_tokens = 0
        self.text = ""
        self.embedding: Embedding | None = None
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = None
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        if index == 0 and sampling.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * new.num_prompt_tokens
        self.max_output = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
        prompt_ids = new.token_ids[: new.num_prompt_tokens]
        self._detokenizer = Detokenizer(tokenizer, shown=sampling.shown_token_ids, prompt_ids=prompt_ids)
        stops = [stop for stop in sampling.stop if stop]
        self._stop_strings = StopStrings(stops, sampling.include_stop) if stops else None

    def take(self, sample: Sample) -> Stop | None:
        """Reads the tokens that a step sampled, up to the end of the answer."""
        self.text = ""
        token_ids = sample.token_ids
        if len(token_ids) > self.max_output - self.num_tokens:
            token_ids = token_ids[: self.max_output - self.num_tokens]
        stop = None
        for num_read, token_id in enumerate(token_ids, start=1):
            self.num_tokens += 1
            stop = self._read(token_id, num_read)
            if stop is not None:
                token_ids = token_ids[:num_read]
                break
        self.token_ids = token_ids
        self.logprobs = None if sample.logprobs is None else sample.logprobs[: len(token_ids)]
        return stop

    def replay(self, token_ids: list[int]) -> None:
        """Reads output that the front already has: restores the state of held-back text and of stop strings."""
        self.take(Sample(self.new.seq_id, token_ids))
        self.drop_gain()
        self.prompt_logprobs = None

    def drop_gain(self) -> None:
        """Clears the output of the last step."""
        self.text, self.token_ids, self.logprobs = "", [], None

    def finish(self, *, is_cut: bool) -> str:
        """Returns the text that was still held back at the end of the answer.

        Args:
            is_cut: the answer reached its maximum length, perhaps inside a character.
        """
        rest = self._detokenizer.flush(is_cut=is_cut)
        if self._stop_strings is None:
            return rest
        return self._stop_strings.push(rest)[0] + self._stop_strings.flush()

    def _read(self, token_id: int, num_read: int) -> Stop | None:
        """Reads one token, the `num_read`-th of this step."""
        new = self.new
        counts = self.num_tokens > new.sampling.min_tokens
        if counts and token_id in new.stop_token_ids:
            is_asked_for = token_id in new.sampling.stop_token_ids
            return Stop(num_read, token_id if is_asked_for else None)
        text = self._detokenizer.push_token(token_id)
        if not counts or self._stop_strings is None:
            self.text += text
            return None
        text, match = self._stop_strings.push(text)
        self.text += text
        return None if match is None else Stop(num_read, match)


class OutputProcessor:
    """Converts step results to the outputs that the front receives.

    Args:
        tokenizer: the model's tokenizer.
        model: its `max_model_len` limits answers.
    """

    def __init__(self, tokenizer: Tokenizer, model: ModelInfo) -> None:
        self.tokenizer = tokenizer
        self._max_model_len = model.max_model_len
        self._streams: dict[int, OutputStream] = {}

    def begin(self, plan: StepPlan) -> None:
        """Prepares the answers of a plan's new sequences, before the plan's result is checked."""
        for new in plan.arrivals:
            if new.sampling.beams is None and new.seq_id not in self._streams:  # else it resumes, and its text so far is kept
                self._streams[new.seq_id] = stream = self._open(new, new.index)
                if len(new.token_ids) > new.num_prompt_tokens:  # the front had this output from another engine
                    stream.replay(new.token_ids[new.num_prompt_tokens :])
        for fork in plan.forks:
            self._streams[fork.child_id] = self._open(self._streams[fork.parent_id].new, fork.index)

    def check(self, plan: StepPlan, result: StepResult) -> dict[int, Stop]:
        """Reads the step's tokens; returns by seq_id where EOS, a stop token or a stop string ends an answer."""
        for part in plan.sequences:
            if part.seq_id in result.prompt_logprobs and part.seq_id in self._streams:
                start = part.start if part.layerwise is None else part.layerwise.first_of_last_layer(part.start)
                self._keep_prompt(part.seq_id, start, result.prompt_logprobs[part.seq_id])
        for seq_id in result.embeddings.keys() & self._streams.keys():
            self._streams[seq_id].embedding = result.embeddings[seq_id]
        stops = {}
        for sample in result.samples:
            stream = self._streams.get(sample.seq_id)
            if stream is None:
                continue  # a beam, which has text only if it wins, or an answer that ended while the step ran
            stop = stream.take(sample)
            if stop is None and sample.seq_id in result.complete:
                stop = Stop(len(stream.token_ids))
            if stop is not None:
                stops[sample.seq_id] = stop
        return stops

    def collect(
        self, events: Sequence[Event], requests: Mapping[str, RequestState], answers: Sequence[NewSequence]
    ) -> list[SequenceOutput]:
        """Builds the outputs for the events of a step, one per sequence.

        Args:
            requests: the scheduler's open requests, by id.
            answers: complete results of beam searches.
        """
        for new in answers:
            stream = self._streams[new.seq_id] = self._open(new, new.index)
            stream.take(Sample(new.seq_id, new.token_ids[new.num_prompt_tokens :]))
        progressed: dict[int, Progressed] = {}
        outputs = []
        for event in events:
            match event:
                case Progressed():
                    progressed[event.seq_id] = event
                case Ended():
                    outputs.append(self._end(event, event.seq_id in progressed))
                    progressed.pop(event.seq_id, None)
                case PrefillDone():
                    for seq_id in event.seq_ids:
                        if (gained := progressed.pop(seq_id, None)) is not None:
                            outputs.append(self._go_on(gained, event.num_cached_tokens))
                        self._streams.pop(seq_id, None)
                case _:
                    pass
        return [self._go_on(event, requests[event.request_id].num_cached_tokens) for event in progressed.values()] + outputs

    def _open(self, new: NewSequence, index: int) -> OutputStream:
        return OutputStream(new, index, self.tokenizer, self._max_model_len)

    def _keep_prompt(self, seq_id: int, start: int, entries: list[TokenLogprobs]) -> None:
        """Stores log-probabilities by position: a preempted prompt is computed again from its start."""
        kept = self._streams[seq_id].prompt_logprobs
        if kept is not None:
            kept[start + 1 : start + 1 + len(entries)] = [self._spell(entry) for entry in entries]

    def _go_on(self, event: Progressed, num_cached_tokens: int) -> SequenceOutput:
        stream = self._streams[event.seq_id]
        return SequenceOutput(
            request_id=event.request_id,
            index=event.index,
            text=stream.text,
            token_ids=stream.token_ids,
            logprobs=None if stream.logprobs is None else self._take_logprobs(stream),
            prompt_logprobs=None if stream.prompt_logprobs is None else _take_prompt(stream),
            num_prompt_tokens=stream.new.num_prompt_tokens,
            num_output_tokens=stream.num_tokens,
            num_cached_tokens=num_cached_tokens,
        )

    def _end(self, event: Ended, has_gained: bool) -> SequenceOutput:
        stream = self._streams.pop(event.seq_id, None)
        output = end_output(event)
        if stream is None:
            return output
        if not has_gained:
            stream.drop_gain()
        matched = event.reason is FinishReason.STOP and isinstance(event.stop_reason, str)
        return msgspec.structs.replace(
            output,
            text=stream.text if matched else stream.text + stream.finish(is_cut=event.reason is FinishReason.LENGTH),
            token_ids=stream.token_ids,
            logprobs=self._take_logprobs(stream),
            prompt_logprobs=_take_prompt(stream),
            embedding=stream.embedding,
        )

    def _take_logprobs(self, stream: OutputStream) -> list[TokenLogprobs] | None:
        entries = stream.logprobs
        return None if entries is None else [self._spell(entry) for entry in entries]

    def _spell(self, entry: TokenLogprobs) -> TokenLogprobs:
        """Attaches the bytes of the tokens."""
        spell = self.tokenizer.token_bytes
        return msgspec.structs.replace(
            entry, text=spell(entry.token_id), top_texts=tuple(spell(token_id) for token_id, _ in entry.top)
        )


def _take_prompt(stream: OutputStream) -> list[TokenLogprobs | None] | None:
    """Returns the log-probabilities of the prompt, once; None if the answer ends before the prompt was computed."""
    entries, stream.prompt_logprobs = stream.prompt_logprobs, None
    return None if entries is None or None in entries[1:] else entries
