"""Grammars of running sequences: compiled in the background; masks are computed one step ahead of the token.

After a token is chosen its grammar advances, and a helper thread computes the next mask during the next forward pass; what
the helper has not begun, the engine's thread computes afterwards. It does so for a bounded time only: sequences whose masks
are late then get no token in this step (`MaskWait`). The runner owns this state (plans hold no token ids): a resumed
sequence reads its tokens again, a forked one copies it.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from cloister.executor.grammar_memory import MIB, GrammarMemory
from cloister.executor.sampling_time import SamplingTime
from cloister.types.clock import Clock
from cloister.types.errors import CloisterError, InvalidRequestError
from cloister.types.request import COMPILE_TIMEOUT_S, COMPILE_WALL_S, Grammar, SamplingParams

MaskArray = npt.NDArray[np.uint32]

MASK_TIMEOUT_S: Final = 5.0
"""Timeout for one sequence's mask. The library's own limits stop after about 20 ms."""
MASK_WAIT_S: Final = 0.01
"""Time that a step takes for masks that are late, of all its sequences together."""
DRAFT_MASKS_S: Final = 0.05
"""Time that a step takes for masks behind accepted drafts; then no further draft under a grammar is accepted."""
MAX_LEFT: Final = 2
"""Maximum number of abandoned compiling threads."""
_SIMPLER: Final = (
    "make the schema, expression or grammar of the answer simpler: fewer alternatives and optional properties, no large bounds"
    " (`maxLength`, `maxItems`, `{1,500}`) inside one another"
)
TOO_SLOW: Final = f"the grammar takes too long to compile; {_SIMPLER}"
TOO_LARGE: Final = "the compiled grammar takes {:.0f} MiB of memory, and one may take {:.0f}; make it smaller"
TOO_BUSY: Final = "grammars that take too long are still being compiled; try again in a minute"
_TOO_COMPLEX: Final = f"the grammar takes too much work at this place of the answer, or no token can follow; {_SIMPLER}"


class Matcher(Protocol):
    """The state of one answer in a grammar. Used by one thread at a time."""

    @property
    def is_complete(self) -> bool:
        """Whether the answer satisfies the grammar and nothing can follow."""
        ...

    def accept(self, token_ids: list[int]) -> bool:
        """Advances by some tokens; returns False if that is permanently impossible."""
        ...

    def fill(self, mask: MaskArray) -> bool:
        """Writes the mask of tokens that may follow, including EOS if the answer may end: bit i % 32 of word i // 32.

        Returns False if that is permanently impossible. Releases the interpreter lock.
        """
        ...

    def copy(self) -> Matcher: ...


class Compiler(Protocol):
    """Creates matchers, in any thread.

    Attributes:
        eos_token_ids: tokens that end an answer and are not part of its grammar.
        num_words: length of a mask, which may have bits after the model's last token.
        is_ready: the model's vocabulary was read, which happens for the first grammar.
    """

    eos_token_ids: tuple[int, ...]
    num_words: int

    @property
    def is_ready(self) -> bool: ...

    def compile(self, grammar: Grammar) -> Matcher:
        """Returns a matcher in its initial state.

        Raises:
            CloisterError: the grammar is not supported; the message is for the client.
        """
        ...


@dataclass(slots=True)
class MaskCost:
    """What the masks of one grammar take, in all of its sequences.

    Attributes:
        longest_s: the longest one so far.
    """

    longest_s: float = 0.0


_Ready = tuple[Matcher, MaskArray, MaskCost]
"""A compiled grammar with its first mask."""


class GrammarState:
    """The grammar state of one sequence, and the mask of its next token.

    Attributes:
        failure: why it cannot continue, or None.
        must_end: only EOS may follow, even if EOS is otherwise masked.
        is_late: its mask is not there, and the step does not wait for it (`MaskWait`).
        cost: what the masks of its grammar take.
    """

    def __init__(
        self,
        matcher: Matcher,
        mask: MaskArray,
        eos: MaskArray,
        sampling: SamplingParams,
        unread: list[int] | None = None,
        cost: MaskCost | None = None,
    ) -> None:
        self.failure: str | None = None
        self.must_end = False
        self._matcher = matcher
        self._mask = mask
        self._eos = eos
        self._sampling = sampling
        self.is_late = False
        self.cost = MaskCost() if cost is None else cost
        self._is_expected = False
        self._is_unclaimed = False
        self._claim = threading.Lock()
        self._done = threading.Event()
        self._unread = unread or []
        self._origin: GrammarState | None = None
        self._copies: list[GrammarState] = []

    @property
    def num_words(self) -> int:
        """Length of the mask."""
        return self._mask.size

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow the tokens so far. Must not be called while a mask is computed."""
        if self.failure is not None:
            return False  # another thread may still be using the matcher
        with _failing_alone():
            return self._matcher.is_complete
        self._fail()
        return False

    def accept(self, token_id: int) -> None:
        """Advances by the chosen token."""
        self._hand_out()
        is_accepted = False
        with _failing_alone():
            is_accepted = self._matcher.accept([token_id])
        if not is_accepted:
            self.failure = _TOO_COMPLEX

    def look_ahead(self) -> None:
        """Computes the mask, in one thread at a time. Never raises, because the job also serves other sequences."""
        began_s = time.perf_counter()
        unread, self._unread = self._unread, []
        is_known = False
        try:
            with _failing_alone():
                is_known = (not unread or self._matcher.accept(unread)) and self._matcher.fill(self._mask)
        finally:
            if not is_known:
                self._fail()
        if is_known and (self._sampling.ignore_eos or self._sampling.min_tokens):
            self._keep_eos_back()
        self.cost.longest_s = max(self.cost.longest_s, time.perf_counter() - began_s)

    def expect(self) -> None:
        """Marks the mask as one that some thread will compute: the first that claims it."""
        self._done.clear()
        self._is_expected = self._is_unclaimed = True

    def look_ahead_if_unclaimed(self) -> None:
        """Computes the mask, unless another thread does or has."""
        if self._take():
            try:
                self.look_ahead()
            finally:  # else the engine's thread would wait for a helper that has ended
                self._done.set()

    @property
    def is_ready(self) -> bool:
        """Whether nobody has to wait for the mask."""
        if self._origin is not None:
            return self._origin.is_ready
        return not self._is_expected or self._done.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Waits for a thread that computes the mask, or computes it here, however long that takes; returns whether it is
        there."""
        if self._origin is not None:
            return self._origin.wait(timeout_s)
        self.look_ahead_if_unclaimed()
        return self._done.wait(timeout_s)

    def mask(self) -> MaskArray:
        """Waits for and returns the mask of the next token, [num_words] uint32."""
        self._wait()
        return self._mask

    def copy(self) -> GrammarState:
        """Returns a copy of this state for another sequence, without waiting: it has its mask when this one has it."""
        copied = GrammarState(self._matcher, self._mask, self._eos, self._sampling, cost=self.cost)
        copied._origin, copied.is_late = self, self.is_late
        self._copies.append(copied)
        if self.is_ready:
            self._hand_out()
        return copied

    def _hand_out(self) -> None:
        """Gives copies what they are copies of, before this state goes on. No other thread may use it meanwhile."""
        copies, self._copies = self._copies, []
        if copies:
            self._wait()
        for copied in copies:
            copied.failure, copied.must_end, copied._origin = self.failure, self.must_end, None
            copied._mask = self._mask.copy()
            if self.failure is not None:
                continue  # another thread may still be using the matcher
            own = None
            with _failing_alone():
                own = self._matcher.copy()
            if own is None:
                copied._fail()
            else:
                copied._matcher = own

    def _wait(self) -> None:
        if self._origin is not None:
            self._origin._hand_out()
        if self._is_expected and not self.wait(MASK_TIMEOUT_S):
            self._fail()
        self._is_expected = False

    def _take(self) -> bool:
        """Claims the mask; returns False if that was done before."""
        with self._claim:
            is_mine, self._is_unclaimed = self._is_unclaimed, False
        return is_mine

    def _fail(self) -> None:
        """Masks every token, in an array that no other thread writes."""
        self.failure = _TOO_COMPLEX
        self._mask = np.zeros_like(self._mask)

    def _keep_eos_back(self) -> None:
        others = self._mask & ~self._eos
        self.must_end = not others.any()
        if self._sampling.ignore_eos and not self.must_end:
            self._mask = others


@contextmanager
def _failing_alone() -> Iterator[None]:
    """Suppresses what the library raises, whose text may contain user content. A panic of a library in Rust is no Exception."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:
        return


