"""`cloister cluster`: shows, updates and drains the replicas of a running server, and searches for faults that clusters do not
survive."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from cloister.cli.console import check_folder, err, leave, make_folder, make_progress, print_json, print_line, print_table
from cloister.cli.serve import serve
from cloister.types.addresses import check_scheme
from cloister.types.errors import CloisterError, ConfigError
from cloister.types.text_files import read_text_file
from cloister.types.tls_failures import describe_tls_failure

if TYPE_CHECKING:
    from cloister.cluster.virtual.fuzz import SeedTally
    from cloister.cluster.virtual.simulation import RunOutcome

app = typer.Typer(
    help="Start, show, drain and return replicas; search for faults that they do not survive.", no_args_is_help=True
)
BROKEN: Final = 1
LOCAL_URL: Final = "http://127.0.0.1:8000"
TIMEOUT_S: Final = 10.0
DRAIN_TIMEOUT_S: Final = 75.0
"""Longer than the server's own limit of a minute for a drain."""
UPDATE_TIMEOUT_S: Final = 900.0
"""Longest update of one replica. The server's own limit for the start of an engine is ten minutes."""
UPDATE_POLL_S: Final = 0.2
CHECK_TIMEOUT_S: Final = 45.0
"""Longest wait for the reply to an update: the server first reads the tokenizer of the new weights."""
NOT_DRAINED: Final = ("stalled", "suspicious", "slow", "standby", "idle", "running")
"""States that are shown only if the replica is not drained."""
SEEDS: Final = "0..1000"
_SEEDS: Final = re.compile(r"(\d+)\.\.(\d+)")

ServerUrl = Annotated[str, typer.Argument(help=f"Address of the server; {LOCAL_URL} if left out.", metavar="[URL]")]
ApiKeyFile = Annotated[Path | None, typer.Option(help="File that holds an operator's API key.", metavar="FILE")]
ReplicaIndex = Annotated[int, typer.Argument(help="Index of the replica, from 0.", metavar="REPLICA", min=0)]


app.command(
    "up",
    help="Serve a model with several replicas: the same command as `cloister serve`, with the same flags and file. Set "
    "their number with --replicas, or with --min-replicas and --max-replicas, and where they run with --on.",
)(serve)


