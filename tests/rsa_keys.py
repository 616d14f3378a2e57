"""Issuer keys for tests: real RSA keys, drawn once in a process and given to every issuer, since drawing one takes 0.1 s."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from cloister.trust.tokens.blind_rsa import RsaPrivateKey, generate

_drawn: list[RsaPrivateKey] = []


def shared_keys() -> Callable[[int], RsaPrivateKey]:
    """Returns what gives one issuer its keys: each a different one, and the same ones as another issuer's."""
    numbers = count()

    def give(bits: int) -> RsaPrivateKey:
        number = next(numbers)
        if number == len(_drawn):
            _drawn.append(generate(bits))
        return _drawn[number]

    return give
