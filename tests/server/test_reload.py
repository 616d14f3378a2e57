"""Keys are read again when their file changes or SIGHUP comes; streams go on, and a removed key stops working."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import httpx
import pytest

from cloister.cli import main
from cloister.policy import Credentials
from cloister.policy.keyfile import write_credentials
from cloister.server.reload import Reloader, WatchedFiles
from cloister.types.errors import ConfigError
from tests import virtual_time
from tests.serving import ServeProcess


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def status(url: str, key: str) -> int:
    return httpx.get(f"{url}/v1/models", headers=bearer(key), timeout=300).status_code


def wait_for(condition) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_running_server_follows_its_keys_without_dropping_a_stream(tmp_path):
    path = tmp_path / "keys.json"
    credentials, ann = Credentials.empty().add("ann")
    credentials, bob = credentials.add("bob")
    write_credentials(path, credentials)
    with ServeProcess("--api-keys", str(path), "--max-num-seqs", "2", "--num-threads", "1") as running:
        url, process = running.url, running.process
        assert status(url, ann) == status(url, bob) == 200
        body = {"model": "cloister-5m", "prompt": "x", "max_tokens": 3000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=bearer(ann), timeout=300) as reply:
            lines = reply.iter_lines()
            next(lines)
            write_credentials(path, credentials.remove("ann"))
            wait_for(lambda: status(url, ann) == 401)
            assert status(url, bob) == 200
            assert "data:" in "".join(next(lines) for _ in range(10))
        path.write_text("broken")
        process.send_signal(signal.SIGHUP)
        assert status(url, bob) == 200
        write_credentials(path, credentials)
        process.send_signal(signal.SIGHUP)
        wait_for(lambda: status(url, ann) == 200)
        _, printed = running.stop()
    assert "the API keys could not be read again and stay as they were: the API key file" in printed
    assert "the API keys were read again" in printed
    assert ann not in printed


def make_source(path: Path, seen: list[bytes]) -> WatchedFiles:
    def read() -> None:
        data = path.read_bytes() if path.exists() else b""
        if not data:
            raise ConfigError("there is nothing in it")
        seen.append(data)

    return WatchedFiles("things", (path,), read)


def test_a_change_is_seen_and_no_change_is_not(tmp_path, caplog):
    path, seen = tmp_path / "file", []
    path.write_bytes(b"one")
    reloader = Reloader([make_source(path, seen)])

    async def change() -> None:
        watching = asyncio.create_task(reloader.watch(1.0))
        await asyncio.sleep(5.5)
        assert seen == []
        for change, expected in ((lambda: replace(path, b"two"), [b"two"]), (path.unlink, [b"two"])):
            change()
            await asyncio.sleep(5.0)
            assert seen == expected
        replace(path, b"three")
        await asyncio.sleep(5.0)
        watching.cancel()

    virtual_time.run(change())
    assert seen == [b"two", b"three"]
    assert caplog.text.count("the things could not be read again and stay as they were: there is nothing in it") == 1


def replace(path: Path, data: bytes) -> None:
    """Writes a file as an editor or a volume does: whole, under a new inode."""
    other = path.with_suffix(".new")
    other.write_bytes(data)
    os.replace(other, path)


def test_a_signal_reads_again_what_did_not_change(tmp_path):
    path, seen = tmp_path / "file", []
    path.write_bytes(b"same")
    Reloader([make_source(path, seen)]).reload()
    assert seen == [b"same"]


@pytest.mark.parametrize("content", ["", "{}"])
def test_a_server_with_a_broken_key_file_does_not_start(tmp_path, capsys, content):
    path = tmp_path / "keys.json"
    path.touch(mode=0o600)
    path.write_text(content)
    with pytest.raises(SystemExit) as ended:
        main(["serve", "cloister-5m", "--port", "0", "--api-keys", str(path)])
    assert ended.value.code != 0
    assert "is broken" in capsys.readouterr().err
