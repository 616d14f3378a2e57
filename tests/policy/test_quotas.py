"""What a key may use is charged exactly once, never exceeded, and given back when it was not used."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cloister.policy import Account, Charge, Credentials, Gate, KeyQuota, Policy
from cloister.policy.quotas import DAY_S, MINUTE_S
from cloister.types.errors import AuthenticationError, RateLimitError
from tests.thinning import examples

NOON = 12 * 3600.0


def test_the_request_after_the_last_one_of_a_minute_is_told_when_to_come_back() -> None:
    account = Account(KeyQuota(requests_per_minute=2))
    account.enter(0.0)
    account.enter(10.0)
    with pytest.raises(RateLimitError, match="2 requests a minute") as refusal:
        account.enter(25.0)
    assert (refusal.value.status, refusal.value.code) == (429, "rate_limit_exceeded")
    assert refusal.value.retry_after_s == pytest.approx(35.0)
    account.enter(60.0)


def test_a_request_that_could_not_be_served_does_not_count_against_the_minute() -> None:
    account = Account(KeyQuota(requests_per_minute=1))
    charge = account.enter(0.0)
    charge.leave(refund=True)
    charge.leave(refund=True)
    account.enter(1.0).leave(refund=False)
    with pytest.raises(RateLimitError):
        account.enter(2.0)


def test_so_many_may_be_open_at_once_and_no_more() -> None:
    account = Account(KeyQuota(concurrent_requests=2))
    first = account.enter(0.0)
    account.enter(0.0)
    with pytest.raises(RateLimitError, match="2 requests open at once"):
        account.enter(0.0)
    first.leave(refund=False)
    first.leave(refund=False)
    account.enter(0.0)
    with pytest.raises(RateLimitError):
        account.enter(0.0)


def test_unused_tokens_are_given_back_once() -> None:
    account = Account(KeyQuota(tokens_per_day=100))
    charge = account.enter(0.0)
    charge.reserve("a", 90, NOON)
    with pytest.raises(RateLimitError, match=r"100 tokens a day \(UTC\) and have 10 left, and this request may need 11"):
        charge.reserve("b", 11, NOON)
    charge.refund("a", 30)
    charge.refund("a", 0)
    charge.refund("b", 0)
    assert account.allowances(0.0, NOON)[0].remaining == 70


def test_midnight_utc_opens_a_new_day_and_takes_nothing_back_from_it() -> None:
    account = Account(KeyQuota(tokens_per_day=100))
    charge = account.enter(0.0)
    charge.reserve("late", 100, DAY_S - 1)
    with pytest.raises(RateLimitError) as refusal:
        account.enter(0.0).reserve("x", 1, DAY_S - 1)
    assert refusal.value.retry_after_s == pytest.approx(1.0)
    account.enter(0.0).reserve("morning", 60, DAY_S)
    charge.refund("late", 10)
    (left,) = account.allowances(0.0, DAY_S + 10)
    assert (left.remaining, left.reset_s) == (40, DAY_S - 10)


def test_a_clock_that_is_set_back_opens_no_day_twice() -> None:
    account = Account(KeyQuota(tokens_per_day=100))
    account.enter(0.0).reserve("a", 100, DAY_S + 5)
    with pytest.raises(RateLimitError):
        account.enter(0.0).reserve("b", 1, DAY_S - 5)


@given(st.lists(st.tuples(st.floats(0, 40), st.booleans()), max_size=60), st.integers(1, 5))
def test_in_no_minute_more_requests_begin(pauses: list[tuple[float, bool]], limit: int) -> None:
    account, now_s, begun = Account(KeyQuota(requests_per_minute=limit)), 0.0, []
    for pause_s, refund in pauses:
        now_s += pause_s
        try:
            charge = account.enter(now_s)
        except RateLimitError:
            assert sum(s > now_s - MINUTE_S for s in begun) == limit
            continue
        charge.leave(refund=refund)
        if not refund:
            begun.append(now_s)
        assert sum(s > now_s - MINUTE_S for s in begun) <= limit


class Books(RuleBasedStateMachine):
    """An account beside a plain sum of what its open and ended requests used."""

    def __init__(self) -> None:
        super().__init__()
        self.account = Account(KeyQuota(concurrent_requests=3, tokens_per_day=50))
        self.open: list[tuple[Charge, dict[str, int]]] = []
        self.used = 0
        self.utc_s = NOON
        self.next = 0

    @rule()
    def enter(self) -> None:
        try:
            self.open.append((self.account.enter(0.0), {}))
        except RateLimitError:
            assert len(self.open) == 3

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 2), num_tokens=st.integers(0, 30))
    def reserve(self, which: int, num_tokens: int) -> None:
        charge, parts = self.open[which % len(self.open)]
        self.next += 1
        try:
            charge.reserve(str(self.next), num_tokens, self.utc_s)
        except RateLimitError:
            assert self.charged() + num_tokens > 50
        else:
            parts[str(self.next)] = num_tokens

    @precondition(lambda self: any(parts for _, parts in self.open))
    @rule(share=st.floats(0, 1))
    def refund(self, share: float) -> None:
        charge, parts = next((c, p) for c, p in self.open if p)
        name, reserved = parts.popitem()
        used = int(reserved * share)
        charge.refund(name, used)
        charge.refund(name, 0)
        self.used += used

    @precondition(lambda self: any(not parts for _, parts in self.open))
    @rule(refund=st.booleans())
    def leave(self, refund: bool) -> None:
        entry = next(e for e in self.open if not e[1])
        self.open.remove(entry)
        entry[0].leave(refund=refund)

    def charged(self) -> int:
        return self.used + sum(sum(parts.values()) for _, parts in self.open)

    @invariant()
    def adds_up(self) -> None:
        assert self.charged() <= 50
        assert self.account.allowances(0.0, self.utc_s)[0].remaining == 50 - self.charged()


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=examples(40), stateful_step_count=30, deadline=None)


def make_gate(credentials: Credentials) -> Gate:
    return Gate(Policy("team"), credentials, loopback=True)


def test_what_a_key_used_still_counts_after_the_keys_changed() -> None:
    credentials, key = Credentials.empty().add("ann", limits=KeyQuota(requests_per_minute=2))
    gate = make_gate(credentials)
    gate.admit(key).account.enter(0.0)
    gate.change_keys(credentials.add("bob")[0])
    account = gate.admit(key).account
    account.enter(0.0)
    with pytest.raises(RateLimitError):
        account.enter(0.0)
    gate.change_keys(credentials.limit("ann", KeyQuota(requests_per_minute=3)))
    gate.admit(key).account.enter(0.0)
    gate.change_keys(credentials.limit("ann", KeyQuota()))
    assert gate.admit(key).account is None


def test_a_key_that_was_removed_stops_working_and_the_last_one_too() -> None:
    credentials, ann = Credentials.empty().add("ann")
    credentials, bob = credentials.add("bob")
    gate = make_gate(credentials)
    for name, gone, left in (("ann", ann, [bob]), ("bob", bob, [])):
        credentials = credentials.remove(name)
        gate.change_keys(credentials)
        with pytest.raises(AuthenticationError):
            gate.admit(gone)
        for key in left:
            gate.admit(key)


def test_two_keys_of_one_tenant_have_their_own_limits() -> None:
    credentials, first = Credentials.empty().add("a", tenant="lab", limits=KeyQuota(concurrent_requests=1))
    credentials, second = credentials.add("b", tenant="lab", limits=KeyQuota(concurrent_requests=1))
    gate = make_gate(credentials)
    gate.admit(first).account.enter(0.0)
    gate.admit(second).account.enter(0.0)
    assert gate.admit(first).account is gate.admit(first).account


@pytest.mark.parametrize("name", ["requests_per_minute", "concurrent_requests", "tokens_per_day"])
def test_a_limit_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1"):
        KeyQuota(**{name: 0})
