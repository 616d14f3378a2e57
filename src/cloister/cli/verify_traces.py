"""`cloister verify traces`: tests whether a node keeps residue of requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from cloister.cli.console import leave, print_json, print_line
from cloister.cli.options import GivenSettings, with_settings
from cloister.trust.residue.scan import describe, to_data
from cloister.types.config import EngineConfig
from cloister.types.errors import CloisterError, ConfigError
from cloister.types.processes import overwrites

if TYPE_CHECKING:
    from cloister.client.residue_audit.node import Path
    from cloister.client.residue_audit.trial import TraceVerdict
    from cloister.trust.residue.needles import Needle

CANNOT_TEST = 2
_NUM_BLOCKS = 16
SPARE_TOKENS = 100


@with_settings(EngineConfig, config_file=False)
def traces(
    settings: GivenSettings,
    requests: Annotated[int, typer.Option(min=1, help="Marked requests to send.")] = 1000,
    direct: Annotated[bool, typer.Option("--direct", help="Leave out issuer, relay and gateway.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Start a node, send it marked requests, and search its memory and files for them.

    Exit status 0: nothing was found; 1: residue was found; 2: it could not be tested. It needs the right to trace other
    processes (root, or CAP_SYS_PTRACE), which a node grants to nobody: this is for users who can inspect the machine.
    """
    from cloister.client.residue_audit.trial import try_node
    from cloister.text import Tokenizer
    from cloister.trust.residue.needles import MarkMaker

    try:
        config, rows, model_path = _prepare(settings)
        maker = MarkMaker(Tokenizer(model_path))
        # Pass the model by name: otherwise `serve` would use its own default, and compute other rows.
        path = _start(str(config.profile), {**settings.flags, "model": config.model}, requests, direct)
        try:
            verdict = asyncio.run(try_node(path, maker, requests, rows))
        finally:
            path.stop()
    except (CloisterError, OSError, ValueError, TimeoutError) as error:
        leave(f"could not test: {error}", CANNOT_TEST)
    _print(verdict, as_json)
    raise typer.Exit(verdict.exit_code)


def _prepare(settings: GivenSettings) -> tuple[EngineConfig, Callable[[Sequence[int], int], list[Needle]], str]:
    """Returns the settings of the node's engine, a function that recomputes its rows, and the path of its model."""
    from cloister.backends.native.program import NativeProgram
    from cloister.launch import build_program, resolve_settings
    from cloister.models import locate
    from cloister.trust.residue.needles import rows_of

    if "profile" not in settings.flags:
        raise ConfigError("say which profile to test: --profile open, team, private or paranoid", param="profile")
    is_sealed = overwrites(str(settings.flags["profile"]))  # as in `_start`
    config = resolve_settings({**settings.flags, "sealed": is_sealed}).engine.config
    program = build_program(config, _NUM_BLOCKS)
    if not isinstance(program, NativeProgram):
        raise ConfigError("K/V rows can be computed again on the native back end only; leave `backend` out", param="backend")

    def rows(token_ids: Sequence[int], owner: int) -> list[Needle]:
        return list(rows_of(program, program, token_ids, config.block_size, owner))

    return config, rows, str(locate(config.model))


def _start(profile: str, flags: Mapping[str, object], num_requests: int, direct: bool) -> Path:
    """Starts the whole path to a sealed node if the profile requires one, else a server."""
    from cloister.client.residue_audit.cloud import Cloud
    from cloister.client.residue_audit.node import SealedNode, ServeProgram

    arguments = [part for name, value in flags.items() if name != "profile" for part in _as_flag(name, value)]
    if not overwrites(profile):
        return ServeProgram(profile, arguments)
    return SealedNode(profile, arguments) if direct else Cloud(profile, arguments, num_tokens=num_requests + SPARE_TOKENS)


def _as_flag(name: str, value: object) -> list[str]:
    kebab = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{'' if value else 'no-'}{kebab}"]
    return [f"--{kebab}", str(value)]


def _print(verdict: TraceVerdict, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "exit_code": verdict.exit_code,
                "requests": dict(verdict.sent.by_shape),
                "needles": verdict.num_needles,
                "during": to_data(verdict.during.searched, verdict.during.roles, verdict.shapes),
                "after": to_data(verdict.after.searched, verdict.after.roles, verdict.shapes),
                "ended_processes": [str(process) for process in verdict.after.ended],
                "obstacles": verdict.obstacles,
            }
        )
        return
    sent = verdict.sent.by_shape
    print_line(f"{sum(sent.values())} marked requests of {len(sent)} kinds, {verdict.num_needles} needles")
    for title, looked in (("While requests ran", verdict.during), ("One second after the last answer", verdict.after)):
        print_line(f"\n{title} ({looked.elapsed_s:.1f} s):")
        for line in describe(looked.searched, looked.roles, verdict.shapes):
            print_line(line)
    print_line(f"{len(verdict.after.ended)} processes ended before the search" + (":" if verdict.after.ended else ""))
    for process in verdict.after.ended[:20]:
        print_line(f"    {str(process)[:100]}")
    for obstacle in verdict.obstacles:
        print_line(f"could not test: {obstacle}")
    words = {0: "nothing was found", 1: f"{verdict.after.num_finds} finds: this node keeps what it was sent", 2: "not tested"}
    print_line(f"\n{words[verdict.exit_code]}")