class CompileTime:
    """What one compilation has taken so far. Begun by the thread that compiles, read by another one.

    Its processor time counts: on a machine with much other work a second of it may take a minute. Time by the clock has a limit
    of its own, for a compilation that waits for something.
    """

    def __init__(self) -> None:
        self._queued_s = time.monotonic()
        self._clock: int | None = None
        self._began_s = 0.0
        self._began_cpu_s = 0.0

    def begin(self) -> None:
        """Called in the thread that begins to compile."""
        if hasattr(time, "pthread_getcpuclockid"):  # not on every system
            self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._began_cpu_s = self._read_cpu_s()
        self._began_s = time.monotonic()  # last: it says that the others are there

    def restart(self) -> None:
        """Forgets what it has taken: it was not the grammar's fault."""
        self._queued_s = time.monotonic()
        if self._began_s:
            self._began_s, self._began_cpu_s = self._queued_s, self._read_cpu_s()

    @property
    def is_over(self) -> bool:
        """Whether it has begun, and has had its time."""
        if not self._began_s:
            return False
        if time.monotonic() - self._began_s >= COMPILE_WALL_S:
            return True
        return self._read_cpu_s() - self._began_cpu_s >= COMPILE_TIMEOUT_S

    def wait_until(self, now_s: float) -> None:
        """Forgets what it was queued for before: its turn had not come, as there was no memory for it."""
        self._queued_s = max(self._queued_s, now_s)

    @property
    def has_waited(self) -> bool:
        """Whether it has not begun, and has been queued for too long, whatever the reason."""
        return not self._began_s and time.monotonic() - self._queued_s >= COMPILE_WALL_S

    def _read_cpu_s(self) -> float:
        if self._clock is None:
            return time.monotonic()
        try:
            return time.clock_gettime(self._clock)
        except OSError:  # the thread has ended, and with it the compilation
            return self._began_cpu_s


