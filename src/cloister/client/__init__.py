"""The sealed client: draws a node, checks its evidence, seals to it, and sends through the relay.

>>> session = Session("https://relay.example", trust="trust.json", api_key=key)
>>> sealed = httpx.Client(transport=SealedTransport(session))
>>> client = openai.OpenAI(base_url="https://cloister/v1", api_key="-", http_client=sealed)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cloister.client.errors import (
        EpochRefusedError,
        EvidenceRefusedError,
        FinalRefusalError,
        IssuerContradictionError,
        NoAnswerError,
        NoTokensError,
        RelayUnreachableError,
        RepeatedRequestError,
        SealedError,
    )
    from cloister.client.limits import Limits
    from cloister.client.node_selection import MAX_DRAWS, bound_capture
    from cloister.client.session import Session
    from cloister.client.transport import AsyncSealedTransport, SealedTransport

__all__ = [
    "MAX_DRAWS",
    "AsyncSealedTransport",
    "EpochRefusedError",
    "EvidenceRefusedError",
    "FinalRefusalError",
    "IssuerContradictionError",
    "Limits",
    "NoAnswerError",
    "NoTokensError",
    "RelayUnreachableError",
    "RepeatedRequestError",
    "SealedError",
    "SealedTransport",
    "Session",
    "bound_capture",
]

_HOME = {
    "MAX_DRAWS": "node_selection",
    "AsyncSealedTransport": "transport",
    "SealedTransport": "transport",
    "Limits": "limits",
    "Session": "session",
    "bound_capture": "node_selection",
}


def __getattr__(name: str) -> object:
    # lazy: verifying a node needs no transport
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"cloister.client.{_HOME.get(name, 'errors')}"), name)
