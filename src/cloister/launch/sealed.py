"""The sealed node: its launch, its processes, and how each of them is hardened."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from cloister.engine.machine import return_free_memory
from cloister.launch.app import describe_start
from cloister.launch.processes import make_engine, start_sealed_module
from cloister.launch.settings import Settings
from cloister.models import locate
from cloister.models.generation import GENERATION_FILE
from cloister.models.location import find_named, locate_here
from cloister.models.pulling.store import MANIFEST
from cloister.trust import hardening
from cloister.types.config import EngineConfig, ServerConfig, parse_adapters, parse_unit_members
from cloister.types.errors import ConfigError
from cloister.types.processes import overwrites

if TYPE_CHECKING:
    from cloister.server.serve import ServerApp

FILES_OF_CARRIED_REQUEST: Final = 6
"""Descriptors that a leader's front holds for one request on another machine: its client, its worker, and for each of the two
engines that compute prompt and answer, one to the worker and a TCP connection."""

BESIDE_FILE: Final = {"drafters": "drafters", "sampling defaults": GENERATION_FILE, "chat template": "chat_template.jinja"}
"""Names of optional files in the folder of a GGUF file, by kind."""


def launch_sealed(settings: Settings, arguments: Sequence[str], config_file: Path | None = None) -> NoReturn:
    """Executes the launcher, which applies the hardening of a sealed node and then runs `cloister` with the given arguments.

    Models are downloaded first, because a sealed node makes no outgoing connections.

    Raises:
        CloisterError: the model cannot be found, or there are several.
    """
    from cloister.private.attesting import read_attesting
    from cloister.trust.hardening.launching import Launch, execute, reading

    if settings.models:
        raise ConfigError("a sealed node serves one model; start a node for each", param="sealed")
    config, front = settings.engine.config, settings.server.config
    secrets = [front.api_keys, front.certfile, front.keyfile, front.gateway_secret]
    files = [*secrets, config.release_prefixes, str(config_file) if config_file is not None else None]
    model = locate(config.model, progress=True)
    files += map(str, manifests(config))
    attesting = read_attesting(front)
    members = parse_unit_members(front.unit_members)
    fit_workers(config, front)
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # a process that forks must have one thread; our kernels do not use BLAS threads
    execute(
        Launch(
            profile=str(config.profile),
            read=reading(
                [model, *loaded_beside(config, model).values(), *attesting.folders],
                [*(Path(file) for file in files if file is not None), *attesting.files],
            ),
            listen=(front.port,) if front.unit_port is None else (front.port, front.unit_port),
            connect=tuple(dict.fromkeys(port for _, port in members)),
            with_engine=True,
            with_attester=attesting.uses_hardware,
            module="cloister.cli",
            arguments=tuple(arguments),
        )
    )


def fit_workers(config: EngineConfig, front: ServerConfig) -> tuple[int, int]:
    """Raises this process's file limit for the workers of a node; child processes inherit it.

    Each engine may have a channel to every worker, and no process of the node can raise its limit later. The front also holds
    the channels to and from other machines.

    Returns:
        The maximum number of concurrent workers, and the number without the file limit.

    Raises:
        ConfigError: the limit is too low for a single worker.
    """
    from cloister.cluster.sealed_unit import count_engines
    from cloister.private.workers.zygote import WAITING_WORKERS
    from cloister.server.serve import raise_file_limit

    is_in_unit = front.unit_members is not None or front.unit_port is not None
    wanted = count_engines(front) * config.max_num_seqs + WAITING_WORKERS
    return raise_file_limit(wanted, FILES_OF_CARRIED_REQUEST if is_in_unit else 1), wanted


def loaded_beside(config: EngineConfig, model: Path) -> dict[str, Path]:
    """Returns the files loaded in addition to the model, by kind: adapters with their names, small models, public text, and the
    drafters, chat template and sampling defaults next to a GGUF file (those in a model's directory are measured with it).
    """
    found = {f"lora {name}": Path(path).expanduser() for name, path in parse_adapters(config.lora or "")}
    found |= {f"draft model {number}": locate(name, progress=True) for number, name in enumerate(_draft_names(config))}
    if config.release_prefixes is not None:
        found["release prefixes"] = Path(config.release_prefixes).expanduser()
    if config.datastore is not None:
        found["datastore"] = Path(config.datastore).expanduser()
    return found | {what: path for what, path in _beside_file(model).items() if path.exists()}


def watched_files(config: EngineConfig, model: Path) -> tuple[list[Path], list[Path]]:
    """Returns all paths that a node may load, including optional ones beside GGUF files that do not exist yet; and the folders
    of these files, in which an optional file could appear or disappear."""
    loaded = [model, *loaded_beside(config, model).values()]
    models = [model, *(locate_here(name) for name in _draft_names(config))]
    beside = [path for file in models for path in _beside_file(file).values()]
    return [*loaded, *beside, *manifests(config)], [file.parent for file in models if file.is_file()]


def _beside_file(model: Path) -> dict[str, Path]:
    """Returns the paths of optional files beside a GGUF file, by kind, whether they exist or not; none for a directory."""
    return {what: model.parent / name for what, name in BESIDE_FILE.items()} if model.is_file() else {}


def manifests(config: EngineConfig) -> list[Path]:
    """Returns the files with which a sealed process resolves names of pulled models. They are not measured; the models that it
    then reads are."""
    pulled = (find_named(name) for name in (config.model, *_draft_names(config)))
    return [path.parent / MANIFEST for path in pulled if path is not None and path.is_file()]


def _draft_names(config: EngineConfig) -> list[str]:
    return [name.strip() for name in (config.draft_model or "").split(",") if name.strip()]


async def open_node(settings: Settings, announce: Callable[[str], None]) -> ServerApp:
    """Starts engine, key service and zygote, and the front, which forwards sealed bytes between them and a gateway."""
    from cloister.cluster.sealed_unit import SealedUnit
    from cloister.private.attesting import check_prefixes, open_announcer, read_attesting
    from cloister.private.peers import read_secret
    from cloister.private.unit.machine import DrainedMachine, open_machine
    from cloister.private.workers.front_app import WORKER_ENTRY, worker_node_app
    from cloister.private.workers.key_service import KeyServiceBoot
    from cloister.private.workers.worker_pool import WorkerPool, start_module
    from cloister.private.workers.zygote import LIFE_MARGIN_S, ZygoteBoot
    from cloister.server.serve import ServerApp
    from cloister.trust.attestation.configuration import describe_settings
    from cloister.trust.attestation.unchanged_files import UnchangedFiles
    from cloister.trust.shape import shape_of
    from cloister.types.events import Ready

    config, front = settings.engine.config, settings.server.config
    gateway_secret = read_secret(Path(front.gateway_secret)) if front.gateway_secret is not None else None
    pool = WorkerPool(start_module if hardening.sealed() is None else start_sealed_module)
    path = locate_here(config.model)
    loaded = UnchangedFiles(*watched_files(config, path))  # before anything is loaded
    machine = open_machine(front, config.request_timeout_s + LIFE_MARGIN_S)

    def keep_listener(index: int, listener: socket.socket) -> None:
        if machine is not None:
            machine.keep_listener(index, listener)
        pool.keep_listener(index, listener)

    engine = make_engine(config, front, keep_listener, loaded.guard_load)
    try:
        await engine.start()
        started_s = time.time()
        ready = Ready(engine.model, engine.memory, list(engine.adapters.loaded.values()), engine.startup)
        paths = [path for path in sys.path if path]
        must_lock = overwrites(config.profile)
        shape = shape_of(settings.policy.profile, drafts=config.speculates)
        await pool.open(KeyServiceBoot(must_lock=must_lock), ZygoteBoot(WORKER_ENTRY, config, front, ready, paths, shape))
        check_prefixes(config.release_prefixes, Path(engine.model.path))
        announcer = await open_announcer(
            read_attesting(front),
            settings.policy.profile,
            Path(engine.model.path),
            pool.unsealer,
            started_s,
            _tell_hardening,
            None if hardening.sealed() is None else start_sealed_module,
            loaded_beside(config, Path(engine.model.path)),
            describe_settings(config, front),
        )
        await loaded.check()  # so the files just measured are those that were loaded
        if not os.path.samefile(engine.model.path, path):
            raise ConfigError("the model's name resolved to other files while this node started; start it again", param="model")
        if machine is not None:
            verifier = announcer.make_verifier(gpu=front.attest_gpus)
            kv_unit = engine.kv_unit if isinstance(engine, SealedUnit) else None
            announcer.join(await machine.join(verifier, partial(pool.keep_listener, is_carried=True), kv_unit))
    except BaseException:
        if machine is not None:
            machine.close()
        pool.close()
        await engine.drain(0.0)
        raise
    return_free_memory()
    # No notice that API keys are missing: a node never learns who sends a request; its gateway takes a token for each.
    for line in describe_start(settings, engine.model, engine.memory, engine.startup, None):
        announce(line)
    announce(f"keys in the key service ({pool.memory}), one worker for each request")
    max_workers, wanted = fit_workers(config, front)
    if max_workers < wanted:
        announce(f"warning: its file limit allows {max_workers} requests at once, not {wanted}; raise it (ulimit -n)")
    app = worker_node_app(
        pool,
        engine.health,
        evidence=announcer.evidence,
        gateway_secret=gateway_secret,
        max_workers=max_workers,
        takes_requests=machine is None or machine.takes_requests,
    )
    announcing = asyncio.create_task(announcer.renew_forever())  # starts after lockdown, which the evidence states

    def close() -> None:
        announcing.cancel()
        if machine is not None:
            machine.close()
        pool.close()

    def find_fault() -> str | None:
        return pool.fault or engine.fault() or announcer.fault or (None if machine is None else machine.fault)

    drained = engine if machine is None else DrainedMachine(machine, engine)
    return ServerApp(app, drained, (), close, find_fault)


def _tell_hardening() -> Mapping[str, str]:
    state = hardening.sealed()
    return {} if state is None else state.statement()
