"""Builds a server from the settings and runs it until it is stopped."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from cloister.launch.app import build_gate, open_model_switcher, open_plain
from cloister.launch.processes import close_front
from cloister.launch.settings import Settings
from cloister.policy import is_loopback
from cloister.types.config import ServerConfig
from cloister.types.logs import set_up_logging
from cloister.types.refusals import Refusals

if TYPE_CHECKING:
    from cloister.server.serve import ServerApp

READABLE: Final = (
    "warning: without TLS, keys, prompts and answers cross the network readable; add --certfile and --keyfile, or put a proxy "
    "with TLS in front"
)
UNPROVED: Final = (
    "warning: --attester software proves nothing: this machine's owner can read what the node is sent, and clients refuse it "
    "unless they accept it with --accept-software; on confidential hardware start it with --attester sev-snp or tdx"
)


def is_unproved(config: ServerConfig) -> bool:
    """Whether the server is a sealed node without hardware attestation."""
    if not config.sealed:
        return False
    from cloister.trust.attestation.software import SoftwareAttester

    return config.attester == SoftwareAttester.kind


def is_readable_on_the_way(config: ServerConfig) -> bool:
    """Whether the network can read requests: no TLS, not loopback, not sealed."""
    return config.certfile is None and not config.sealed and not is_loopback(config.host)


def _warn(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def serve(settings: Settings, announce: Callable[[str], None] = print, warn: Callable[[str], None] = _warn) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit status.

    Args:
        announce: called with each line about the started server and its memory.
        warn: called with each warning about an unsafe configuration.

    Raises:
        CloisterError: a setting cannot be used or the model does not fit; the message says what to do.
    """
    from cloister.server.serve import serve as run_server

    with Refusals() as refusals:
        if settings.server.config.sealed:
            from cloister.private.attesting import read_attesting

            with refusals.collect():
                read_attesting(settings.server.config)
        if settings.server.config.otlp_endpoint is not None:
            from cloister.server.traces import check_endpoint

            with refusals.collect():  # now, not after a model was loaded for minutes
                check_endpoint(settings.server.config.otlp_endpoint)
        gate = build_gate(settings)
    set_up_logging(settings.server.config.log_format)
    if is_readable_on_the_way(settings.server.config):
        warn(READABLE)
    if is_unproved(settings.server.config):
        warn(UNPROVED)

    async def open_and_lock_down() -> ServerApp:
        if settings.models:
            server_app = await open_model_switcher(settings, gate, announce)
        elif settings.server.config.sealed:
            from cloister.launch.sealed import open_node

            server_app = await open_node(settings, announce)
        else:
            server_app = await open_plain(settings, gate, announce)
        close_front()
        return server_app

    return run_server(settings.server.config, open_and_lock_down, announce)
