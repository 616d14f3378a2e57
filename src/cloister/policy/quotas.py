"""What one API key, or person, may use: requests per minute, requests at once, tokens per day. Pure: times are arguments.

Counts live in memory only and begin anew with the server. What was charged is given back once if it was not used.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Final

from cloister.types.errors import RateLimitError

MINUTE_S: Final = 60.0
DAY_S: Final = 86_400.0
BUSY_RETRY_S: Final = 1.0
"""When to try again if too many requests of a key run: nobody can know when one of them ends."""


@dataclass(frozen=True, slots=True)
class KeyQuota:
    """Bounds of one API key; None is no bound.

    Attributes:
        requests_per_minute: in no 60 seconds more begin.
        concurrent_requests: so many may be open at once.
        tokens_per_day: prompts and answers together, from midnight to midnight UTC.
    """

    requests_per_minute: int | None = None
    concurrent_requests: int | None = None
    tokens_per_day: int | None = None

    def __post_init__(self) -> None:
        for name, value in self.items():
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1; leave it out for no limit")

    def items(self) -> Iterator[tuple[str, int | None]]:
        """Yields every bound with its name."""
        for field in fields(self):
            yield field.name, getattr(self, field.name)

    @property
    def any(self) -> bool:
        """Whether there is a bound at all."""
        return any(value is not None for _, value in self.items())


NO_LIMITS: Final = KeyQuota()


@dataclass(frozen=True, slots=True)
class Allowance:
    """What is left of one bound.

    Attributes:
        kind: "requests" or "tokens".
        reset_s: until all of it is there again.
    """

    kind: str
    limit: int
    remaining: int
    reset_s: float


class Account:
    """What one API key has used.

    Args:
        limits: may be exchanged at any time; what was used stays.
    """

    def __init__(self, limits: KeyQuota) -> None:
        self.limits = limits
        self._begun_s: deque[float] = deque()
        self._num_open = 0
        self._day = -1
        self._num_tokens = 0

    def enter(self, now_s: float) -> Charge:
        """Charges one request.

        Args:
            now_s: of a monotonic clock.

        Raises:
            RateLimitError: it is one too many; nothing was charged.
        """
        self._forget_until(now_s - MINUTE_S)
        limits = self.limits
        if limits.requests_per_minute is not None and len(self._begun_s) >= limits.requests_per_minute:
            free_s = self._begun_s[len(self._begun_s) - limits.requests_per_minute] + MINUTE_S - now_s
            raise RateLimitError(
                f"You may begin {limits.requests_per_minute} requests a minute; try again in {math.ceil(free_s)} s.",
                retry_after_s=free_s,
            )
        if limits.concurrent_requests is not None and self._num_open >= limits.concurrent_requests:
            raise RateLimitError(
                f"You may have {limits.concurrent_requests} requests open at once; wait until one of them has ended.",
                retry_after_s=BUSY_RETRY_S,
            )
        if limits.requests_per_minute is not None:
            self._begun_s.append(now_s)
        self._num_open += 1
        return Charge(self, now_s)

    def allowances(self, now_s: float, utc_s: float) -> list[Allowance]:
        """Returns what is left of the bounds that can be told ahead.

        Args:
            now_s: of the monotonic clock.
            utc_s: seconds since 1970-01-01 UTC.
        """
        self._forget_until(now_s - MINUTE_S)
        left = []
        if (limit := self.limits.requests_per_minute) is not None:
            reset_s = self._begun_s[-1] + MINUTE_S - now_s if self._begun_s else 0.0
            left.append(Allowance("requests", limit, max(0, limit - len(self._begun_s)), reset_s))
        if (limit := self.limits.tokens_per_day) is not None:
            left.append(Allowance("tokens", limit, max(0, limit - self._tokens_of_day(utc_s)), _until_midnight(utc_s)))
        return left

    def _reserve(self, num_tokens: int, utc_s: float) -> int:
        """Charges tokens and returns the day that they count for."""
        used = self._tokens_of_day(utc_s)
        limit = self.limits.tokens_per_day
        if limit is not None and used + num_tokens > limit:
            raise RateLimitError(
                f"You may use {limit} tokens a day (UTC) and have {max(0, limit - used)} left, and this request may "
                f"need {num_tokens}; ask for fewer with `max_tokens`, or try again after midnight UTC.",
                retry_after_s=_until_midnight(utc_s),
            )
        self._num_tokens += num_tokens
        return self._day

    def _give_back(self, num_tokens: int, day: int) -> None:
        if day == self._day:  # what was charged on a day that is over is over with it
            self._num_tokens -= num_tokens

    def _leave(self, begun_s: float, *, refund: bool) -> None:
        self._num_open -= 1
        if refund and begun_s in self._begun_s:
            self._begun_s.remove(begun_s)

    def _tokens_of_day(self, utc_s: float) -> int:
        day = int(utc_s // DAY_S)
        if day > self._day:  # a clock that is set back does not open the same day twice
            self._day, self._num_tokens = day, 0
        return self._num_tokens

    def _forget_until(self, limit_s: float) -> None:
        while self._begun_s and self._begun_s[0] <= limit_s:
            self._begun_s.popleft()


class Charge:
    """What one open request was charged. `leave` and `refund` count once; after that they change nothing."""

    def __init__(self, account: Account, begun_s: float) -> None:
        self.account = account
        self._begun_s = begun_s
        self._is_open = True
        self._reserved: dict[str, tuple[int, int]] = {}

    def reserve(self, name: str, num_tokens: int, utc_s: float) -> None:
        """Charges the tokens that a part of the request can need at most.

        Args:
            name: of the part, for `refund`.

        Raises:
            RateLimitError: they are more than the day has left; nothing was charged.
        """
        self._reserved[name] = (num_tokens, self.account._reserve(num_tokens, utc_s))

    def refund(self, name: str, num_used_tokens: int) -> None:
        """Gives back what a part did not use of its reservation.

        Args:
            num_used_tokens: what it used.
        """
        if (reserved := self._reserved.pop(name, None)) is not None:
            self.account._give_back(reserved[0] - num_used_tokens, reserved[1])

    def leave(self, *, refund: bool) -> None:
        """Ends the request.

        Args:
            refund: the server could not serve it, so it does not count against the minute.
        """
        if self._is_open:
            self._is_open = False
            self.account._leave(self._begun_s, refund=refund)


def _until_midnight(utc_s: float) -> float:
    return DAY_S - utc_s % DAY_S
