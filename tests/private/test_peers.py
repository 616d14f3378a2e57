"""How gateways know relays and nodes know gateways: one check of one header."""

from __future__ import annotations

import pytest

from cloister.private.peers import check_gateway, check_peer
from cloister.private.problems import ProblemError

SECRETS = ("a" * 32, "b" * 32)


def showing(*values: bytes) -> dict[str, object]:
    return {"type": "http", "headers": [(b"authorization", value) for value in values]}


@pytest.mark.parametrize("value", [b"Bearer " + b"a" * 32, b"bearer   " + b"b" * 32 + b" "])
def test_who_shows_one_of_the_secrets_is_known(value: bytes) -> None:
    check_peer(showing(value), SECRETS, "no")


@pytest.mark.parametrize(
    "values",
    [(), (b"",), (b"Bearer",), (b"Bearer " + b"a" * 31,), (b"Basic " + b"a" * 32,), (b"a" * 32,), (b"Bearer \xff\x00",),
     (b"Bearer " + b"a" * 32, b"Bearer " + b"a" * 32)],
)  # fmt: skip
def test_who_shows_none_is_told_which_scheme_is_asked_for(values: tuple[bytes, ...]) -> None:
    with pytest.raises(ProblemError, match="relays only") as refused:
        check_peer(showing(*values), SECRETS, "This gateway takes requests of its relays only.")
    assert (refused.value.status, refused.value.fields) == (401, ((b"www-authenticate", b"Bearer"),))


def test_a_node_without_a_secret_takes_requests_of_everybody() -> None:
    check_gateway(showing(), None)
    with pytest.raises(ProblemError, match="gateway only"):
        check_gateway(showing(), SECRETS[0])
