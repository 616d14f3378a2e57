"""Starting and stopping: one line at start, clear words when it cannot, and a drain at the end."""

from __future__ import annotations

import asyncio
import gc
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from cloister.server.serve import _start_unless, address_of, bind
from cloister.types.errors import ConfigError, EngineError
from tests.server.running_server import MODEL
from tests.thinning import thin

ROOT = Path(__file__).parents[2]


@contextmanager
def process(path: Path, *, port: int = 0, step_s: float = 0.01, drain_s: float = 5) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.server.site", str(path), str(port), str(step_s), str(drain_s)]
    running = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield running
    finally:
        running.kill()
        running.wait()
        running.stdout.close()


def url_of(running: subprocess.Popen[str]) -> str:
    line = running.stdout.readline().strip()
    assert line.startswith("Serving on http://127.0.0.1:")
    return line.removeprefix("Serving on ")


class Asking(threading.Thread):
    """A request in a thread of its own."""

    def __init__(self, url: str, **fields: object) -> None:
        super().__init__()
        self.reply: httpx.Response | None = None
        self._url, self._fields = url, fields
        self.start()

    def run(self) -> None:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 100, "ignore_eos": True, **self._fields}
        with suppress(httpx.TransportError):  # no reply then
            self.reply = httpx.post(f"{self._url}/v1/completions", json=body, timeout=300)


def wait_until_running(url: str) -> None:
    deadline = time.monotonic() + 300
    while "cloister_num_requests_running 1.0" not in httpx.get(f"{url}/metrics").text:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("number", thin([signal.SIGTERM, signal.SIGINT], 1))
def test_a_signal_lets_running_requests_end_and_exits_with_0(model_path, number):
    with process(model_path, step_s=0.04, drain_s=120) as running:
        url = url_of(running)
        asking = Asking(url)
        wait_until_running(url)
        running.send_signal(number)
        assert running.wait(300) == 0
        asking.join(300)
        assert asking.reply.status_code == 200
        assert asking.reply.json()["usage"]["completion_tokens"] == 100
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")
        assert is_said_to_stop(running.stdout.read(), 120)


def test_a_second_ctrl_c_ends_a_server_at_once_with_130(model_path):
    with process(model_path, step_s=0.1, drain_s=60) as running:
        url = url_of(running)
        asking = Asking(url, stream=True, max_tokens=200)
        wait_until_running(url)
        running.send_signal(signal.SIGINT)
        assert is_said_to_stop(running.stdout.readline(), 60)
        running.send_signal(signal.SIGINT)
        assert running.wait(300) == 130, "it waited until the request had ended"
        asking.join(300)


def is_said_to_stop(printed, drain_s):
    """The server may not have closed the request for metrics yet that said that the other one runs."""
    words = rf"stopping: (1 request|2 requests), up to {drain_s} s; Ctrl-C again ends it now\n"
    return re.fullmatch(words, printed) is not None


@pytest.mark.parametrize("stream", thin([True, False], 1))
def test_what_does_not_end_in_time_is_ended_with_a_reply(model_path, stream):
    with process(model_path, step_s=0.1, drain_s=0.3) as running:
        url = url_of(running)
        asking = Asking(url, stream=stream)
        wait_until_running(url)
        running.terminate()
        assert running.wait(300) == 0
        asking.join(300)
        if stream:
            assert '"type":"server_error"' in asking.reply.text
            assert asking.reply.text.endswith("data: [DONE]\n\n")
        else:
            assert asking.reply.status_code == 503
            assert asking.reply.json()["error"]["code"] == "engine_error"


def test_a_start_that_fails_after_the_signal_to_stop_leaves_no_traceback():
    complaints = []

    async def start():
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            raise EngineError("too late") from None

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(0.05, stop.set)
        assert await _start_unless(stop, start) is None
        gc.collect()  # the loop complains of a task with an exception that nobody has seen when it is collected

    asyncio.run(main())
    assert complaints == []


def test_a_server_that_is_still_loading_goes_on_after_a_signal_to_read_again_and_stops_at_once_when_told(model_path):
    with process(model_path, step_s=2) as running:
        assert running.stdout.readline() == "loading\n"
        running.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            running.wait(0.5)
        running.terminate()
        assert running.wait(300) == 0
        assert running.stdout.read() == ""


def test_an_engine_that_cannot_start_ends_the_server_with_its_reason(model_path):
    with process(model_path, step_s=-1) as running:
        assert running.wait(300) == 3
        assert running.stdout.read() == "ModelError: the model cannot be used; choose another one\n"


def test_a_port_in_use_is_one_clear_line():
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1 port {port}: .*--port, or 0"):
            bind("127.0.0.1", port)


def test_an_address_of_another_machine_is_one_clear_line():
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1: .*--host"):
        bind("192.0.2.1", 0)
    with pytest.raises(ConfigError, match=r"host nowhere\.invalid is not an address of this machine"):
        bind("nowhere.invalid", 0)


def test_the_chosen_port_is_shown():
    with bind("127.0.0.1", 0) as listener:
        assert address_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"
    if socket.has_ipv6:
        with bind("::1", 0) as listener:
            assert address_of(listener).startswith("http://[::1]:")
