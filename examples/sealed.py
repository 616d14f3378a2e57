"""A first sealed request: `python examples/sealed.py --relay URL --trust trust.json --api-key-file FILE ["A question"]`.

Prints what was verified before anything was sent, then the answer as it is written, then which node it was. Trust file and API
key come from the people who run the cloud, and not over the relay; `examples/private_cloud.sh` makes one on your machine.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import httpx

try:
    from openai import OpenAI
except ModuleNotFoundError:
    sys.exit("error: this example needs the package openai; install it with: pip install openai")

from cloister.client import SealedError, SealedTransport, Session
from cloister.client.proxy import tell_epoch
from cloister.trust.attestation import AttestationPolicy


def main() -> None:
    """Verifies, asks, prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", nargs="?", default="What is a decorator in Python?")
    parser.add_argument("--relay", default="http://127.0.0.1:9007")
    parser.add_argument("--trust", type=Path, required=True)
    parser.add_argument("--api-key-file", type=Path, required=True)
    parser.add_argument("--accept-software", action="store_true", help="also send to nodes that no hardware vouches for")
    given = parser.parse_args()

    session = Session(
        given.relay,
        trust=given.trust,
        api_key=given.api_key_file.read_text().strip(),
        policy=AttestationPolicy(accept_software=given.accept_software),
    )
    transport = SealedTransport(session)
    # The host of base_url means nothing: the session knows the relay, and a node is drawn for each request.
    sealed: Any = httpx.Client(transport=transport)  # newer openai packages name httpx2 in their types, and take both
    with OpenAI(base_url="https://cloister/v1", api_key="-", http_client=sealed) as client:
        try:
            session.give_back(transport.prepare())  # what the first request would do anyway
            print(*tell_epoch(session), sep="\n", end="\n\n")
            model = client.models.list().data[0].id
            reply = client.chat.completions.with_raw_response.create(
                model=model, messages=[{"role": "user", "content": given.question}], max_tokens=100, stream=True
            )
            for chunk in reply.parse():
                print(chunk.choices[0].delta.content or "" if chunk.choices else "", end="", flush=True)
        except SealedError as error:
            raise SystemExit(f"{type(error).__name__}: {error.message}") from None
    about = reply.http_response.extensions["cloister"]
    print(f"\n\nanswered by node {about['drawn'][-1][:16]} of epoch {about['epoch']}, after {len(about['drawn'])} draw(s)")


if __name__ == "__main__":
    main()