@dataclass(slots=True)
class _Compiled:
    """A grammar of an open request, or of one that has ended and whose sampling parameters are kept by somebody.

    Attributes:
        owner: the object in its sampling parameters; this entry is dropped with it.
        tenant: of its request.
        number: by which its memory is counted.
        job: compiles it; None while no thread is free.
        taken: what that has taken.
        is_moved: it was queued for too long, and got another thread.
        awaited: the job whose end the engine will hear of.
    """

    owner: weakref.ref[Grammar]
    tenant: str
    number: int
    job: Future[_Ready] | None
    taken: CompileTime
    objection: str | None = None
    is_moved: bool = False
    awaited: Future[_Ready] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Compilation:
    """One compilation, from when it is queued until it ends.

    Attributes:
        number: of its grammar.
        owner: its grammar, as long as anybody needs it.
        taken: what it has taken.
        is_moved: it was queued for too long, and got another thread.
    """

    number: int
    owner: weakref.ref[Grammar]
    job: Future[_Ready]
    compile_it: Callable[[], _Ready]
    taken: CompileTime
    is_moved: bool


class CompileQueue:
    """Grammars that wait for a thread, and for memory. Tenants take turns: however many one of them sends, another one's waits
    for one of each. Those of a tenant for which there is no memory are passed over until there is.

    A thread takes what is first when it is free, so it is told only that there is one more.

    Args:
        memory: of compiled grammars.
    """

    def __init__(self, memory: GrammarMemory) -> None:
        self._memory = memory
        self._lock = threading.Lock()
        self._waiting: dict[str, OrderedDict[int, Compilation]] = {}  # the next tenant first
        self._running: list[Compilation] = []
        self._passed_over_s: dict[str, float] = {}
        self._num_unused = 0

    def put(self, tenant: str, compilation: Compilation) -> None:
        """Adds a compilation; a thread has to call `run_next` once for it, or more often."""
        with self._lock:
            self._waiting.setdefault(tenant, OrderedDict())[compilation.number] = compilation

    def discard(self, tenant: str, number: int) -> Compilation | None:
        """Takes one out, if it waits; returns it."""
        with self._lock:
            jobs = self._waiting.get(tenant, OrderedDict())
            found = jobs.pop(number, None)
            if found is not None and not jobs:
                del self._waiting[tenant]
            return found

    @property
    def num_waiting(self) -> int:
        """Those that have not begun, also cancelled ones."""
        with self._lock:
            return sum(map(len, self._waiting.values()))

    @property
    def lacks_memory(self) -> bool:
        """Whether a thread was free for something, and there was no memory for anything that waits."""
        return self._num_unused > 0 and bool(self._waiting)

    def take_back(self) -> bool:
        """Returns whether `run_next` must be called once more, as there is memory by now."""
        with self._lock:
            self._num_unused = min(self._num_unused, sum(map(len, self._waiting.values())))
            if not self._num_unused or all(not self._has_room(tenant) for tenant in self._waiting):
                return False
            self._num_unused -= 1
            return True

    def passed_over_s(self, tenant: str) -> float:
        """Returns when there was last no memory for the grammars of a tenant."""
        with self._lock:
            if tenant in self._waiting and not self._has_room(tenant):
                self._passed_over_s[tenant] = time.monotonic()
            return self._passed_over_s.get(tenant, 0.0)

    def running(self) -> list[Compilation]:
        """Returns those that have begun: few, however many wait."""
        with self._lock:
            return list(self._running)

    def run_next(self) -> None:
        """Compiles the next one for which there is memory; those that were cancelled are dropped on the way."""
        while (found := self._take()) is not None:
            if not found.job.set_running_or_notify_cancel():
                continue
            self._run(found)
            return

    def run(self, number: int, tenant: str) -> None:
        """Compiles one, if it has not begun, whatever the memory is: a step waits for it."""
        found = self.discard(tenant, number)
        if found is not None and found.job.set_running_or_notify_cancel():
            self._run(found)

    def _run(self, found: Compilation) -> None:
        with self._lock:
            self._running.append(found)
        try:
            found.job.set_result(found.compile_it())
        except BaseException as error:  # a panic of a library in Rust is no Exception
            found.job.set_exception(error)
        finally:
            with self._lock:
                self._running.remove(found)

    def _take(self) -> Compilation | None:
        with self._lock:
            for tenant, jobs in self._waiting.items():
                if self._has_room(tenant):
                    del self._waiting[tenant]
                    _, found = jobs.popitem(last=False)
                    if jobs:
                        self._waiting[tenant] = jobs  # behind the others
                    return found
                self._passed_over_s[tenant] = time.monotonic()
            self._num_unused += bool(self._waiting)
            return None

    def _has_room(self, tenant: str) -> bool:
        first = next(iter(self._waiting[tenant].values()))
        return first.job.cancelled() or self._memory.has_room(tenant, first.owner())


