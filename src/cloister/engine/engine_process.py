"""The engine process: `python -m cloister.engine.engine_process FD`, where FD is its end of a socket pair.

It lives exactly as long as its front: it ends when the socket does, and the kernel ends it when the parent dies. Terminal
signals are handled by the front, which decides when to drain.
"""

from __future__ import annotations

import faulthandler
import importlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from cloister.engine import channel
from cloister.engine.channel import InputQueue
from cloister.engine.core import EngineCore
from cloister.engine.kv_pool import PoolSeat
from cloister.engine.kv_sockets import KVSocketLinks
from cloister.engine.kv_transports import KVTransport
from cloister.engine.kv_unit import NUM_DESCRIPTORS, SEALED, UnitSeat
from cloister.engine.machine import freeze_gc_heap, pause_gc
from cloister.engine.sealed_channels import SealedChannels
from cloister.engine.supervision import STACKS_SIGNAL
from cloister.types.config import EngineConfig
from cloister.types.errors import OUT_OF_MEMORY, CloisterError, ConfigError, EngineError, MemoryBudgetError, lacks_memory
from cloister.types.events import EngineMessage, Failed, Outputs, Ready
from cloister.types.logs import describe, set_up_logging
from cloister.types.processes import end_with_parent, lower_priority, name_process

SEND_TIMEOUT_S: Final = 60.0
"""A front that reads nothing for this long is considered dead."""
NICENESS: Final = 5
"""Niceness of the threads that compute: they get a third of the front's share of a core that both want. The front needs little,
and each request and token passes through it."""

_logger = logging.getLogger("cloister.engine.engine_process")  # it runs as `__main__`, whose messages no log shows

CoreFactory = Callable[[EngineConfig], EngineCore]
Send = Callable[[EngineMessage], None]


def main(fd: int) -> int:
    """Builds and runs the engine that the front requests; returns the exit status."""
    pause_gc()
    ignore_terminal()
    end_with_parent()  # covers what _listen cannot: a thread that never releases the interpreter lock
    name_process("engine")
    faulthandler.enable()  # prints code locations, no values
    return serve(socket.socket(fileno=fd), build)


def serve(sock: socket.socket, make_core: Callable[[channel.Boot, Send], EngineCore | None]) -> int:
    """Runs an engine as the front at the other end of `sock` requests it; returns the exit status.

    Args:
        make_core: returns the engine for the front's boot message; None if there is none, after it sent the front why.
    """
    sock.set_inheritable(False)
    sock.settimeout(SEND_TIMEOUT_S)
    frame, descriptors = channel.receive_boot(sock)
    if frame is None:
        return 0
    boot = channel.decode_boot(frame)
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    kv_pool = None if boot.kv_pool is None else (descriptors.pop(), boot.kv_pool)
    unit_ends = [] if boot.kv_unit is None else [socket.socket(fileno=fd) for fd in descriptors[-NUM_DESCRIPTORS:]]
    descriptors = descriptors[: len(descriptors) - len(unit_ends)]
    stacks_fds, listeners = descriptors[:1], descriptors[1:]  # none: nobody here asks for stacks (`cluster.remote.host`)
    for stacks_fd in stacks_fds:
        faulthandler.register(STACKS_SIGNAL, file=stacks_fd, all_threads=True)  # the same, even while a native call runs
    set_up(boot)
    input_queue = InputQueue()
    listening = threading.Thread(target=_listen, args=(sock, input_queue), name="cloister-channel", daemon=True)
    listening.start()

    listener = SealedChannels(socket.socket(fileno=listeners[0]), input_queue, boot.config.max_num_seqs) if listeners else None

    def send(message: EngineMessage) -> None:
        if listener is not None and isinstance(message, Outputs):
            message = listener.deliver(message)
        sock.sendall(channel.frame(message))

    core = make_core(boot, send)
    if core is None:
        return 1
    core.input_queue = input_queue
    if not _set_up_kv(core, boot, kv_pool, unit_ends, send):
        return 1
    del boot, frame, kv_pool  # the secret of the pool lies in locked memory now
    core.freeze_gc_heap()
    freeze_gc_heap(searches=False)
    readers = [listening]
    if listener is not None:
        readers.append(threading.Thread(target=listener.run, name="cloister-channels", daemon=True))
        readers[-1].start()
    lower_priority(NICENESS, but=[reader.native_id for reader in readers])  # not before: a start should not wait for others
    send(Ready(core.model, core.memory, core.adapters.loaded, core.startup, core.kv_endpoint))
    try:
        core.run(send)
    except Exception as error:
        _logger.critical("the engine ends: %s", describe(error))
        return 1
    return 0


