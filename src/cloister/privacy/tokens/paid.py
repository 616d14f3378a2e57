"""What a token pays for, as client and gateway tell a node, each by itself. Pure: no I/O, no clock.

The client seals the number that the issuer signed; the gateway sends its own beside the sealed request. A node that finds two
numbers refuses, so a gateway cannot have one node answer less than another.
"""

from __future__ import annotations

from typing import Final

from cloister.privacy.sealing import Fields, HttpRequest, RequestHead, find_field

BUDGET_FIELD: Final = "cloister-token-budget"
"""How many output tokens were paid for; the same for every token of an issuer's key."""
_DIGITS: Final = 9
_SEALED: Final = BUDGET_FIELD.encode()


def with_budget(request: HttpRequest, budget: int | None) -> HttpRequest:
    """Returns the request with its budget, in as many digits whatever it is, so that no length tells it.

    Args:
        budget: output tokens, below 10^9; None adds none.
    """
    if budget is None:
        return request
    head = request.head
    fields = (*head.fields, (_SEALED, b"%0*d" % (_DIGITS, budget)))
    return HttpRequest(RequestHead(head.method, head.scheme, head.authority, head.path, fields), request.content)


def parse_budget(value: str | None) -> int | None:
    """Returns the number that a field says; None where there is none, or none that is a budget."""
    value = value or ""
    return int(value) if value.isascii() and value.isdigit() and len(value) <= _DIGITS else None


def differs(fields: Fields, budget: int | None) -> bool:
    """Returns whether a sealed request names another budget than this one; one that names none takes what it is given.

    Args:
        fields: of the sealed request.
        budget: as the gateway says it; None where it says none.

    Raises:
        MessageError: the field is there more than once.
    """
    sealed = find_field(fields, _SEALED)
    return sealed is not None and (budget is None or parse_budget(sealed) != budget)
