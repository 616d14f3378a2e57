"""The date of a sealed request, which says that it is no old one sent again (RFC 9458, section 6.5). Pure."""

from __future__ import annotations

from email.utils import formatdate, parsedate_to_datetime
from typing import Final

from cloister.privacy.sealing import Fields, find_field
from cloister.sealed.problems import DATE_TYPE, ProblemError

DATE_WINDOW_S: Final = 300.0
"""By how much a request's date may differ from the receiver's clock, either way."""
REPLAY_WINDOW_S: Final = 2 * DATE_WINDOW_S
"""How long a request can be accepted, hence is remembered: dated ahead by a window, sent again up to the other end."""


def check_date(fields: Fields, now_s: float, *, is_needed: bool) -> None:
    """Checks the date among a request's fields.

    Args:
        now_s: Unix seconds.
        is_needed: whether a request without a date is refused.

    Raises:
        ProblemError: it is outside of the window; the refusal carries the receiver's date, for one try with that.
        MessageError: there are several.
    """
    given = find_field(fields, b"date")
    if given is None and not is_needed:
        return
    date_s = _parse(given or "")
    if date_s is None or abs(now_s - date_s) > DATE_WINDOW_S:
        own = formatdate(now_s, usegmt=True).encode()
        raise ProblemError(400, "date field in request outside of acceptable range", kind=DATE_TYPE, fields=((b"date", own),))


def _parse(value: str) -> float | None:
    try:
        return parsedate_to_datetime(value).timestamp()
    except (ValueError, TypeError, OverflowError):
        return None
