"""The grammars that running sequences follow: compiled beside the steps, and one step ahead of the token that is chosen.

After a token is chosen its grammar moves on, and which tokens may follow is worked out while the next forward computes, by a
helper thread; or after it, by the engine's own, where all cores were taken and the helper did not come to run. The runner owns
this state (plans hold no token ids): a resumed sequence reads its tokens again, a forked one copies.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from cloister.types.errors import CloisterError
from cloister.types.grammar import COMPILE_TIMEOUT_S, Grammar
from cloister.types.request import SamplingParams

MaskArray = npt.NDArray[np.uint32]

MASK_TIMEOUT_S: Final = 5.0
"""How long a step waits for one sequence's mask. The library's own limits end one after some 20 ms."""
MAX_LEFT: Final = 2
"""Compiling threads that may be left to themselves at once."""
TOO_SLOW: Final = "the grammar takes too long to compile; make it simpler"
TOO_BUSY: Final = "grammars that take too long are still being compiled; try again in a minute"
_TOO_COMPLEX: Final = "the grammar takes too much work at this place of the answer, or no token can follow; make it simpler"


class Matcher(Protocol):
    """One answer's place in a grammar. Used by one thread at a time."""

    @property
    def is_complete(self) -> bool:
        """Whether the answer satisfies the grammar and nothing can follow."""
        ...

    def accept(self, token_ids: list[int]) -> bool:
        """Goes on by some tokens; False if that is not possible, for good."""
        ...

    def fill(self, mask: MaskArray) -> bool:
        """Says which tokens may follow, EOS among them where the answer may end: bit i % 32 of word i // 32.

        False if that is not possible, for good. Computes outside of the interpreter lock.
        """
        ...

    def copy(self) -> Matcher: ...


class Compiler(Protocol):
    """Makes matchers, in any thread.

    Attributes:
        eos_token_ids: tokens that end an answer and are no part of its grammar.
        num_words: of a mask; it may have bits behind the model's last token.
        is_ready: it has read the model's vocabulary, which it does for the first grammar.
    """

    eos_token_ids: tuple[int, ...]
    num_words: int

    @property
    def is_ready(self) -> bool: ...

    def compile(self, grammar: Grammar) -> Matcher:
        """Returns a matcher at the beginning of an answer.

        Raises:
            CloisterError: the grammar cannot be followed; the message is for the client.
        """
        ...


