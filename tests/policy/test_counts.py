"""Where a profile allows counts only, none of them can be traced to one request."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloister.policy import ALLOWED_COUNTS, CountRelease, Policy, Profile


def test_counts_off_the_allow_list_stay_inside() -> None:
    release = CountRelease(frozenset({"requests"}), threshold=2)
    assert release.publish(2, {"requests": 2, "cached_tokens": 9}) == {"requests": 2}
    assert not ALLOWED_COUNTS & {"cached_tokens", "ttft_seconds", "queue_length"}


def test_nothing_is_shown_before_enough_requests_ended() -> None:
    release = CountRelease(threshold=20)
    assert release.publish(19, {"requests": 19}) == {}
    assert release.publish(20, {"requests": 20}) == {"requests": 20}


@given(st.lists(st.integers(0, 30), max_size=60), st.integers(2, 25))
def test_two_readings_that_differ_have_a_threshold_of_requests_between_them(ended: list[int], threshold: int) -> None:
    release = CountRelease(frozenset({"requests"}), threshold)
    shown, num_ended = 0.0, 0
    for more in ended:
        num_ended += more
        now = release.publish(num_ended, {"requests": float(num_ended)}).get("requests", 0.0)
        assert now == shown or now - shown >= threshold
        shown = now


def test_a_reader_cannot_change_what_the_next_one_sees() -> None:
    release = CountRelease(threshold=2)
    release.publish(2, {"requests": 2})["requests"] = 0
    assert release.publish(2, {"requests": 2}) == {"requests": 2}


def test_a_threshold_that_hides_nobody_is_refused() -> None:
    with pytest.raises(ValueError, match="fewer than two"):
        CountRelease(threshold=1)


def test_strict_profiles_let_counts_out_and_nothing_else() -> None:
    assert [Policy(profile).counts_only for profile in Profile] == [False, False, True, True]