def make_thread(name: str) -> Executor:
    """Returns a thread that does one job after the other."""
    return ThreadPoolExecutor(1, name)


class Grammars:
    """Grammars of an engine's open requests. Called by the engine's thread.

    Compiled grammars are found by object identity, never by content: one request cannot make another one faster, whatever its
    scope.

    Args:
        compiler: creates matchers.
        make_thread: makes its helper threads, given their names.
        memory: of compiled grammars; None for one with the default limit.
    """

    def __init__(
        self,
        compiler: Compiler,
        make_thread: Callable[[str], Executor] = make_thread,
        memory: GrammarMemory | None = None,
    ) -> None:
        self._compiler = compiler
        self._make_thread = make_thread
        self._eos = np.zeros(compiler.num_words, np.uint32)
        for token_id in compiler.eos_token_ids:
            self._eos[token_id // 32] |= np.uint32(1 << token_id % 32)
        self._compiled: dict[int, _Compiled] = {}
        self._masks = make_thread("cloister-grammar")
        self._compiling = make_thread("cloister-compile")
        self._memory = GrammarMemory() if memory is None else memory
        self._queue = CompileQueue(self._memory)
        self._numbers = count()
        self._gone: deque[tuple[str, int]] = deque()
        self._left: list[Future[_Ready]] = []

    def prepare(self, grammar: Grammar, then: Callable[[], None], tenant: str = "") -> bool:
        """Starts to compile a grammar; returns True if it is already compiled.

        Args:
            then: called from another thread when it is compiled.
            tenant: whose turn it is compiled in.
        """
        found = self._find(grammar, tenant)
        if found.job is None or found.job.done() or found.objection is not None:
            return True
        if found.awaited is not found.job:  # asked again and again, it would call as often
            found.awaited = found.job
            found.job.add_done_callback(lambda job: then())
        return False

    def resume(self, needed: Callable[[], Iterable[Grammar]]) -> None:
        """Has another grammar compiled, if some wait for memory and there is some by now. Call it in each step while requests
        wait for grammars.

        Args:
            needed: returns the grammars of open requests. Others, whose parameters somebody keeps, are dropped, the oldest
                first.
        """
        self._discard_gone()
        if not self._queue.lacks_memory:
            return
        if self._queue.take_back():
            self._compiling.submit(self._queue.run_next)
            return
        kept = {id(grammar) for grammar in needed()}
        for key, found in list(self._compiled.items()):
            if key in kept or found.job is None or not found.job.done():
                continue
            if self._compiled.pop(key, None) is not None:
                self._memory.release(found.number)
            if self._queue.take_back():
                self._compiling.submit(self._queue.run_next)
                return

    def give_up(self, grammar: Grammar) -> bool:
        """Gives up on a grammar that has had its time: its sequences will fail. Another thread compiles the ones queued behind
        it.

        Returns False if the delay is not the grammar's fault: while the vocabulary is read, while its thread gets too little
        processor time, while there is no memory for it and for some time after, and once if it was queued behind another one.
        """
        found = self._find(grammar)
        if not self._compiler.is_ready:
            found.taken.restart()
            return False
        if found.job is None or found.job.done():
            return True
        if not found.job.running():
            passed_over_s = self._queue.passed_over_s(found.tenant)
            found.taken.wait_until(passed_over_s)
            if time.monotonic() - passed_over_s < COMPILE_TIMEOUT_S:
                return False
            if not (self._can_move(found) or found.taken.has_waited or self._is_blocked()):
                return False
            return found.job.cancel() and self._move(found)  # False: it has just begun
        if not found.taken.is_over:
            return False
        found.objection = TOO_SLOW
        self._leave([found.job])
        return True

    def _can_move(self, found: _Compiled) -> bool:
        """Whether a queued grammar may get a thread of its own."""
        left = {id(job) for job in (*self._left, *self._running()) if not job.done()}
        return not found.is_moved and len(left) < MAX_LEFT

    def _is_blocked(self) -> bool:
        """Whether what is compiled has had its time, so that those behind it wait for no busy machine."""
        running = self._queue.running()
        return bool(running) and all(found.taken.is_over for found in running)

    def _running(self) -> list[Future[_Ready]]:
        return [found.job for found in self._queue.running() if not found.is_moved and found.job not in self._left]

    def _move(self, found: _Compiled) -> bool:
        """Restarts jobs that have not begun, on a new thread; returns True if there is no thread for them, or was
        none before."""
        if found.is_moved:
            found.objection = TOO_BUSY
            return True
        self._leave(self._running())
        found.taken = CompileTime()
        found.job, found.is_moved = self._start(found, is_moved=True), True
        return found.job is None

    def _leave(self, jobs: Sequence[Future[_Ready]]) -> None:
        """Abandons a compiling thread; another one takes its place, and what waits."""
        if jobs:
            self._left += jobs
            self._compiling.shutdown(wait=False)
            self._compiling = self._make_thread("cloister-compile")
            for _ in range(self._queue.num_waiting):  # else they waited for the one that was abandoned
                self._compiling.submit(self._queue.run_next)

    def open(self, grammar: Grammar, sampling: SamplingParams, token_ids: list[int]) -> GrammarState:
        """Returns the grammar state of a new or resumed sequence, advanced by its answer so far.

        Raises:
            CloisterError: the grammar is not supported.
        """
        found = self._find(grammar)
        try:
            if found.job is None:  # it stays refused, whatever is free by now: a step must not wait for a compilation
                del self._compiled[id(grammar)]
            if found.job is None or found.objection is not None:
                kind = InvalidRequestError if found.objection == TOO_SLOW else CloisterError
                raise kind(found.objection or TOO_BUSY)
            if not found.job.done():
                self._compiling.submit(self._queue.run, found.number, found.tenant)
            matcher, mask, cost = found.job.result(COMPILE_TIMEOUT_S)
        except FutureTimeoutError:
            self.give_up(grammar)
            raise InvalidRequestError(TOO_SLOW) from None
        own = None
        with _failing_alone():
            own = matcher.copy()
        if own is None:
            raise InvalidRequestError(_TOO_COMPLEX)
        state = GrammarState(own, mask.copy(), self._eos, sampling, token_ids, cost)
        if token_ids or sampling.ignore_eos or sampling.min_tokens:
            self.look_ahead([state])
        return state

    def look_ahead(self, states: Sequence[GrammarState]) -> None:
        """Starts to compute the masks of sequences that have just advanced."""
        for state in states:
            state.expect()
        self._masks.submit(_look_ahead, states)

    def _find(self, grammar: Grammar, tenant: str = "") -> _Compiled:
        key = id(grammar)
        found = self._compiled.get(key)
        if found is None or found.owner() is not grammar:
            number = next(self._numbers)
            owner = weakref.ref(grammar, lambda gone: self._forget(key, number, tenant, gone))
            taken = CompileTime()
            found = self._compiled[key] = _Compiled(owner, tenant, number, None, taken)
            found.job = self._start(found)
        return found

    def _start(self, found: _Compiled, *, is_moved: bool = False) -> Future[_Ready] | None:
        self._discard_gone()
        self._left = [job for job in self._left if not job.done()]
        if len(self._left) >= MAX_LEFT:
            return None
        job: Future[_Ready] = Future()
        compile_it = partial(self._compile, found.number, found.owner, found.tenant, found.taken)
        self._queue.put(found.tenant, Compilation(found.number, found.owner, job, compile_it, found.taken, is_moved))
        self._compiling.submit(self._queue.run_next)
        return job

    def _compile(self, number: int, owner: weakref.ref[Grammar], tenant: str, taken: CompileTime) -> _Ready:
        grammar = owner()
        if grammar is None:
            raise CloisterError("the request of this grammar has ended")
        taken.begin()
        before = self._memory.meter.begin()
        ready = self._compile_once(grammar)
        num_bytes = self._memory.measure(tenant, grammar, before)
        if num_bytes > self._memory.largest_bytes:  # or another thread has allocated meanwhile: rarely twice
            del ready
            before = self._memory.meter.read()
            ready = self._compile_once(grammar)
            num_bytes = min(num_bytes, self._memory.measure(tenant, grammar, before))
        if num_bytes > self._memory.largest_bytes:
            raise InvalidRequestError(TOO_LARGE.format(num_bytes / MIB, self._memory.largest_bytes / MIB))
        self._memory.hold(number, tenant, num_bytes)
        return ready

    def _compile_once(self, grammar: Grammar) -> _Ready:
        try:
            matcher, mask = self._compiler.compile(grammar), np.zeros_like(self._eos)
            began_s = time.perf_counter()
            is_filled = matcher.fill(mask)
            cost = MaskCost(time.perf_counter() - began_s)
        except (CloisterError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic is no Exception; its text may contain user content
            raise InvalidRequestError(f"the grammar cannot be compiled ({type(error).__name__}); {_SIMPLER}") from None
        if not is_filled:
            raise InvalidRequestError(_TOO_COMPLEX)
        return matcher, mask, cost

    def _forget(self, key: int, number: int, tenant: str, owner: weakref.ref[Grammar]) -> None:
        """Drops a grammar that nobody needs. The garbage collector may call it in any thread, so it takes no lock."""
        found = self._compiled.get(key)
        if found is not None and found.owner is owner:
            del self._compiled[key]
        self._memory.release(number)
        self._gone.append((tenant, number))

    def _discard_gone(self) -> None:
        """Takes grammars out of the queue that nobody needs any more."""
        while self._gone:
            self._queue.discard(*self._gone.popleft())


def _look_ahead(states: Sequence[GrammarState]) -> None:
    for state in states:
        state.look_ahead_if_unclaimed()


class MaskWait:
    """How long each step waits for masks, of all its sequences together. Called by the engine's thread.

    First come masks of grammars whose masks take least, so that others hold them up no longer than a step may wait; the helper
    computes them meanwhile. In each step one is waited for however long it takes, if any is missing.

    Args:
        clock: measures how long a step waits.
        sampling_time: counts it.
    """

    def __init__(self, clock: Clock, sampling_time: SamplingTime) -> None:
        self._clock, self._sampling_time = clock, sampling_time
        self._left_s = MASK_WAIT_S
        self._has_waited = False

    def begin(self) -> None:
        """Begins a step."""
        self._left_s, self._has_waited = MASK_WAIT_S, False

    def wait(self, states: Sequence[GrammarState], *, may_defer: bool) -> None:
        """Waits for the masks of a part of the step, and marks those that are late.

        Args:
            may_defer: some may be late; False waits for all, however long that takes.
        """
        missing = []
        for state in states:
            state.is_late = False
            if not state.is_ready:
                missing.append(state)
        if missing:
            with self._sampling_time:
                self._wait_for_missing(missing, may_defer=may_defer)

    def _wait_for_missing(self, missing: list[GrammarState], *, may_defer: bool) -> None:
        if not may_defer:
            for state in missing:
                state.mask()
            return
        missing.sort(key=lambda state: state.cost.longest_s)
        until_s = self._clock.now() + self._left_s
        if not self._has_waited:
            self._has_waited = True
            missing.pop(0).mask()
        for state in missing:
            if not state.is_ready:
                left_s = until_s - self._clock.now()
                state.is_late = left_s <= 0.0 or not state.wait(left_s)
        self._left_s = max(0.0, until_s - self._clock.now())


def mask_tokens(scores: npt.NDArray[np.float32], rows: Sequence[int], masks: Sequence[MaskArray]) -> None:
    """Sets the logits of masked tokens to minus infinity, in place: row `rows[i]` by `masks[i]`."""
    for row, mask in zip(rows, masks, strict=True):
        allowed = np.unpackbits(mask.view(np.uint8), count=scores.shape[1], bitorder="little")
        scores[row][allowed == 0] = -np.inf
