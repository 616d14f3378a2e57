"""`cloister gateway`: accepts sealed requests with a token each from relays, and forwards them to the chosen nodes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cloister.types.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from cloister.private.epochs import EpochKeeper, EpochSettings
    from cloister.private.nodes import NodeBook
    from cloister.private.unsealing import LocalUnsealer
    from cloister.trust.tokens import SpendStore
    from cloister.trust.transparency.epoch import IssuerEntry
    from cloister.trust.transparency.log import Log


def gateway(
    url: Annotated[str, typer.Option(help="Its public URL, such as https://gateway.example.", metavar="URL")],
    node: Annotated[list[str], typer.Option(help="URL of a node; repeat for each node.", metavar="URL")],
    relay_secrets: Annotated[Path, typer.Option(help="File with the secret of each relay, one a line.", metavar="FILE")],
    issuer_keys: Annotated[
        Path,
        typer.Option(help="File that `cloister issuer --show-keys` wrote; it is read again when it changes.", metavar="FILE"),
    ],
    spend_store: Annotated[
        str, typer.Option(help="Store of spent tokens: sqlite:///FILE, postgresql://... or redis://...", metavar="URL")
    ],
    accept_store: Annotated[
        int | None,
        typer.Option(
            help="Continue with a spend store that has not seen this epoch, the log's newest, because the newer store is lost."
            " Tokens that were spent since then can be spent once more.",
            metavar="EPOCH",
            min=1,
        ),
    ] = None,
    node_secret: Annotated[
        Path | None, typer.Option(help="File with the secret that authenticates this gateway to the nodes.", metavar="FILE")
    ] = None,
    log: Annotated[Path | None, typer.Option(help="Directory of the log; the epochs go into it.", metavar="DIR")] = None,
    log_key: Annotated[Path | None, typer.Option(help="File of the log's signer key.", metavar="FILE")] = None,
    trust: Annotated[Path | None, typer.Option(help="Trust file, the one that clients have.", metavar="FILE")] = None,
    witness: Annotated[
        list[str] | None, typer.Option(help="A witness of the trust file, as NAME=URL; repeat for each.", metavar="NAME=URL")
    ] = None,
    release: Annotated[str | None, typer.Option(help="Digest of the release that nodes run, hex.", metavar="HEX")] = None,
    profile: Annotated[str, typer.Option(help="Profile that nodes run under.")] = "private",
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at; 0 picks a free one.", min=0, max=65535)] = 8002,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain, PEM.", metavar="FILE")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key, PEM.", metavar="FILE")] = None,
    node_ca: Annotated[
        Path | None,
        typer.Option(help="Certificate authorities for the nodes' TLS, PEM; unset, those of this system.", metavar="FILE"),
    ] = None,
    answer_timeout_s: Annotated[float, typer.Option(help="Read timeout of an answer, in seconds.", min=1)] = 600.0,
) -> None:
    """Forward sealed requests to nodes, each for a token, until SIGTERM or Ctrl-C.

    A gateway learns the node of a request, but neither the client nor the content. With a log it publishes the epoch file:
    --log, --log-key, --trust, --release and as many --witness as the trust file requires. Its keys live for 24 hours, in memory
    only: after a restart it publishes a new epoch.
    """
    from cloister.private.gateway import GatewayConfig, gateway_app
    from cloister.private.http_io import REPLAY_WINDOW_S
    from cloister.private.issuer import accept_keys, check_signed, list_issuers, read_issuer_keys
    from cloister.private.nodes import NodeBook
    from cloister.private.peers import read_secret, read_secrets
    from cloister.private.program import run_program
    from cloister.private.serving import Lifespan
    from cloister.private.unsealing import LocalUnsealer
    from cloister.private.upstream import Upstream, check_url, trust_only
    from cloister.server.reload import Reloader, WatchedFiles
    from cloister.server.serve import address_of, bind
    from cloister.trust.sealing import GATEWAY_KEY_LIFE_S, GATEWAY_KEY_OVERLAP_S, KeyRing, Receiver, ReplayCache
    from cloister.trust.tokens import Expiry, Redeemer, open_spend_store
    from cloister.trust.transparency.trust import read_trust
    from cloister.types.logs import set_up_logging

    if (tls_cert is None) != (tls_key is None):
        raise ConfigError("a certificate and its key go together: give --tls-cert and --tls-key", param="tls_cert")
    url = check_url(url, "url")
    upstream = Upstream("node", tls=trust_only(node_ca), timeout_s=answer_timeout_s)
    book = NodeBook([check_url(one, "node") for one in node], upstream)
    believed = read_trust(trust).issuer if trust is not None else None
    shown = read_issuer_keys(issuer_keys)
    check_signed(shown, believed, time.time())
    store = open_spend_store(spend_store)
    redeemer = Redeemer(accept_keys(shown, url), store, time.time)
    expiry = Expiry(store, time.time, time.monotonic)

    def read_keys_again() -> None:
        nonlocal shown
        keys = read_issuer_keys(issuer_keys)
        check_signed(keys, believed, time.time())
        redeemer.change_keys(accept_keys(keys, url))
        shown = keys

    ring = KeyRing(time.monotonic(), life_s=GATEWAY_KEY_LIFE_S, overlap_s=GATEWAY_KEY_OVERLAP_S)
    unsealer = LocalUnsealer(Receiver(ring, ReplayCache(REPLAY_WINDOW_S)))
    keeper: EpochKeeper | None = None
    if log is not None:
        from cloister.private.epochs import EpochSettings

        if log_key is None or trust is None or release is None:
            raise ConfigError("a log needs --log-key, --trust and --release too", param="log")
        settings = EpochSettings(url, release, profile)
        keeper = _open_keeper(
            settings,
            _open_log(log, log_key, trust, store, accept_store),
            trust,
            witness or [],
            unsealer,
            book,
            lambda: list_issuers(shown, time.time()),
            store,
        )
    config = GatewayConfig(url, read_secrets(relay_secrets), read_secret(node_secret) if node_secret is not None else None)
    reloader = Reloader([WatchedFiles("issuer keys", (issuer_keys,), read_keys_again)])
    background = [book.look_forever, unsealer.turn_forever, reloader.watch, expiry.run_forever]
    background += [keeper.renew_forever] if keeper else []
    app = gateway_app(config, unsealer, redeemer, book, upstream, Lifespan(upstream, *background), keeper)
    set_up_logging("text")
    listener = bind(host, port)
    what = "with a log of epochs" if keeper else "without a log: it publishes no epoch"
    typer.echo(f"Gateway at {address_of(listener, has_tls=tls_cert is not None)}, for clients {url}, {what}")
    try:
        status = run_program(app, listener, tls_cert=tls_cert, tls_key=tls_key)
    finally:
        store.close()
    raise typer.Exit(status)


def _open_log(directory: Path, key_file: Path, trust_file: Path, store: SpendStore, accepted: int | None) -> Log:
    """Opens the log of a gateway whose spend store has seen its newest epoch.

    Raises:
        ConfigError: the store has not seen it, and `accepted` is not the number of that epoch.
    """
    from cloister.trust.tokens import check_epoch
    from cloister.trust.transparency.files import read_key
    from cloister.trust.transparency.history import History
    from cloister.trust.transparency.log import Log
    from cloister.trust.transparency.trust import read_trust

    log = Log(directory, read_key(key_file))
    history = History(log, read_trust(trust_file).releases)
    history.advance(log.checkpoint()[0].size)
    newest = history.epoch.epoch if history.epoch else 0
    try:
        check_epoch(store, log.key.name, newest, newest)
    except ConfigError:
        if accepted != newest:
            raise
        store.note_epoch(log.key.name, 0, newest)
        typer.echo(f"warning: tokens that were spent before epoch {newest} may be spent once more: --accept-store", err=True)
    return log


def _open_keeper(
    settings: EpochSettings,
    log: Log,
    trust_file: Path,
    witnesses: list[str],
    unsealer: LocalUnsealer,
    book: NodeBook,
    issuers: Callable[[], tuple[IssuerEntry, ...]],
    store: SpendStore,
) -> EpochKeeper:
    import httpx

    from cloister.cli.witnesses import open_witnesses
    from cloister.private.epochs import EpochKeeper
    from cloister.trust.tokens import check_epoch
    from cloister.trust.transparency.publisher import Publisher
    from cloister.trust.transparency.trust import read_trust
    from cloister.trust.transparency.witness import DEADLINE_S

    trust = read_trust(trust_file)
    cosigners = open_witnesses(witnesses, trust, httpx.AsyncClient(timeout=DEADLINE_S, trust_env=False))

    def before_epoch(number: int) -> None:
        check_epoch(store, log.key.name, number - 1, number)

    publisher = Publisher(log, trust, cosigners, before_epoch, keeps_pace=True)
    return EpochKeeper(settings, publisher, unsealer, book, issuers, log.directory)