class GrammarState:
    """One sequence's place in its grammar, and the tokens that may follow.

    Attributes:
        failure: why it cannot go on, or None.
        must_end: nothing but EOS may follow, whatever else keeps EOS back.
    """

    def __init__(
        self, matcher: Matcher, mask: MaskArray, eos: MaskArray, sampling: SamplingParams, unread: list[int] | None = None
    ) -> None:
        self.failure: str | None = None
        self.must_end = False
        self._matcher = matcher
        self._mask = mask
        self._eos = eos
        self._sampling = sampling
        self._job: Future[None] | None = None
        self._unread = unread or []

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow the tokens so far. Not while a mask is computed."""
        return self.failure is None and self._matcher.is_complete

    def accept(self, token_id: int) -> None:
        """Goes on by the token that was chosen."""
        if not self._matcher.accept([token_id]):
            self.failure = _TOO_COMPLEX

    def look_ahead(self) -> None:
        """Works out which tokens may follow; by one thread at a time. It raises nothing: others wait in the same job."""
        unread, self._unread = self._unread, []
        try:
            is_known = (not unread or self._matcher.accept(unread)) and self._matcher.fill(self._mask)
        except Exception:
            is_known = False
        if not is_known:
            self._fail()
        elif self._sampling.ignore_eos or self._sampling.min_tokens:
            self._keep_eos_back()

    def expect(self, job: Future[None]) -> None:
        """Says that a mask is on its way."""
        self._job = job

    def mask(self) -> MaskArray:
        """Returns the tokens that may follow, [num_words] uint32, once they are known."""
        self._wait()
        return self._mask

    def copy(self) -> GrammarState:
        """Returns the same place for another sequence."""
        self._wait()
        copied = GrammarState(self._matcher.copy(), self._mask.copy(), self._eos, self._sampling)
        copied.failure, copied.must_end = self.failure, self.must_end
        return copied

    def _wait(self) -> None:
        job, self._job = self._job, None
        if job is None:
            return
        if job.cancel():  # the helper has not begun, and may not soon
            self.look_ahead()
            return
        try:
            job.result(MASK_TIMEOUT_S)
        except Exception:  # it takes too long, or the helper failed
            self._fail()

    def _fail(self) -> None:
        """Bars every token, in an array that no other thread writes."""
        self.failure = _TOO_COMPLEX
        self._mask = np.zeros_like(self._mask)

    def _keep_eos_back(self) -> None:
        others = self._mask & ~self._eos
        self.must_end = not others.any()
        if self._sampling.ignore_eos and not self.must_end:
            self._mask = others


@dataclass(slots=True)
class _Compiled:
    """A grammar of a request that has not ended.

    Attributes:
        owner: the very object in its sampling parameters; when it is gone, so is this.
        job: compiles it; None while there is no thread for it.
        is_moved: it stood behind others for too long, and got another thread.
    """

    owner: weakref.ref[Grammar]
    job: Future[tuple[Matcher, MaskArray]] | None
    objection: str | None = None
    is_moved: bool = False


class Grammars:
    """Grammars of the requests that an engine holds. Called by the engine's thread.

    Compiled ones are found by the identity of the object in the request, never by what it says: nothing that one request
    brought can make another one quicker, whatever its scope.

    Args:
        compiler: makes matchers.
    """

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self._eos = np.zeros(compiler.num_words, np.uint32)
        for token_id in compiler.eos_token_ids:
            self._eos[token_id // 32] |= np.uint32(1 << token_id % 32)
        self._compiled: dict[int, _Compiled] = {}
        self._masks = ThreadPoolExecutor(1, "cloister-grammar")
        self._compiling = ThreadPoolExecutor(1, "cloister-compile")
        self._left: list[Future[tuple[Matcher, MaskArray]]] = []

    def prepare(self, grammar: Grammar, then: Callable[[], None]) -> bool:
        """Starts to compile a grammar; True if it is done already.

        Args:
            then: called from another thread as soon as it is done.
        """
        found = self._find(grammar)
        if found.job is None or found.job.done() or found.objection is not None:
            return True
        found.job.add_done_callback(lambda job: then())
        return False

    def give_up(self, grammar: Grammar) -> bool:
        """Waits no longer for a grammar: its sequences will fail. Another thread compiles those behind it, as they ask here.

        False where it is no fault of the grammar's: while the vocabulary is read, and once if it stood behind another one.
        """
        if not self._compiler.is_ready:
            return False
        found = self._find(grammar)
        if found.job is None or found.job.done():
            return True
        if found.job.cancel():
            return self._move(found, grammar)
        found.objection = TOO_SLOW
        self._leave([found.job])
        return True

    def _move(self, found: _Compiled, grammar: Grammar) -> bool:
        """Starts again what was not begun, past those that hang; True if there is no thread for it, or was none before."""
        if found.is_moved:
            found.objection = TOO_BUSY
            return True
        known = [other.job for other in list(self._compiled.values()) if other.job is not None and not other.is_moved]
        self._leave([job for job in known if job.running() and job not in self._left])
        found.job, found.is_moved = self._start(grammar), True
        return found.job is None

    def _leave(self, jobs: Sequence[Future[tuple[Matcher, MaskArray]]]) -> None:
        """Leaves a compiling thread to itself."""
        if jobs:
            self._left += jobs
            self._compiling.shutdown(wait=False)
            self._compiling = ThreadPoolExecutor(1, "cloister-compile")

    def open(self, grammar: Grammar, sampling: SamplingParams, token_ids: list[int]) -> GrammarState:
        """Returns the place of a sequence that arrives, with the tokens that its answer has already.

        Raises:
            CloisterError: the grammar cannot be followed.
        """
        found = self._find(grammar)
        try:
            if found.job is None or found.objection is not None:
                raise CloisterError(found.objection or TOO_BUSY)
            matcher, mask = found.job.result(COMPILE_TIMEOUT_S)
        except FutureTimeoutError:
            self.give_up(grammar)
            raise CloisterError(TOO_SLOW) from None
        state = GrammarState(matcher.copy(), mask.copy(), self._eos, sampling, token_ids)
        if token_ids or sampling.ignore_eos or sampling.min_tokens:
            self.look_ahead([state])
        return state

    def look_ahead(self, states: Sequence[GrammarState]) -> None:
        """Starts to work out what may follow, for sequences that just went on."""
        job = self._masks.submit(_look_ahead, states)
        for state in states:
            state.expect(job)

    def _find(self, grammar: Grammar) -> _Compiled:
        key = id(grammar)
        found = self._compiled.get(key)
        if found is None or found.owner() is not grammar or found.job is None:
            owner = weakref.ref(grammar, lambda gone: self._forget(key, gone))
            found = self._compiled[key] = _Compiled(owner, self._start(grammar))
        return found

    def _start(self, grammar: Grammar) -> Future[tuple[Matcher, MaskArray]] | None:
        self._left = [job for job in self._left if not job.done()]
        return self._compiling.submit(self._compile, grammar) if len(self._left) < MAX_LEFT else None

    def _compile(self, grammar: Grammar) -> tuple[Matcher, MaskArray]:
        try:
            matcher, mask = self._compiler.compile(grammar), np.zeros_like(self._eos)
            is_filled = matcher.fill(mask)
        except CloisterError:
            raise
        except Exception as error:  # its text may have the client's words in it
            raise CloisterError(f"the grammar cannot be compiled ({type(error).__name__}); make it simpler") from None
        if not is_filled:
            raise CloisterError(_TOO_COMPLEX)
        return matcher, mask

    def _forget(self, key: int, owner: weakref.ref[Grammar]) -> None:
        found = self._compiled.get(key)
        if found is not None and found.owner is owner:
            del self._compiled[key]


def _look_ahead(states: Sequence[GrammarState]) -> None:
    for state in states:
        state.look_ahead()


def mask_tokens(scores: npt.NDArray[np.float32], rows: Sequence[int], masks: Sequence[MaskArray]) -> None:
    """Sets the logits of barred tokens to minus infinity, in place: those of row `rows[i]` by `masks[i]`."""
    for row, mask in zip(rows, masks, strict=True):
        allowed = np.unpackbits(mask.view(np.uint8), count=scores.shape[1], bitorder="little")
        scores[row][allowed == 0] = -np.inf
