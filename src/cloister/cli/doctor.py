"""`cloister doctor`: checks what works on this machine, and advises on what does not."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from cloister.backends.availability import INSTALL_TORCH
from cloister.backends.native import describe_missing_kernels
from cloister.cli.console import err, out, print_json
from cloister.types.errors import OUT_OF_MEMORY, CloisterError, MemoryBudgetError, lacks_memory

CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "avx_vnni", "amx_tile", "asimd", "sve")
COMPILERS = ("c++", "g++", "clang++")
INSTALL_AGAIN = (
    "in the clone `make clean install`, or there, with this environment's pip, `pip install --force-reinstall --no-deps "
    "--no-cache-dir .` (not by the name cloister, which is another project's on the package index)"
)
ALL_SETS = "`pip install --config-settings=cmake.define.CLOISTER_ISA=all .`"
HUB_TIMEOUT_S = 3.0
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check.

    Attributes:
        essential: without it Cloister cannot serve at all.
        advice: what to do if it is not good.
    """

    name: str
    good: bool
    detail: str
    advice: str = ""
    essential: bool = True


def doctor(
    port: Annotated[int, typer.Option(help="Port that the server would listen on.", min=1, max=65535)] = 8000,
    model: Annotated[str | None, typer.Option(help="Model that the server would load; unset, the default of `serve`.")] = None,
    hub: Annotated[bool, typer.Option(help="Check whether the model hub answers.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check what works on this machine, and what to do about what does not. Exits with 1 if something essential fails."""
    checks: list[Check] = []
    with err.status("Looking"):
        try:
            checks.extend(examine(port, model, hub))
        except (MemoryError, ImportError, OSError, MemoryBudgetError) as error:
            if not lacks_memory(error):
                raise
            checks.append(Check("memory", False, _describe_memory(), OUT_OF_MEMORY))
    failed = [check for check in checks if check.essential and not check.good]
    if as_json:
        print_json({"good": not failed, "checks": [asdict(check) for check in checks]})
    else:
        _print_checks(checks)
    raise typer.Exit(1 if failed else 0)


def examine(port: int, model: str | None, hub: bool) -> Iterator[Check]:
    """Yields every check, in the order in which they build on each other."""
    yield check_python()
    chosen = chosen_backend()
    yield check_kernels(chosen == "native")
    yield check_features()
    yield check_cpus()
    yield check_hardening()
    yield check_port(port)
    name = model or served_model()
    if is_pullable(name):
        yield check_download(name)
        yield check_memory(None)
    else:
        opened = check_model(name)
        yield opened
        yield check_memory(name if opened.good else None)
    yield check_torch(chosen == "torch")  # after the memory check: importing torch takes much memory in this process
    yield check_cache()
    if hub:
        yield check_hub()


def _describe_memory() -> str:
    """Describes the available memory. There may be too little even to measure it."""
    try:
        from cloister.engine.machine import read_machine

        machine = read_machine()
    except (MemoryError, ImportError, OSError):
        return "not enough for the other checks"
    return f"{machine.available_bytes // MIB} of {machine.memory_bytes // MIB} MiB available, by the {machine.limited_by}"


def check_python() -> Check:
    version = platform.python_version()
    return Check("Python", sys.version_info >= (3, 11), f"{version} at {sys.executable}", "install Python 3.11 or newer")


def chosen_backend() -> str:
    """The back end that `serve` would use here."""
    from cloister.launch import resolve_settings
    from cloister.launch.backend_choice import chosen_backend as choose

    return choose(resolve_settings().engine.config)


def check_kernels(needed: bool, find: Callable[[], tuple[Sequence[str], Sequence[str]]] | None = None) -> Check:
    """Checks which native kernels were compiled, which this CPU can run, and whether it could run better ones.

    Args:
        find: returns the compiled instruction sets, and those that this CPU supports, best first.
    """
    try:
        compiled, runnable = (find or _find_kernels)()
    except ModuleNotFoundError:
        has_compiler = any(shutil.which(name) for name in COMPILERS)
        detail = "not compiled" + ("" if has_compiler else ": there is no C++ compiler")
        advice = INSTALL_AGAIN if has_compiler else f"install a C++ compiler (Debian: apt install g++), then {INSTALL_AGAIN}"
        return Check("native kernels", False, detail, advice, essential=needed)
    except ImportError as error:
        if lacks_memory(error):
            raise
        return Check("native kernels", False, f"they cannot be loaded: {error}", INSTALL_AGAIN, essential=needed)
    names = [name for name in runnable if name in compiled]
    if (missing := describe_missing_kernels(compiled, runnable)) is not None:
        advice = f"install again on this machine: {INSTALL_AGAIN}; or, for every CPU, {ALL_SETS}"
        return Check("native kernels", False, missing, advice, essential=False)
    return Check("native kernels", True, f"{names[0]}, the best of {', '.join(names)}", essential=needed)


def _find_kernels() -> tuple[Sequence[str], Sequence[str]]:
    from importlib import import_module

    module = import_module("cloister.backends.native._native")
    return module.compiled_names(), module.runnable_names()


def check_torch(needed: bool, describe: Callable[[], str] | None = None) -> Check:
    """Checks whether torch is installed. Needed by a GPU, a machine without native kernels, and models those do not compute."""
    try:
        detail = (describe or _describe_torch)()
    except (ImportError, OSError) as error:
        if needed and lacks_memory(error):
            raise
        why = "not installed" if isinstance(error, ModuleNotFoundError) else f"it cannot be loaded ({type(error).__name__})"
        advice = f"get the native kernels, or `{INSTALL_TORCH}`; a GPU needs the latter"
        detail = why if needed else f"{why}; only encoders, images, a GPU and a few families need it"
        return Check("torch", not needed, detail, advice, essential=needed)
    return Check("torch", True, detail, essential=needed)


def _describe_torch() -> str:
    from cloister.backends.torch.backend import describe_torch

    return describe_torch()


def check_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> Check:
    """Checks the CPU's vector instructions; without any it works, but slowly."""
    try:
        words = set(cpuinfo.read_text().split())
    except OSError:
        return Check("CPU", True, platform.machine() or "unknown", essential=False)
    found = [name for name in CPU_FEATURES if name in words]
    detail = f"{platform.machine()} with {', '.join(found) or 'no vector instructions that we know'}"
    return Check("CPU", bool(found), detail, "expect slow answers, or use a CPU with AVX2 or newer", essential=False)


def check_cpus() -> Check:
    """Checks the number of CPUs, as limited by the cgroup."""
    from cloister.engine.machine import read_machine

    return Check("CPUs", True, f"{read_machine().num_cpus} of the host's {os.cpu_count() or 1} may be used", essential=False)


def check_hardening() -> Check:
    """Checks the hardening measures available to a sealed node. Only `serve --sealed` needs them."""
    from cloister.trust.hardening import probe

    results = list(probe())
    missing = [result for result in results if not result.applied]
    if not missing:
        return Check(
            "sealed node",
            True,
            f"all {len(results)} hardening measures that can be tried in advance work",
            essential=False,
        )
    detail = "; ".join(f"{result.measure}: {result.detail}" for result in missing)
    return Check("sealed node", False, detail, "; ".join(result.remedy for result in missing), essential=False)


def check_port(port: int) -> Check:
    """Checks whether the port is free on the loopback address."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            free = port + 1 if port < 65535 else 8000
            advice = f"stop what listens there, or serve with --port {free}"
            return Check("port", False, f"{port}: {error.strerror}", advice, essential=False)
    return Check("port", True, f"{port} is free")


def served_model() -> str:
    """The default model of `serve` on this machine."""
    from cloister.launch import resolve_settings
    from cloister.launch.default_model import choose_default_model

    return choose_default_model(resolve_settings(), lambda _: None, may_pull=False).engine.config.model


def is_pullable(name: str) -> bool:
    """Whether it is a model of the catalogue that is not on this machine."""
    from cloister.models.location import find_named
    from cloister.models.pulling import CATALOGUE

    return name in CATALOGUE and find_named(name) is None and not Path(name).exists()


def check_download(name: str) -> Check:
    """Describes how a missing model will be downloaded; downloads nothing itself."""
    from cloister.models.pulling import CATALOGUE

    model = CATALOGUE[name]
    who = f"`cloister pull {name}`" if model.terms_url else "`serve`"
    when = "" if model.terms_url else " at its first start"
    return Check("model", True, f"{name} is not here yet; {who} downloads it{when} ({model.download_bytes / 1e6:.0f} MB)")


def check_model(name: str) -> Check:
    """Opens the model and checks every tensor's shape, without computing anything."""
    from cloister.models import load, locate

    try:
        model = load(locate(name))
    except MemoryBudgetError:
        raise
    except CloisterError as error:
        return Check("model", False, name, error.message)
    drafts = sorted(path.name for path in (model.path / "drafters").glob("*/"))
    made = f"; made to draft for it: {', '.join(drafts)}" if drafts else ""
    detail = f"{model.info.name}, {model.info.max_model_len} positions, {model.info.vocab_size} tokens{made}"
    return Check("model", True, detail)


def check_memory(name: str | None) -> Check:
    """Checks whether a back end computes the model, and whether it fits into the available memory, as `serve` does.

    The memory is what host, cgroup and process limits leave.

    Args:
        name: name of a model that can be opened; None reports only the available memory.
    """
    from cloister.launch import budget_model, resolve_settings
    from cloister.models import load, locate

    detail = _describe_memory()
    if name is None:
        return Check("memory", True, detail)
    try:
        config = resolve_settings({"model": name}).engine.config
        budget = budget_model(config, load(locate(name)))
    except MemoryBudgetError as error:
        return Check("memory", False, detail, error.message)
    except CloisterError as error:
        return Check("back end", False, f"{name} is not computed", error.message)
    return Check("memory", True, f"{detail}; {name} takes {budget.total_bytes // MIB}")


def check_cache(directory: Path | None = None) -> Check:
    """Checks whether packed weights can be cached. Without a cache every start packs them again."""
    from cloister.types.config import EngineConfig

    advice = "make it writable and free space, or name another directory with --weights-cache"
    directory = directory or Path(os.path.expanduser(EngineConfig().weights_cache))
    there = next(path for path in (directory, *directory.parents) if path.exists())
    good = there.is_dir() and os.access(there, os.W_OK | os.X_OK) and directory.is_absolute()
    detail = str(directory) if good else f"{directory} cannot be written"
    return Check("weights cache", good, detail, advice, essential=False)


def check_hub(reach: Callable[[], str] | None = None) -> Check:
    """Checks whether the model hub answers. Only models that are not downloaded yet need it."""
    advice = "models in directories and embedded models work without the hub; set HTTPS_PROXY if you use a proxy"
    try:
        detail = (reach or _reach_hub)()
    except OSError as error:
        return Check("model hub", False, f"not reachable ({type(error).__name__})", advice, essential=False)
    return Check("model hub", True, detail, essential=False)


def _reach_hub() -> str:
    """Returns a description of the server that answered; raises OSError if there was none."""
    import httpx
    from huggingface_hub.constants import ENDPOINT

    try:
        httpx.head(ENDPOINT, timeout=HUB_TIMEOUT_S)
    except httpx.HTTPError as error:
        raise ConnectionError(type(error).__name__) from None
    return f"{ENDPOINT} answers"


def _print_checks(checks: list[Check]) -> None:
    table = Table(title="Cloister on this machine", title_justify="left", title_style="bold", header_style="bold")
    for header in ("", "what", "found", "what to do"):
        table.add_column(header, overflow="fold")
    for check in checks:
        mark = "[green]ok[/]" if check.good else "[red]fails[/]" if check.essential else "[yellow]warning[/]"
        table.add_row(mark, check.name, escape(check.detail), "" if check.good else escape(check.advice))
    out.print(table)
