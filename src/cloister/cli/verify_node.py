"""`cloister verify node`: verifies a node and prints every step."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from cloister.cli.console import leave, print_json, print_line
from cloister.cli.options import LEAST_PRESENT, MOST_SHARE, AcceptMaskedChips, AcceptMembership, LeastPresent, MostShare
from cloister.types.errors import CloisterError, ConfigError

if TYPE_CHECKING:
    from cloister.client.limits import Limits
    from cloister.client.verify_node import Checked
    from cloister.trust.attestation import Findings

REFUSED: Final = 1
CANNOT_CHECK: Final = 2


def node(
    url: Annotated[str, typer.Argument(help="Address of a relay, a gateway or a node.")],
    trust: Annotated[Path | None, typer.Option(help="Trust file: keys of log, witnesses and releases.", metavar="FILE")] = None,
    policy: Annotated[
        Path | None, typer.Option(help="Requirements, JSON; unset ones are taken from the log.", metavar="FILE")
    ] = None,
    profile: Annotated[str | None, typer.Option(help="Privacy profile required of a single node.")] = None,
    state: Annotated[
        Path | None, typer.Option(help="View of the log, kept between runs; unset, nothing is kept.", metavar="FILE")
    ] = None,
    accept_software: Annotated[
        bool, typer.Option("--accept-software", help="Accept nodes without hardware attestation: NOT PROVED.")
    ] = False,
    least_present: LeastPresent = LEAST_PRESENT,
    most_share: MostShare = MOST_SHARE,
    accept_membership: AcceptMembership = 0,
    accept_masked_chips: AcceptMaskedChips = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Verify nodes before anything is sent to them, and print every step.

    Exit status 0: nothing is refused (what is not proved is said); 1: a client would refuse; 2: it could not be checked.
    """
    from cloister.client.limits import Limits
    from cloister.client.verify_node import cannot_check

    try:
        limits = Limits(
            least_present=least_present,
            most_share=most_share,
            accept_membership=accept_membership,
            accept_masked_chips=accept_masked_chips,
        )
        checked = _check(url, trust, policy, profile, state, accept_software, limits)
    except CloisterError as error:
        leave(f"could not check: {error.message}", CANNOT_CHECK)
    if as_json:
        print_json(_to_data(checked))
    else:
        _print(url, checked)
    if cannot_check(checked):
        raise typer.Exit(CANNOT_CHECK)
    raise typer.Exit(0 if checked.accepted else REFUSED)


def _check(
    url: str,
    trust: Path | None,
    policy: Path | None,
    profile: str | None,
    state: Path | None,
    accept_software: bool,
    limits: Limits,
) -> Checked:
    import httpx

    from cloister.client.shared_view import MOST_TRIES
    from cloister.client.verify_node import check_url, fetch_from
    from cloister.trust.attestation import AttestationPolicy
    from cloister.trust.attestation.policy_file import read_policy, with_demands
    from cloister.trust.transparency.checks import Memory, View
    from cloister.trust.transparency.trust import read_trust

    wanted = with_demands(
        AttestationPolicy() if policy is None else read_policy(policy), profile=profile, accept_software=accept_software
    )
    memory = None if state is None else Memory(state)
    believed = None if trust is None else read_trust(trust.expanduser())
    with httpx.Client(follow_redirects=False) as client:
        for _ in range(MOST_TRIES):
            view = View() if memory is None else memory.load()
            checked = check_url(fetch_from(url, client), believed, wanted, view, time.time(), limits)
            if memory is None or checked.view is None or memory.save(checked.view, view):
                return checked
    raise ConfigError(f"other programs keep changing {state}; give --state another file", param="state")


def _print(url: str, checked: Checked) -> None:
    print_line(f"{url}")
    print_steps(checked.epoch)
    for node_id, findings in checked.nodes.items():
        print_line(f"\nnode {node_id[:16]}")
        print_steps(findings)
    if not checked.accepted:
        print_line("\nREFUSED: a client would send nothing", "bold red")
    elif checked.proved:
        print_line("\nPROVED: every requirement", "bold green")
    else:
        print_line("\nNOT PROVED in full: a client would send; unproved steps are listed above", "bold yellow")


def print_steps(findings: Findings) -> None:
    """Prints every step with its outcome."""
    from cloister.trust.attestation import Outcome

    marks = {
        Outcome.PROVED: ("proved     ", "green"),
        Outcome.NOT_PROVED: ("not proved ", "yellow"),
        Outcome.FAILED: ("REFUSED    ", "bold red"),
    }
    for step in findings:
        word, style = marks[step.outcome]
        print_line(f"  {word} {step.text.removeprefix('NOT PROVED: ')}", style)  # `word` already says it


def _to_data(checked: Checked) -> dict[str, object]:
    return {
        "accepted": checked.accepted,
        "proved": checked.proved,
        "epoch": steps_to_data(checked.epoch),
        "nodes": {node_id: steps_to_data(findings) for node_id, findings in checked.nodes.items()},
    }


def steps_to_data(findings: Findings) -> list[dict[str, str]]:
    """Returns the steps for `--json`."""
    return [{"step": step.slug, "outcome": step.outcome.value, "text": step.text} for step in findings]
