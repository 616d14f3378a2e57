"""Quotas of one API key or user: requests per minute, concurrent requests, tokens per day. Pure: times are arguments.

Counts are kept in memory only and are reset when the server starts. Unused charges are refunded once.
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
"""Retry delay if too many requests of a key run; when one of them ends is unknown."""


@dataclass(frozen=True, slots=True)
class KeyQuota:
    """Limits of one API key; None is no limit.

    Attributes:
        requests_per_minute: maximum number of requests that begin in any 60 seconds.
        concurrent_requests: maximum number of open requests.
        tokens_per_day: maximum of prompt and output tokens together, from midnight to midnight UTC.
    """

    requests_per_minute: int | None = None
    concurrent_requests: int | None = None
    tokens_per_day: int | None = None

    def __post_init__(self) -> None:
        for name, value in self.items():
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1; leave it out for no limit")

    def items(self) -> Iterator[tuple[str, int | None]]:
        """Yields every limit with its name."""
        for field in fields(self):
            yield field.name, getattr(self, field.name)

    @property
    def any(self) -> bool:
        """Whether there is any limit."""
        return any(value is not None for _, value in self.items())


NO_LIMITS: Final = KeyQuota()


@dataclass(frozen=True, slots=True)
class Allowance:
    """The remainder of one limit.

    Attributes:
        kind: "requests" or "tokens".
        reset_s: seconds until the limit is fully available again.
    """

    kind: str
    limit: int
    remaining: int
    reset_s: float


class Account:
    """The usage of one API key.

    Args:
        limits: may be replaced at any time; usage is kept.
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
            now_s: time of a monotonic clock, seconds.

        Raises:
            RateLimitError: the limit is exceeded; nothing was charged.
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
        """Returns the remainders of the limits that can be stated in advance.

        Args:
            now_s: time of the monotonic clock, seconds.
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
        """Charges tokens and returns the day to which they are charged."""
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
        if day == self._day:  # charges of a past day expire with it
            self._num_tokens -= num_tokens

    def _leave(self, begun_s: float, *, refund: bool) -> None:
        self._num_open -= 1
        if refund and begun_s in self._begun_s:
            self._begun_s.remove(begun_s)

    def _tokens_of_day(self, utc_s: float) -> int:
        day = int(utc_s // DAY_S)
        if day > self._day:  # a clock that is set back does not start the same day twice
            self._day, self._num_tokens = day, 0
        return self._num_tokens

    def _forget_until(self, limit_s: float) -> None:
        while self._begun_s and self._begun_s[0] <= limit_s:
            self._begun_s.popleft()


class Charge:
    """The charges of one open request. `leave` and `refund` take effect once; further calls do nothing."""

    def __init__(self, account: Account, begun_s: float) -> None:
        self.account = account
        self._begun_s = begun_s
        self._is_open = True
        self._reserved: dict[str, tuple[int, int]] = {}

    def reserve(self, name: str, num_tokens: int, utc_s: float) -> None:
        """Reserves the largest number of tokens that a part of the request can need.

        Args:
            name: name of the part, for `refund`.

        Raises:
            RateLimitError: they exceed the day's remainder; nothing was charged.
        """
        self._reserved[name] = (num_tokens, self.account._reserve(num_tokens, utc_s))

    def refund(self, name: str, num_used_tokens: int) -> None:
        """Refunds the part of a reservation that was not used.

        Args:
            num_used_tokens: the number of tokens used.
        """
        if (reserved := self._reserved.pop(name, None)) is not None:
            self.account._give_back(reserved[0] - num_used_tokens, reserved[1])

    def leave(self, *, refund: bool) -> None:
        """Ends the request.

        Args:
            refund: do not count it against the minute, because the server could not serve it.
        """
        if self._is_open:
            self._is_open = False
            self.account._leave(self._begun_s, refund=refund)


def _until_midnight(utc_s: float) -> float:
    return DAY_S - utc_s % DAY_S