@app.command()
def status(
    url: ServerUrl = LOCAL_URL,
    api_key_file: ApiKeyFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show role, state and load of each replica of a server."""
    reply = _ask("GET", url, "/v1/replicas", api_key_file)
    if as_json:
        print_json(reply)
        return
    replicas = reply["data"]
    if any(replica["load"] is None for replica in replicas):
        print_line("the server's profile hides the load of its replicas", console=err)
        print_table(url, ("Replica", "Role", "State"), [(each["replica"], each["role"], each["state"]) for each in replicas])
        return
    headers = (
        "Replica",
        "PID",
        "Role",
        "State",
        "Running",
        "Waiting",
        "KV blocks",
        "Routed",
        "Moved here",
        "KV loads",
        "Slowness",
    )
    print_table(url, headers, [_row(replica) for replica in replicas])
    print_line(
        "slowness: how many times as long as the others' a replica's steps of the same size take; 2 or more is slow", "dim"
    )
    _print_update(reply.get("update"))


def _row(replica: dict[str, Any]) -> tuple[object, ...]:
    load = replica["load"]
    blocks = f"{load['num_used_blocks']:,} / {load['num_total_blocks']:,}" if load["num_total_blocks"] else "no step yet"
    now = [
        replica["replica"],
        replica.get("pid") or "-",
        replica["role"],
        replica["state"],
        load["num_running"],
        load["num_waiting"],
        blocks,
    ]
    so_far = [f"{load[name]:,}" for name in ("num_routed", "num_migrated", "num_kv_loads")]
    return (*now, *so_far, f"{load['slowness']:.2f}")


def _print_update(update: dict[str, Any] | None) -> None:
    if update is not None:
        why = f": {update['error']}" if update["error"] else ""
        print_line(
            f"update {update['state'].replace('_', ' ')}, {update['num_updated']} of {update['num_replicas']} replicas{why}"
        )


@app.command()
def update(
    url: ServerUrl = LOCAL_URL,
    api_key_file: ApiKeyFile = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Other weights of the same model, on the server's machine: a name, a directory or a file.", metavar="NAME"
        ),
    ] = None,
) -> None:
    """Replace the engine of every replica, one after another, by one of the version installed now. No request is lost."""
    if model is None:
        found = _ask("POST", url, "/v1/replicas/update", api_key_file)
    else:
        found = _ask("POST", url, "/v1/replicas/update_weights", api_key_file, CHECK_TIMEOUT_S, {"model": model})
    try:
        found = _follow_update(found, url, api_key_file)
    except KeyboardInterrupt:
        print_line("the update continues in the server; `cloister cluster status` shows its progress")
        raise
    if found["state"] != "done":
        leave(f"error: {describe_unfinished(found)}", BROKEN)


def describe_unfinished(found: Mapping[str, Any]) -> str:
    """Returns how far an unfinished update came, and why it stopped, from its report."""
    why = found["error"] or "it has not ended; `cloister cluster status` shows how far it is"
    if not found["num_updated"]:
        return f"no replica has a new engine: {why}"
    return f"{found['num_updated']} of {found['num_replicas']} replicas have a new engine, the others keep theirs: {why}"


def _follow_update(found: dict[str, Any], url: str, api_key_file: Path | None) -> dict[str, Any]:
    """Prints the progress of an update until it ends; returns its last report."""
    give_up_s = time.monotonic() + found["num_replicas"] * UPDATE_TIMEOUT_S
    seen = 0, "running"
    while found["state"] in ("running", "rolling_back") and time.monotonic() < give_up_s:
        time.sleep(UPDATE_POLL_S)
        found = _ask("GET", url, "/v1/replicas", api_key_file)["update"]
        if found["state"] == "rolling_back" != seen[1]:
            print_line(f"the update failed, and the replicas get their old weights back: {found['error']}")
        if found["num_updated"] != seen[0]:
            print_line(f"{found['num_updated']} of {found['num_replicas']} replicas have a new engine")
        seen = found["num_updated"], found["state"]
    return found


@app.command()
def drain(replica: ReplicaIndex, url: ServerUrl = LOCAL_URL, api_key_file: ApiKeyFile = None) -> None:
    """Move the requests of a replica to others, and give it no new ones. Exit status 1 if some are left after a minute."""
    left = _ask("POST", url, f"/v1/replicas/{replica}/drain", api_key_file, DRAIN_TIMEOUT_S)["num_requests"]
    if left:
        leave(
            f"replica {replica} gets no new requests; {left} of its requests are left, because no other replica had room; "
            "they finish where they are",
            BROKEN,
        )
    print_line(f"replica {replica} is drained")


@app.command("return")
def give_back(replica: ReplicaIndex, url: ServerUrl = LOCAL_URL, api_key_file: ApiKeyFile = None) -> None:
    """Give a drained replica requests again."""
    before = _ask("GET", url, "/v1/replicas", api_key_file)["data"]
    _ask("POST", url, f"/v1/replicas/{replica}/return", api_key_file)
    if any(each["replica"] == replica and each["state"] in NOT_DRAINED for each in before):
        print_line(f"replica {replica} was not drained: it gets requests as before")
    else:
        print_line(f"replica {replica} gets requests again")


def _ask(
    method: str,
    url: str,
    path: str,
    api_key_file: Path | None,
    timeout_s: float = TIMEOUT_S,
    body: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Returns the reply of a server.

    Raises:
        ConfigError: no server answers, its certificate is not trusted, it requires a key, or it is a sealed node.
        CloisterError: the server refuses; the message is its own.
    """
    import httpx

    from cloister.private.problems import PROBLEM_MEDIA_TYPE

    address = url.rstrip("/").removesuffix("/v1")
    check_scheme(url, "url", LOCAL_URL)
    key = None if api_key_file is None else read_text_file(api_key_file, param="api_key_file").strip()
    if key is not None and (not key.isascii() or len(key.split()) != 1):
        raise ConfigError(f"{api_key_file} does not hold an API key; write the key into it, on one line", param="api_key_file")
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        reply = httpx.request(method, address + path, headers=headers, timeout=timeout_s, json=body)
    except (httpx.ReadTimeout, httpx.WriteTimeout):  # the connection was accepted, so a server is there
        raise CloisterError(
            f"the server at {url} did not answer within {timeout_s:g} s; it may be busy, so try again in a moment"
        ) from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        why = describe_tls_failure(address, error) or f"no server answers at {url}; start one with `cloister serve`"
        raise ConfigError(why, param="url") from None
    if reply.status_code == httpx.codes.UNAUTHORIZED:
        asks = "asks for an operator's API key; give --api-key-file"
        why = asks if key is None else f"does not know the API key in {api_key_file}"
        how = "an operator's is made by `cloister keys add NAME --operator --file FILE`, with the file of its --api-keys"
        raise ConfigError(f"the server at {url} {why}; {how}", param="api_key_file")
    try:
        answer: dict[str, Any] = reply.json()
        if reply.is_success:
            return answer
        if reply.headers.get("content-type") == PROBLEM_MEDIA_TYPE:  # only a sealed node replies with this type
            raise ConfigError(
                f"{url} is a sealed node, or its gateway or relay; these have no operator's interface, so nobody can list "
                "or drain their engines. GET /health and GET /metrics of the node show how each engine is",
                param="url",
            )
        message = answer["error"]["message"]
    except (ValueError, LookupError, TypeError):
        raise ConfigError(f"{url} did not answer as a Cloister server does; check the address", param="url") from None
    raise CloisterError(message)


@app.command()
def fuzz(
    seeds: Annotated[
        str | None, typer.Option(help=f"Seeds to run, the last one excluded; {SEEDS} if left out.", metavar="A..B")
    ] = None,
    scenario: Annotated[
        Path | None, typer.Option(help="Run this scenario once instead.", metavar="FILE", dir_okay=False)
    ] = None,
    on: Annotated[
        Literal["virtual", "local", "ray"],
        typer.Option(help="Where a scenario runs: in virtual time, or on engine processes of this machine or of its own Ray."),
    ] = "virtual",
    model: Annotated[str, typer.Option(help="Model of engine processes.")] = "cloister-5m",
    skip_impossible: Annotated[
        bool, typer.Option("--skip-impossible", help="Leave out of a scenario what only virtual time can do.")
    ] = False,
    processes: Annotated[int, typer.Option(help="Processes that share the work.", min=1)] = 1,
    output: Annotated[Path, typer.Option(help="Folder for the scenarios that fail.", metavar="DIR")] = Path("fuzz"),
    sealed: Annotated[
        bool,
        typer.Option("--sealed", help="Run seeds of sealed units of several machines, under attack, in place of clusters."),
    ] = False,
) -> None:
    """Run clusters in virtual time, with requests and faults drawn from seeds, and check that every promise is kept.

    A seed that fails is made small and written as a scenario, which `--on local` and `--on ray` run on real engines too, unless
    it is of a sealed unit.
    """
    if sealed and on != "virtual":
        raise ConfigError("sealed units run in virtual time only; leave --on out", param="on")
    if on != "virtual" and scenario is None:
        raise ConfigError(f"--on {on} runs one scenario; name its file with --scenario", param="scenario")
    if on == "virtual" and skip_impossible:
        raise ConfigError("virtual time can do all of a scenario; leave --skip-impossible out, or add --on", param="on")
    if sealed and scenario is not None:
        raise ConfigError("a scenario file says whether it is of a sealed unit; leave --sealed out", param="sealed")
    if seeds is not None and scenario is not None:
        raise ConfigError("a scenario file contains its seed; leave --seeds out", param="seeds")
    if scenario is None:
        check_folder(output)
    logging.disable(logging.CRITICAL)  # thousands of engines are killed, and each would log it
    try:
        if scenario is not None and on != "virtual":
            _run_on_processes(scenario, on, model, skip_impossible)
        elif scenario is not None:
            _run_scenario(scenario)
        else:
            _run_seeds(seeds or SEEDS, processes, output, _open_search(is_sealed=sealed))
    finally:
        logging.disable(logging.NOTSET)


def _run_scenario(path: Path) -> None:
    from cloister.cluster.virtual.fuzz import replay
    from cloister.cluster.virtual.scenario_files import read_scenario
    from cloister.private.virtual import fuzz as unit_fuzzer

    if unit_fuzzer.has_unit_scenario(path):
        _report_run(path, unit_fuzzer.replay_unit(unit_fuzzer.read_unit_scenario(path)))
    else:
        _report_run(path, replay(read_scenario(path)))


def _run_on_processes(path: Path, on: Literal["local", "ray"], model: str, skips: bool) -> None:
    from cloister.cluster.virtual.scenario_files import read_scenario
    from cloister.launch.scenario import find_impossible, run_on_processes, without_impossible
    from cloister.private.virtual.fuzz import has_unit_scenario

    if has_unit_scenario(path):
        raise ConfigError("a scenario of a sealed unit runs in virtual time only; leave --on out", param="on")
    found = read_scenario(path)
    if skips and (impossible := find_impossible(found, on)):
        print_line(f"left out because only virtual time can do it: {', '.join(impossible)}")
        found = without_impossible(found, on)
    _report_run(path, run_on_processes(found, on, model))


def _report_run(path: Path, outcome: RunOutcome) -> None:
    print_line(f"{outcome.num_requests} requests, {outcome.num_tokens} tokens; faults: {_list_faults(outcome.faults)}")
    for violation in outcome.violations:
        print_line(violation)
    if outcome.violations:
        leave(f"{path} broke a promise", BROKEN)
    print_line(f"{path} kept every promise", "green")


def _list_faults(faults: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(faults.items())) or "none"


@dataclass(frozen=True, slots=True)
class _SeedSearch:
    """Functions that draw, run, replay and shrink one kind of scenario."""

    draw: Callable[[int], Any]
    run_seed: Callable[[int], RunOutcome]
    replay: Callable[[Any], RunOutcome]
    shrink: Callable[[Any, Callable[[Any], bool]], Any]


def _open_search(*, is_sealed: bool) -> _SeedSearch:
    if is_sealed:
        from cloister.private.virtual import fuzz as unit_fuzzer
        from cloister.private.virtual.scenario import draw_unit_scenario

        return _SeedSearch(draw_unit_scenario, unit_fuzzer.run_unit_seed, unit_fuzzer.replay_unit, unit_fuzzer.shrink_unit)
    from cloister.cluster.virtual import fuzz as fuzzer
    from cloister.cluster.virtual.shrinking import shrink

    return _SeedSearch(fuzzer.scenario_of, fuzzer.run_seed, fuzzer.replay, shrink)


def _run_seeds(seeds: str, processes: int, output: Path, search: _SeedSearch) -> None:
    from cloister.cluster.virtual.scenario_files import write_scenario

    tally = _search(range(*_read_seeds(seeds)), processes, search.run_seed)
    print_line(_describe(tally))
    for seed in tally.failing:
        make_folder(output)
        path = output / f"{seed}.json"
        found = search.draw(seed)
        write_scenario(found, path)
        with err.status(f"making seed {seed} smaller"):
            found = search.shrink(found, lambda smaller: bool(search.replay(smaller).violations))
        write_scenario(found, path)
        print_line(f"seed {seed}: {search.replay(found).violations[0]}; run it with --scenario {path}")
    if tally.failing:
        leave(f"{len(tally.failing)} seeds broke a promise", BROKEN)
    print_line("every promise was kept", "green")


def _describe(tally: SeedTally) -> str:
    faults = _list_faults(tally.faults)
    return f"{tally.num_seeds} seeds, {tally.num_requests} requests, {tally.num_tokens} tokens; faults: {faults}"


def _read_seeds(seeds: str) -> tuple[int, int]:
    found = _SEEDS.fullmatch(seeds)
    first, last = (int(found[1]), int(found[2])) if found else (0, 0)
    if first >= last:
        raise ConfigError(
            f"--seeds {seeds} is not a range of seeds; give the first seed and the one after the last, such as 0..1000",
            param="seeds",
        )
    return first, last


def _search(seeds: range, num_processes: int, run: Callable[[int], RunOutcome]) -> SeedTally:
    from cloister.cluster.virtual import fuzz as fuzzer

    total = fuzzer.SeedTally()
    try:
        with make_progress() as progress:
            task = progress.add_task("seeds", total=len(seeds))
            for tally in fuzzer.search(seeds, num_processes, run):
                total.add(tally)
                progress.update(task, advance=tally.num_seeds, description=f"seeds, {len(total.failing)} failing")
    except KeyboardInterrupt:
        failing = ", ".join(map(str, total.failing)) or "none"
        print_line(f"so far {_describe(total)}; seeds that broke a promise: {failing}")
        raise
    return total
