"""Spend stores on real servers: first come, only served; across threads, processes, kill -9 and restarts."""

from __future__ import annotations

import builtins
import hashlib
import shutil
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cloister.trust.tokens import SpendStore, SpendStoreError, check_epoch, open_spend_store
from cloister.types.errors import ConfigError
from tests.store_servers import DURABLE, PostgresServer, RedisServer, find_postgres

LATER = 4_000_000_000
KEY = bytes(32)

SPENDER = """
import hashlib, sys
from cloister.trust.tokens import open_spend_store
store = open_spend_store(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
for i in range(int(sys.argv[2])):
    if store.spend(bytes(32), hashlib.sha256(b"%d" % i).digest(), 4_000_000_000):
        print(i, flush=True)
"""


@dataclass
class Place:
    """Where a store keeps its records.

    Attributes:
        kill: ends the server as a crash would; None where there is none.
    """

    url: str
    kill: Callable[[], None] | None = None
    start: Callable[[], None] | None = None


@pytest.fixture(scope="module", params=["sqlite", "postgres", "redis"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    directory = tmp_path_factory.mktemp(request.param)
    if request.param == "sqlite":
        yield Place(f"sqlite:///{directory}/spent.db")
        return
    server: PostgresServer | RedisServer
    if request.param == "postgres":
        programs = find_postgres()
        if programs is None:
            pytest.skip("PostgreSQL is not installed (Debian: apt-get install postgresql)")
        server = PostgresServer(programs)
    else:
        if shutil.which("redis-server") is None:
            pytest.skip("Redis is not installed (Debian: apt-get install redis-server)")
        server = RedisServer(directory / "server", *DURABLE)
    yield Place(server.url, server.kill, server.start)
    server.kill()


@pytest.fixture
def store(place: Place) -> Iterator[SpendStore]:
    store = open_spend_store(place.url)
    yield store
    store.close()


def digest(what: object) -> bytes:
    return hashlib.sha256(repr(what).encode()).digest()


def start_spender(url: str, count: int) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", SPENDER, url, str(count)], stdin=pipe, stdout=pipe, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def test_the_first_wins_and_nobody_after(store: SpendStore, place: Place) -> None:
    assert store.spend(KEY, digest("once"), LATER)
    assert not store.spend(KEY, digest("once"), LATER)
    assert store.spend(b"k" * 32, digest("once"), LATER)  # another key's token
    again = open_spend_store(place.url)
    assert not again.spend(KEY, digest("once"), LATER)
    again.close()


def test_one_of_32_threads_wins_each(store: SpendStore) -> None:
    def spend_all(_: int) -> list[int]:
        return [i for i in range(10) if store.spend(KEY, digest(("thread", i)), LATER)]

    with ThreadPoolExecutor(32) as pool:
        won = sorted(i for winners in pool.map(spend_all, range(32)) for i in winners)
    assert won == list(range(10))


def test_two_processes_share_and_a_kill_forgets_nothing(place: Place, store: SpendStore) -> None:
    first, second = start_spender(place.url, 1_000_000), start_spender(place.url, 100)
    go(first)
    go(second)
    by_second, _ = second.communicate(timeout=300)
    first.kill()
    by_first, _ = first.communicate(timeout=300)
    # The last line may be cut; a token that was taken and not told of is lost, and never spent twice.
    told = [int(line) for text in (by_first, by_second) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    assert len(set(told)) == len(told)
    assert len(set(range(100)) - set(told)) <= 1
    assert not any(store.spend(KEY, hashlib.sha256(b"%d" % i).digest(), LATER) for i in told)


def test_a_server_that_crashes_forgets_nothing(place: Place, store: SpendStore) -> None:
    if place.kill is None or place.start is None:
        pytest.skip("SQLite has no server; its crash is the process's, in the test above")
    told = [i for i in range(50) if store.spend(KEY, digest(("crash", i)), LATER)]
    assert len(told) == 50
    place.kill()
    try:
        with pytest.raises(SpendStoreError):
            store.spend(KEY, digest(("crash", 0)), LATER)
    finally:
        place.start()
    assert not any(store.spend(KEY, digest(("crash", i)), LATER) for i in told)  # and the store found its server again
    assert store.spend(KEY, digest("after the crash"), LATER)


def test_a_key_ends_with_its_records_and_for_good(place: Place, store: SpendStore) -> None:
    ended, running, extended = b"e" * 32, b"f" * 32, b"g" * 32
    assert store.spend(ended, digest("first"), 3_000_000_000)
    assert store.spend(running, digest("first"), 3_000_000_001)
    assert store.spend(extended, digest("first"), 3_000_000_000)
    assert store.spend(extended, digest("second"), 3_000_000_001)
    before = count_records(place)
    store.forget(3_000_000_000)
    assert count_records(place) == before - 1
    again = open_spend_store(place.url)
    for each in (store, again):
        assert not each.spend(ended, digest("first"), LATER), "its record is gone, and the key with it"
        assert not each.spend(ended, digest("another"), LATER)
        assert not each.spend(running, digest("first"), 3_000_000_001)
        assert not each.spend(extended, digest("first"), 3_000_000_001)
    assert store.spend(running, digest("second"), 3_000_000_001)
    again.close()


def test_a_store_tells_whether_it_has_seen_an_epoch(place: Place, store: SpendStore) -> None:
    """An older copy of a store lacks the newest epoch of its gateway's log, and a new store lacks all."""
    assert not store.note_epoch("log.example", 1, 2)  # a new store, and a log that had an epoch
    assert store.note_epoch("log.example", 0, 0)
    assert all(store.note_epoch("log.example", number - 1, number) for number in range(1, 12))
    assert store.note_epoch("log.example", 11, 11)
    assert store.note_epoch("log.example", 7, 7)  # one that was noted, but not logged any more before a crash
    again = open_spend_store(place.url)
    assert again.note_epoch("log.example", 11, 12)
    again.close()
    assert not store.note_epoch("log.example", 13, 14)
    assert not store.note_epoch("log.example", 13, 13)  # nothing was recorded
    assert not store.note_epoch("other.example", 1, 2)
    with pytest.raises(ConfigError, match=r"does not know epoch 13.*--accept-store 13") as refused:
        check_epoch(store, "log.example", 13, 13)
    assert refused.value.param == "spend_store"


def test_a_store_of_a_version_without_epochs_is_named_as_such_and_keeps_its_tokens(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "spent.db") as database:
        database.execute(
            "CREATE TABLE spent (key_id BLOB NOT NULL, token BLOB NOT NULL, expires_at INTEGER NOT NULL, "
            "PRIMARY KEY (key_id, token)) WITHOUT ROWID"
        )
        database.execute("INSERT INTO spent VALUES (?, ?, ?)", (KEY, digest("spent"), LATER))
    database.close()
    store = open_spend_store(f"sqlite:///{tmp_path}/spent.db")
    words = r"written by a version before this check.*--accept-store 40 goes on with this one: if it is the right one, nothing"
    with pytest.raises(ConfigError, match=words):
        check_epoch(store, "log.example", 40, 40)
    assert store.note_epoch("log.example", 0, 40)  # as --accept-store does
    check_epoch(store, "log.example", 40, 41)
    assert not store.spend(KEY, digest("spent"), LATER)
    store.close()


def test_keys_that_end_while_32_threads_spend_give_no_token_twice(store: SpendStore) -> None:
    won: list[tuple[int, int]] = []

    def spend_all(number: int) -> None:
        for key in range(8):
            if number % 8 == 0:
                store.forget(2_900_000_000 + key)
            won.extend((key, i) for i in range(4) if store.spend(b"race%028d" % key, digest(("race", i)), 2_900_000_000 + key))

    with ThreadPoolExecutor(32) as pool:
        list(pool.map(spend_all, range(32)))
    assert len(set(won)) == len(won)


def test_no_server_drops_a_record_by_its_own_clock(place: Place, store: SpendStore) -> None:
    if not place.url.startswith("unix"):
        pytest.skip("only Redis has a clock that drops records")
    import redis

    assert store.spend(b"h" * 32, digest("kept"), 3_000_000_000)
    with redis.Redis.from_url(place.url) as client:
        assert {client.ttl(name) for name in client.keys("cloister:spent:*")} == {-1}


def count_records(place: Place) -> int:
    if place.url.startswith("sqlite"):
        with sqlite3.connect(place.url.removeprefix("sqlite:///")) as database:
            return int(database.execute("SELECT count(*) FROM spent").fetchone()[0])
    if place.url.startswith("unix"):
        import redis

        with redis.Redis.from_url(place.url) as client:
            return sum(client.scard(name) for name in client.keys("cloister:spent:*") if len(name) > 64)
    import psycopg

    with psycopg.connect(place.url) as connection:
        row = connection.execute("SELECT count(*) FROM cloister_spent").fetchone()
        assert row is not None
        return int(row[0])


def test_a_postgres_that_does_not_write_to_disk_is_refused(place: Place) -> None:
    if not place.url.startswith("postgresql"):
        pytest.skip("this is about PostgreSQL")
    import psycopg

    with psycopg.connect(place.url, autocommit=True) as connection:
        for value, is_taken in (("off", False), ("on", True)):
            connection.execute(f"ALTER SYSTEM SET fsync = {value}")
            connection.execute("SELECT pg_reload_conf()")
            for _ in range(200):
                if connection.execute("SHOW fsync").fetchone() == (value,):
                    break
                time.sleep(0.02)
            if is_taken:
                open_spend_store(place.url).close()
                continue
            with pytest.raises(ConfigError, match="fsync = on"):
                open_spend_store(place.url)


def test_a_redis_that_could_forget_is_refused(tmp_path: Path) -> None:
    if shutil.which("redis-server") is None:
        pytest.skip("Redis is not installed (Debian: apt-get install redis-server)")
    server = RedisServer(tmp_path / "server", "--maxmemory-policy", "allkeys-lru")
    try:
        with pytest.raises(ConfigError, match="appendonly yes, appendfsync always, maxmemory-policy noeviction"):
            open_spend_store(server.url)
    finally:
        server.kill()


@pytest.mark.parametrize(
    "url", ["", "spent.db", "mysql://host/x", "sqlite://spent.db", "sqlite:///", "sqlite:////proc/no/x.db"]
)
def test_a_url_that_means_no_store_is_an_error_that_says_what_to_do(url: str) -> None:
    with pytest.raises(ConfigError):
        open_spend_store(url)


@pytest.mark.parametrize("url", ["postgresql:///x?host=/nowhere&password=hunter2", "redis://:hunter2@127.0.0.1:1/0"])
def test_a_server_that_is_not_there_is_an_error_without_the_password(url: str) -> None:
    with pytest.raises(SpendStoreError) as caught:
        open_spend_store(url)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(("url", "library"), [("postgresql:///x", "psycopg"), ("redis://x", "redis")])
def test_a_missing_library_names_the_extra(url: str, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    importer = builtins.__import__

    def without(name: str, *rest: Any, **named: Any) -> Any:
        if name == library:
            raise ImportError(name)
        return importer(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"cloister\[stores\]"):
        open_spend_store(url)


def test_a_sqlite_store_that_cannot_write_lets_nobody_in(tmp_path: Path) -> None:
    path = tmp_path / "spent.db"
    store = open_spend_store(f"sqlite:///{path}")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    database = sqlite3.connect(path)
    database.execute("DROP TABLE spent")
    database.close()
    with pytest.raises(SpendStoreError):
        store.spend(KEY, digest("x"), LATER)
    store.close()
