"""`cloister relay`: forwards sealed requests to one gateway, and token purchases to one issuer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cloister.types.errors import ConfigError


def relay(
    gateway: Annotated[str, typer.Option(help="URL of the gateway, such as https://gateway.example.", metavar="URL")],
    secret_file: Annotated[
        Path, typer.Option(help="File with the secret that authenticates this relay to the gateway.", metavar="FILE")
    ],
    issuer: Annotated[
        str,
        typer.Option(help="URL of the issuer, such as https://issuer.example; empty refuses purchases.", metavar="URL"),
    ] = "",
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at; 0 picks a free one.", min=0, max=65535)] = 8001,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain, PEM.", metavar="FILE")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key, PEM.", metavar="FILE")] = None,
    gateway_ca: Annotated[
        Path | None,
        typer.Option(help="Certificate authorities for the gateway's TLS, PEM; unset, those of this system.", metavar="FILE"),
    ] = None,
    issuer_ca: Annotated[
        Path | None,
        typer.Option(help="Certificate authorities for the issuer's TLS, PEM; unset, those of this system.", metavar="FILE"),
    ] = None,
    answer_timeout_s: Annotated[
        float, typer.Option(help="Read timeout of an answer, in seconds; longer than the gateway's.", min=1)
    ] = 630.0,
) -> None:
    """Forward sealed requests to a gateway, and sealed purchases to an issuer, until SIGTERM or Ctrl-C.

    A relay sees the addresses of clients and the lengths of their requests, and cannot open them. Its operator must not be the
    gateway's: together they would know which client uses which node.
    """
    from cloister.private.peers import read_secret
    from cloister.private.program import run_program
    from cloister.private.relay import ISSUER_TIMEOUT_S, RelayConfig, relay_app
    from cloister.private.upstream import Upstream, check_url, trust_only
    from cloister.server.serve import address_of, bind
    from cloister.types.logs import set_up_logging

    if (tls_cert is None) != (tls_key is None):
        raise ConfigError("a certificate and its key go together: give --tls-cert and --tls-key", param="tls_cert")
    url = check_url(gateway, "gateway")
    secret = read_secret(secret_file)
    config = RelayConfig(url, secret, issuer_url=check_url(issuer, "issuer") if issuer else "")
    upstream = Upstream("gateway", tls=trust_only(gateway_ca), timeout_s=answer_timeout_s)
    purchases = Upstream("issuer", tls=trust_only(issuer_ca), timeout_s=ISSUER_TIMEOUT_S) if issuer else None
    set_up_logging("text")
    listener = bind(host, port)
    also = f" and the issuer at {config.issuer_url}" if issuer else "; it carries no purchases of tokens (--issuer)"
    typer.echo(f"Relay at {address_of(listener, has_tls=tls_cert is not None)}, for the gateway at {url}{also}")
    raise typer.Exit(run_program(relay_app(config, upstream, purchases), listener, tls_cert=tls_cert, tls_key=tls_key))
