"""`cloister witness`: cosigns the checkpoints of logs that only grow."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from cloister.types.errors import ConfigError

app = typer.Typer(help="Witness the checkpoints of logs.", no_args_is_help=True)

Key = Annotated[Path, typer.Option(help="The witness's signer key (`cloister log key --role witness`).", metavar="FILE")]
Logs = Annotated[list[str], typer.Option("--log", help="Verifier key of a log to witness.", metavar="KEY")]
State = Annotated[Path, typer.Option(help="Directory of the last cosigned checkpoints; needed to detect rollbacks.")]
DEFAULT_STATE = Path("~/.local/state/cloister/witness")


@app.callback()
def witness() -> None:
    """Cosign checkpoints of logs that only grow. Three witnesses that do not trust each other keep a log honest."""


@app.command()
def serve(
    key: Key,
    log: Logs,
    state: State = DEFAULT_STATE,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at; 0 picks a free one.", min=0, max=65535)] = 8004,
) -> None:
    """Answer `POST /add-checkpoint` (C2SP tlog-witness). For TLS put a proxy in front: nothing here is secret."""
    from cloister.private.program import run_program
    from cloister.private.witness import witness_app
    from cloister.server.serve import address_of, bind
    from cloister.trust.transparency.files import read_key
    from cloister.trust.transparency.note import PublicKey
    from cloister.trust.transparency.witness import Witness

    served = Witness(state.expanduser(), read_key(key), map(PublicKey.parse, log))
    listener = bind(host, port)
    typer.echo(f"Witness {served.key} at {address_of(listener, has_tls=False)}")
    raise typer.Exit(run_program(witness_app(served), listener))


@app.command()
def cosign(
    directory: Annotated[Path, typer.Argument(help="A copy of the log's directory.", metavar="DIR")],
    key: Key,
    log: Annotated[str, typer.Option(help="The log's verifier key.", metavar="KEY")],
    state: State = DEFAULT_STATE,
) -> None:
    """Cosign the newest checkpoint of a copy of a log once, by its tiles, and print the signature line."""
    from cloister.trust.transparency.files import read_key
    from cloister.trust.transparency.note import PublicKey
    from cloister.trust.transparency.tiles import LogReader
    from cloister.trust.transparency.witness import Witness, encode_request

    public = PublicKey.parse(log)
    reader = LogReader(directory, public)
    judge = Witness(state.expanduser(), read_key(key), [public])
    checkpoint, note = reader.checkpoint()
    known = judge.known(public).size
    if known > checkpoint.size:
        raise ConfigError(
            f"this copy has {checkpoint.size} entries, and {known} were cosigned before; it is old, or rolled back"
        )
    answer = judge.add_checkpoint(encode_request(known, reader.prove_consistency(known, checkpoint.size), note), time.time())
    if answer.status != 200:
        raise ConfigError(
            f"not cosigned: {answer.body.strip()}. This log does not extend what was cosigned; keep both as proof"
        )
    typer.echo(answer.body, nl=False)
