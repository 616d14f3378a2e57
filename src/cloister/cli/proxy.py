"""`cloister proxy`: a local OpenAI endpoint that verifies nodes and seals requests for other programs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cloister.cli.options import LEAST_PRESENT, MOST_SHARE, AcceptMaskedChips, AcceptMembership, LeastPresent, MostShare
from cloister.types.errors import ConfigError
from cloister.types.text_files import read_text_file

if TYPE_CHECKING:
    from cloister.client import Session


def proxy(
    relay: Annotated[str, typer.Option(help="URL of the relay.", metavar="URL")],
    trust: Annotated[Path, typer.Option(help="Trust file: keys of log, witnesses and releases.", metavar="FILE")],
    api_key_file: Annotated[
        Path, typer.Option(help="File with the API key for the issuer; `-` reads standard input.", metavar="FILE")
    ],
    policy: Annotated[
        Path | None,
        typer.Option(help="Requirements for nodes, JSON; unset ones are taken from the log.", metavar="FILE"),
    ] = None,
    accept_software: Annotated[
        bool, typer.Option("--accept-software", help="Send to nodes without hardware attestation: NOT PROVED.")
    ] = False,
    receipts: Annotated[
        Path | None,
        typer.Option(help="Folder for receipts of all answers; unset, none is requested.", metavar="FOLDER"),
    ] = None,
    buy_directly: Annotated[
        bool, typer.Option("--buy-directly", help="Buy tokens directly from the issuer: it sees your address and API key.")
    ] = False,
    state: Annotated[
        Path | None,
        typer.Option(help="View of the log, kept between runs; unset, in ~/.local/state/cloister.", metavar="FILE"),
    ] = None,
    remember: Annotated[
        bool, typer.Option(help="Keep the view of the log; else each start sees the cloud as if for the first time.")
    ] = True,
    size_class: Annotated[
        str | None,
        typer.Option(
            help="Pad all requests to a size class, which images need: small, medium or large; unset, each to its own size.",
            metavar="NAME",
        ),
    ] = None,
    least_present: LeastPresent = LEAST_PRESENT,
    most_share: MostShare = MOST_SHARE,
    accept_membership: AcceptMembership = 0,
    accept_masked_chips: AcceptMaskedChips = False,
    host: Annotated[str, typer.Option(help="Loopback address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at; 0 picks a free one.", min=0, max=65535)] = 8080,
) -> None:
    """Serve the OpenAI API on this machine: every request is sealed to a randomly drawn, verified node.

    It prints what was verified at every new epoch, and nothing about any request. Any client of its port can spend its tokens,
    so it listens on loopback only.
    """
    from cloister.client import Limits, Session
    from cloister.client.receipts import ReceiptFolder
    from cloister.policy import is_loopback
    from cloister.trust.attestation import AttestationPolicy
    from cloister.trust.attestation.policy_file import read_policy, with_demands

    if not is_loopback(host):
        raise ConfigError("the proxy listens on loopback only; give --host 127.0.0.1 or ::1", param="host")
    wanted = with_demands(AttestationPolicy() if policy is None else read_policy(policy), accept_software=accept_software)
    keep = None if receipts is None else ReceiptFolder(receipts)
    session = Session(
        relay,
        trust=trust,
        api_key=read_api_key(api_key_file),
        policy=wanted,
        limits=Limits(
            least_present=least_present,
            most_share=most_share,
            accept_membership=accept_membership,
            accept_masked_chips=accept_masked_chips,
        ),
        state=state,
        remember=remember,
        receipts=keep,
        buys_directly=buy_directly,
        size_class=size_class,
    )
    raise typer.Exit(_serve(session, host, port))


def read_api_key(path: Path) -> str:
    """Reads an API key from a file, or from standard input for `-`; never from the command line, which others can read.

    Raises:
        ConfigError: the file cannot be read, or is empty.
    """
    is_typed = str(path) == "-"
    key = typer.get_text_stream("stdin").readline() if is_typed else read_text_file(path, param="api_key_file")
    if not key.strip():
        raise ConfigError(f"there is no API key in {path}; make one with: cloister keys add NAME", param="api_key_file")
    return key.strip()


def _serve(session: Session, host: str, port: int) -> int:
    from cloister.client import AsyncSealedTransport
    from cloister.client.proxy import Proxy, describe_refusal, proxy_app
    from cloister.private.program import run_program
    from cloister.server.serve import address_of, bind

    async def verify() -> None:
        transport = AsyncSealedTransport(session)
        try:
            await Proxy(session, transport, typer.echo).verify()
        finally:
            await transport.aclose()

    listener = bind(host, port)
    asyncio.run(verify())
    typer.echo(f"Serving on {address_of(listener)}")
    if (refusal := describe_refusal(session)) is not None:
        typer.echo(refusal)
    proxy = Proxy(session, AsyncSealedTransport(session), typer.echo)
    return run_program(proxy_app(proxy), listener)
