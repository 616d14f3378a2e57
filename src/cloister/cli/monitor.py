"""`cloister monitor`: replays a deployment's log and reports what is wrong with it; suited to cron."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from cloister.cli.console import leave, print_json, print_line
from cloister.cli.witnesses import find_witnesses
from cloister.types.errors import CloisterError

if TYPE_CHECKING:
    import httpx

    from cloister.client.monitoring import Monitor, Report
    from cloister.trust.transparency.trust import Trust

FAULT: Final = 1
CANNOT_CHECK: Final = 2
STATE_FOLDER: Final = Path("~/.local/state/cloister/monitor")
MOST_NOTE_BYTES: Final = 1 << 18


def monitor(
    url: Annotated[str, typer.Argument(help="Address of a relay or a gateway.")],
    trust: Annotated[Path, typer.Option(help="Trust file: keys of log, witnesses and releases.", metavar="FILE")],
    peer: Annotated[
        list[str] | None,
        typer.Option(help="Compare with another monitor's checkpoint, or another relay's epoch; URL or file.", metavar="URL"),
    ] = None,
    witness: Annotated[
        list[str] | None, typer.Option(help="Ask a witness of the trust file whether it knows this log.", metavar="NAME=URL")
    ] = None,
    publish: Annotated[
        Path | None, typer.Option(help="Write the verified checkpoint, for others' --peer.", metavar="FILE")
    ] = None,
    state: Annotated[
        Path | None, typer.Option(help="State file between runs; unset, in ~/.local/state/cloister.", metavar="FILE")
    ] = None,
    from_start: Annotated[bool, typer.Option("--from-start", help="Read the log from its first entry again.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print faults only, so that cron reports only those.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Replay the log: membership, capacities, keys, cadence and releases; compare with what others were shown.

    A run reads the entries since the last one. Exit status 0: no fault; 1: a fault, which an honest operator never causes; 2:
    it could not be checked. Each fault is reported once, but an inconsistency until the state is removed.
    """
    try:
        report = _run(url, trust, peer or [], witness or [], state, publish, from_start)
    except CloisterError as error:
        leave(f"could not check: {error.message}", CANNOT_CHECK)
    _print(report, quiet, as_json)
    raise typer.Exit(FAULT if report.faults else 0)


def _run(
    url: str,
    trust_file: Path,
    peers: list[str],
    witnesses: list[str],
    state_file: Path | None,
    publish: Path | None,
    from_start: bool,
) -> Report:
    import httpx

    from cloister.client.monitoring import CONSISTENCY, Monitor, MonitorState, load_state, save_state
    from cloister.client.shared_view import state_name
    from cloister.client.verify_node import fetch_from
    from cloister.trust.transparency.files import write_whole
    from cloister.trust.transparency.trust import read_trust

    trust = read_trust(trust_file.expanduser())
    path = state_file or STATE_FOLDER / state_name(trust.log)
    remembered = load_state(path)
    with httpx.Client(follow_redirects=False, timeout=30.0) as client:
        # Peers first: a peer that was shown more than the relay shows later was shown another log.
        notes = {peer: _fetch_note(peer, client) for peer in peers}
        watching = Monitor(fetch_from(url, client), trust)
        report = watching.run(MonitorState() if from_start else remembered, time.time())
        if from_start and remembered.checkpoint:
            notes["this monitor's own state"] = remembered.checkpoint
        for who, note in notes.items():
            _compare(watching, report, who, note)
        if report.note and witnesses:
            asyncio.run(_ask_witnesses(watching, report, witnesses, trust))
    if not any(fault.kind == CONSISTENCY for fault in report.faults):
        save_state(path, report.state)
        if publish is not None and report.note:
            write_whole(publish.expanduser(), report.note.encode())
    return report


def _compare(watching: Monitor, report: Report, who: str, note: str | None) -> None:
    from cloister.trust.transparency.replay import Remark

    if note is None:
        report.remarks.append(Remark("gossip", f"{who} cannot be reached, so nothing was compared with it", False))
    else:
        watching.compare(report, who, note)


def _fetch_note(peer: str, client: httpx.Client) -> str | None:
    import httpx

    from cloister.client.monitoring import read_note

    if not peer.startswith(("http://", "https://")):
        try:
            return read_note(Path(peer).expanduser().read_bytes()[:MOST_NOTE_BYTES])
        except OSError:
            return None
    try:
        with client.stream("GET", peer) as answer:
            content = b""
            for piece in answer.iter_bytes():
                content += piece
                if len(content) > MOST_NOTE_BYTES:
                    return None
        return read_note(content) if answer.status_code == httpx.codes.OK else None
    except (httpx.HTTPError, httpx.InvalidURL):
        return None


async def _ask_witnesses(watching: Monitor, report: Report, witnesses: list[str], trust: Trust) -> None:
    import httpx

    from cloister.client.monitoring import CONSISTENCY
    from cloister.trust.transparency.note import Note, parse_note
    from cloister.trust.transparency.refusal import TransparencyError
    from cloister.trust.transparency.replay import Remark
    from cloister.trust.transparency.witness import SplitViewError

    note = parse_note(report.note)
    signed = Note(note.text, tuple(line for line in note.signatures if line.is_by(trust.log)))
    async with httpx.AsyncClient(trust_env=False) as client:
        for witness in find_witnesses(witnesses, trust, client):
            try:
                await witness.cosign(watching, signed)
            except SplitViewError as error:
                report.blame(CONSISTENCY, f"{error.message}; ask its operator for the checkpoint that it cosigned", report.note)
            except TransparencyError as error:
                report.remarks.append(Remark("gossip", error.message, False))


def _print(report: Report, quiet: bool, as_json: bool) -> None:
    if as_json:
        remarks = [{"kind": one.kind, "fault": one.is_fault, "text": one.text} for one in report.remarks]
        print_json({"size": report.state.size, "remarks": remarks, "proofs": report.proofs})
        return
    for remark in report.remarks:
        if remark.is_fault:
            print_line(f"FAULT {remark.kind}: {remark.text}", "bold red")
        elif not quiet:
            print_line(f"{remark.kind}: {remark.text}")
    for proof in report.proofs:
        print_line(f"\n{proof}")
    if not quiet and not report.faults:
        course = report.state.course
        told = ", ".join(
            f"{count} {one if count == 1 else many}"
            for count, one, many in ((report.state.size, "entry", "entries"), (course.epoch, "epoch", "epochs"))
        )
        print_line(f"{told}: nothing is wrong", "green")
