"""`cloister issuer`: issues tokens to holders of API keys."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from cloister.cli.keys import DEFAULT_FILE
from cloister.types.errors import ConfigError

DEFAULT_STATE = Path("~/.local/state/cloister/issuer")


def issuer(
    url: Annotated[str, typer.Option(help="Its public URL, such as https://issuer.example.", metavar="URL")],
    key: Annotated[
        Path, typer.Option(help="Its signer key, known to clients (`cloister log key --role issuer`).", metavar="FILE")
    ],
    state: Annotated[Path, typer.Option(help="Directory of its keys and counts.", metavar="DIR")] = DEFAULT_STATE,
    api_keys: Annotated[Path, typer.Option(help="File of API keys (`cloister keys`).", metavar="FILE")] = DEFAULT_FILE,
    token_budget: Annotated[
        int, typer.Option(help="Output tokens that one blind token of a new key pays for.", min=1, max=999_999_999)
    ] = 4096,
    tokens_per_epoch: Annotated[int, typer.Option(help="Tokens that one API key may have in seven days.", min=1)] = 1000,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at; 0 picks a free one.", min=0, max=65535)] = 8003,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain, PEM.", metavar="FILE")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key, PEM.", metavar="FILE")] = None,
    accept_keys: Annotated[
        int | None,
        typer.Option(
            help="Continue with a directory that lacks the key of this week, the newest that is due, because this issuer did"
            " not run and has shown no such key.",
            metavar="WEEK",
            min=1,
        ),
    ] = None,
    show_keys: Annotated[
        bool, typer.Option("--show-keys", help="Print the keys for the epoch file and a gateway, and exit.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="File that --show-keys writes to, whole or not at all.", metavar="FILE")
    ] = None,
) -> None:
    """Issue tokens to holders of API keys, without being able to trace them.

    Keys sign for seven days. --show-keys prints the public ones as JSON: `token_key` as in the epoch file, the period in which
    it signs, when its tokens expire, their budget, and the signature of --key. --out replaces a file
    only when there are keys to write, whereas `> FILE` empties it first. Clients buy through the relay, sealed to a key that
    only this process has, so run a single issuer.
    """
    from cloister.engine.machine import read_machine
    from cloister.policy import read_credentials
    from cloister.private.issuer import format_keys, issuer_app
    from cloister.private.program import run_program
    from cloister.private.upstream import check_url
    from cloister.server.serve import address_of, bind
    from cloister.trust.tokens import Issuer, IssuerLimits, KeyShelf, QuotaBook
    from cloister.trust.transparency.files import read_key, write_whole

    if out is not None and not show_keys:
        raise ConfigError("--out is where --show-keys writes to: give both, or leave it out", param="out")
    if (tls_cert is None) != (tls_key is None):
        raise ConfigError("a certificate and its key go together: give --tls-cert and --tls-key", param="tls_cert")
    url, identity = check_url(url, "url"), read_key(key)
    state = state.expanduser()
    shelf = KeyShelf(state / "keys", budget=token_budget)
    if shelf.check_current(time.time(), accept_keys):
        made = f"a new key for week {accept_keys} is made; clients that saw another one cannot buy tokens for eight days"
        typer.echo(f"warning: {made}: --accept-keys", err=True)
    if show_keys:
        shown = format_keys(shelf.turn(time.time()), url, identity)
        if out is None:
            typer.echo(shown, nl=False)
        else:
            write_whole(out.expanduser(), shown)
        return
    read_credentials(api_keys)  # report an unreadable file now, not to the first client
    limits = IssuerLimits(tokens_per_epoch)
    book = QuotaBook(state / "issued.db")
    program = Issuer(shelf, book, lambda: read_credentials(api_keys), limits, now=time.time)
    program.current_keys()
    listener = bind(host, port)
    typer.echo(f"Issuer at {address_of(listener, has_tls=tls_cert is not None)}, for clients {url}")
    app = issuer_app(program, url, identity, num_cpus=read_machine().num_cpus)
    try:
        status = run_program(app, listener, tls_cert=tls_cert, tls_key=tls_key)
    finally:
        book.close()
    raise typer.Exit(status)
