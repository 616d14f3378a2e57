"""Real servers for spend stores, each in a directory of its own and reached by a Unix socket. None is installed by pip."""

from __future__ import annotations

import atexit
import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

DURABLE = ("--appendonly", "yes", "--appendfsync", "always", "--maxmemory-policy", "noeviction")


def find_postgres() -> Path | None:
    """Returns the directory of PostgreSQL's programs; Debian keeps them off the path."""
    found = shutil.which("initdb")
    if found is not None:
        return Path(found).parent
    return max(Path("/usr/lib/postgresql").glob("*/bin"), default=None)


class RedisServer:
    """redis-server with the settings given."""

    def __init__(self, directory: Path, *settings: str) -> None:
        self._directory, self._settings = directory, settings
        directory.mkdir()
        self.url = f"unix://{directory}/s"
        self.start()

    def start(self) -> None:
        command = [
            "redis-server",
            "--port",
            "0",
            "--unixsocket",
            f"{self._directory}/s",
            "--dir",
            str(self._directory),
            "--save",
            "",
        ]
        self._process = subprocess.Popen([*command, *self._settings], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        import redis

        with redis.Redis.from_url(self.url) as client:
            for _ in range(15_000):
                with contextlib.suppress(redis.RedisError):
                    client.ping()
                    return
                time.sleep(0.02)
        raise TimeoutError("redis-server did not start")

    def kill(self) -> None:
        """As a crash would."""
        self._process.kill()
        self._process.wait(timeout=300)


class PostgresServer:
    """A cluster of its own; as root it runs as the user `postgres`, since PostgreSQL refuses root.

    It is in no folder of pytest: whenever another pytest starts, it closes those to all other users.
    """

    def __init__(self, programs: Path) -> None:
        directory = Path(tempfile.mkdtemp(prefix="postgres-"))
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
        self._programs, self._data = programs, directory / "data"
        self._user = "postgres" if os.geteuid() == 0 else None
        if self._user is not None:
            account = pwd.getpwnam(self._user)
            os.chown(directory, account.pw_uid, account.pw_gid)
        self._socket = directory
        self.url = f"postgresql:///postgres?host={directory}&user=cloister"
        self._run("initdb", "-D", str(self._data), "-U", "cloister", "-A", "trust", "--no-sync")
        # A gateway's store sets synchronous_commit itself, whatever the server's default.
        (self._data / "postgresql.auto.conf").write_text("synchronous_commit = off\n")
        self.start()

    def start(self) -> None:
        options = f"-c listen_addresses='' -k {self._socket}"
        self._run("pg_ctl", "-D", str(self._data), "-o", options, "-l", str(self._data / "log"), "-w", "-t", "300", "start")

    def kill(self) -> None:
        """As a crash would: no process of it gets to write anything more."""
        pid = int((self._data / "postmaster.pid").read_text().split()[0])
        os.kill(pid, signal.SIGQUIT)
        for _ in range(30_000):
            if not Path(f"/proc/{pid}").exists():
                return
            time.sleep(0.01)
        raise TimeoutError("PostgreSQL did not end")

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self._programs / program), *arguments]
        subprocess.run(
            command, user=self._user, check=True, timeout=600, cwd="/", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
