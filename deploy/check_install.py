"""What a fresh machine sees, from the built wheel with its run-time dependencies and nothing else.

    python deploy/check_install.py CHECKOUT [STEP ...]      # with the Python of an environment that has the wheel

Steps are modules, verbs, serve and cloud, all of them unless told.
Every module is imported, every verb prints its help, `serve` answers a chat, and the private cloud of `examples/` answers one
through `cloister proxy` and one through the library; then every program of it ends with the script that started it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pkgutil
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, Final

import httpx

START_S: Final = 120.0
CHAT: Final[Mapping[str, Any]] = {
    "model": "cloister-5m",
    "messages": [{"role": "user", "content": "What is the CREATE INDEX command?"}],
    "max_tokens": 12,
}
IMPORT_NAMES: Final = {"scikit_learn": "sklearn", "flashinfer_python": "flashinfer"}
"""Packages that are imported by another name than they are installed by."""
CLOUD_PORT: Final = 9600


class CheckError(Exception):
    """The installation is not what a user may expect; the text says what is wrong."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 when all holds, 1 with the reason when not."""
    given, *chosen = sys.argv[1:] if arguments is None else arguments
    checkout = Path(given).resolve()
    steps: Mapping[str, Callable[[], str]] = {
        "modules": import_modules,
        "verbs": ask_for_help,
        "serve": chat_with_server,
        "cloud": lambda: chat_with_cloud(checkout),
    }
    for name in chosen or steps:
        check = steps[name]
        started_s = time.monotonic()
        try:
            found = check()
        except CheckError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1
        print(f"{name}: {found} ({time.monotonic() - started_s:.0f} s)", flush=True)
    return 0


def import_modules() -> str:
    """Imports every module of the package; one may only lack what an extra brings."""
    import cloister

    extras, lacking, count = extra_modules(), set(), 0
    for module in pkgutil.walk_packages(cloister.__path__, "cloister.", onerror=lambda name: None):
        if module.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            missing = (error.name or "").split(".")[0]
            if missing not in extras:
                raise CheckError(f"{module.name} needs {error.name}, which neither a dependency nor an extra brings") from error
            lacking.add(missing)
        count += 1
    return f"{count} imported; extras would bring {', '.join(sorted(lacking)) or 'nothing'}"


def extra_modules() -> set[str]:
    """Returns the names that packages of extras are imported by."""
    names = set()
    for requirement in distribution("cloister").requires or ():
        is_for_users = "extra ==" in requirement and not requirement.endswith(("'test'", '"test"', "'check'", '"check"'))
        if is_for_users and not requirement.startswith("cloister"):
            name = re.split(r"[^A-Za-z0-9_.-]", requirement)[0].replace("-", "_").lower()
            names.add(IMPORT_NAMES.get(name, name.split("_exporter")[0].split("_sdk")[0]))
    return names


def ask_for_help() -> str:
    """Runs `--help` of every verb and of every verb in a group."""
    from typer.main import get_command
    from typer.testing import CliRunner

    from cloister.cli import VERBS, app

    runner, paths = CliRunner(), [[verb] for verb in VERBS]
    group: Any = get_command(app)
    for verb in VERBS:
        command = group.get_command(None, verb)
        paths += [[verb, name] for name in getattr(command, "commands", {})]
    for path in paths:
        result = runner.invoke(app, [*path, "--help"])
        if result.exit_code != 0:
            raise CheckError(f"cloister {' '.join(path)} --help: {result.exception!r}")
    return f"{len(paths)} helped"


def chat_with_server() -> str:
    """Starts `cloister serve` and asks it something."""
    with running(["cloister", "serve", "--model", "cloister-5m", "--port", str(CLOUD_PORT)]):
        answer = ask(httpx.Client(base_url=f"http://127.0.0.1:{CLOUD_PORT}/v1", timeout=60))
    return f"answers {answer!r}"


def chat_with_cloud(checkout: Path) -> str:
    """Starts the private cloud, asks by proxy and by library, and looks whether it ends."""
    wheel = next(iter(sorted((checkout / "dist").glob("cloister-*.whl"))), None)
    if wheel is None:
        raise CheckError("there is no wheel in dist/ for the release to name: pip wheel --no-deps --wheel-dir dist .")
    with tempfile.TemporaryDirectory() as folder:
        proxy = CLOUD_PORT + 20
        environment = {"WHEEL": str(wheel), "PORT": str(CLOUD_PORT), "PROXY_PORT": str(proxy)}
        with running([str(checkout / "examples" / "private_cloud.sh"), folder], environment):
            by_proxy = ask(httpx.Client(base_url=f"http://127.0.0.1:{proxy}/v1", timeout=60))
            by_library = ask(sealed_client(Path(folder)))
        left = [port for port in (*range(CLOUD_PORT + 1, CLOUD_PORT + 8), proxy) if is_open(port)]
        if left:
            raise CheckError(f"private_cloud.sh was ended, and something still listens on {left}")
    if by_proxy != by_library:
        raise CheckError(f"the proxy answers {by_proxy!r}, the library {by_library!r}")
    return f"answers {by_proxy!r}, and ended"


def sealed_client(folder: Path) -> httpx.Client:
    """The client of README, for nodes that no hardware vouches for."""
    from cloister.client import SealedTransport, Session
    from cloister.trust.attestation import AttestationPolicy

    session = Session(
        f"http://127.0.0.1:{CLOUD_PORT + 7}",
        trust=folder / "trust.json",
        api_key=(folder / "api-key").read_text().strip(),
        policy=AttestationPolicy(accept_software=True),
        state=folder / "log-seen.json",
    )
    return httpx.Client(transport=SealedTransport(session), base_url="https://cloister/v1", timeout=60)


@contextlib.contextmanager
def running(command: Sequence[str], environment: Mapping[str, str] | None = None) -> Iterator[None]:
    """Runs a program in a session of its own, which is ended by SIGTERM and must then end within seconds."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, env={**os.environ, **(environment or {}), "PATH": path}, stdout=log, stderr=log, start_new_session=True
        )
        try:
            yield
        except (CheckError, httpx.HTTPError) as error:
            log.seek(0)
            raise CheckError(f"{error}; it said: {log.read()[-3000:].decode(errors='replace')}") from error
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                raise CheckError(f"{command[0]} did not end within 30 s of SIGTERM") from None


def ask(client: httpx.Client) -> str:
    """Returns an answer, waiting until the server is there."""
    give_up_s = time.monotonic() + START_S
    with client:
        while True:
            try:
                reply = client.post("/chat/completions", json=dict(CHAT, temperature=0.0))
                break
            except httpx.TransportError as error:
                if time.monotonic() > give_up_s:
                    raise CheckError(f"no answer within {START_S:.0f} s ({error!r})") from error
                time.sleep(0.5)
    if reply.status_code != 200:
        raise CheckError(f"status {reply.status_code}: {reply.text[:500]}")
    content: str = reply.json()["choices"][0]["message"]["content"]
    if not content:
        raise CheckError("the answer has no text")
    return content


def is_open(port: int) -> bool:
    """Returns whether somebody listens on a port here."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


if __name__ == "__main__":
    sys.exit(main())