def set_up(boot: channel.Boot) -> None:
    """Has this process log and import as the front does."""
    set_up_logging(boot.log_format, replica=boot.replica)
    sys.path.extend(path for path in boot.import_path if path not in sys.path)


def find_entry(entry: str) -> CoreFactory:
    """Imports the function "module:function".

    Raises:
        ConfigError: there is no such function.
    """
    module, _, name = entry.partition(":")
    try:
        factory: CoreFactory = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"the engine's entry point {entry!r} cannot be loaded: {error}") from error
    return factory


def build(boot: channel.Boot, send: Send) -> EngineCore | None:
    """Returns an engine; None if it cannot be built, after `send` was told why."""
    try:
        return find_entry(boot.entry)(boot.config)
    except CloisterError as error:
        send(Failed(error.message, error.code, getattr(error, "fit", None)))
    except Exception as error:  # safe to log: before the first request there is no user content
        _logger.exception("the engine could not be built")
        if lacks_memory(error):
            send(Failed(f"the engine could not start: {OUT_OF_MEMORY}", MemoryBudgetError.code))
            return None
        send(Failed(f"the engine could not start: {describe(error)}; the log says more", EngineError.code))
    return None


def _set_up_kv(
    core: EngineCore,
    boot: channel.Boot,
    kv_pool: tuple[int, PoolSeat] | None,
    unit_ends: Sequence[socket.socket],
    send: Send,
) -> bool:
    """Connects the engine to others, and opens its tiers; sends why it cannot. Threads and keys are of this process: a template
    has none."""
    config = boot.config
    try:
        if boot.kv_secret is not None and config.kv_transfer is not None:
            transports = {} if boot.kv_unit is None else {SEALED: _make_sealed(boot.kv_secret, boot.kv_unit, unit_ends)}
            make = partial(KVSocketLinks, config.kv_transfer, secret=boot.kv_secret, transports=transports)
            core.exchange_kv(make, of_requests_only=boot.kv_unit is not None)
        if config.kv_tier is not None:
            _open_tiers(core, config, kv_pool, is_restart=boot.is_restart)
    except CloisterError as error:
        send(Failed(error.message, error.code, getattr(error, "fit", None)))
        return False
    return True


def _make_sealed(secret: bytes, seat: UnitSeat, ends: Sequence[socket.socket]) -> KVTransport:
    from cloister.engine.kv_sealed_link import SealedKVTransport  # only where it is used: it imports cryptography

    return SealedKVTransport(secret, seat, *ends)


def _open_tiers(core: EngineCore, config: EngineConfig, kv_pool: tuple[int, PoolSeat] | None, *, is_restart: bool) -> None:
    """Opens the tiers. A disk that is full or gone must not keep an engine from starting again: the engine runs without that
    tier.
    """
    assert config.kv_tier is not None
    try:
        core.open_kv_tiers(config.kv_tier, kv_pool, config.kv_tier_codec, config.kv_tier_admission)
    except ConfigError as error:
        if not is_restart:
            raise
        _logger.warning("this engine has no KV tier until it starts again: %s", error.message)


def ignore_terminal() -> None:
    """Leaves the signals of a terminal to the front."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _listen(sock: socket.socket, input_queue: InputQueue) -> None:
    """Fills the input_queue until the front has ended, then ends the process, whatever the other thread does."""
    try:
        while (frame := channel.receive_blocking(sock)) is not None:
            input_queue.put(channel.decode_front(frame))
            frame = None  # do not keep the last message alive while waiting for the next
    finally:
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
