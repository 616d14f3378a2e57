"""API keys: known by their digests only, found in constant time, kept in a file that nobody else can open."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloister.policy import Credentials, read_credentials
from cloister.policy.keyfile import locked, write_credentials
from cloister.types.errors import ConfigError

NAMES = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,8}", fullmatch=True)


def three_keys() -> tuple[Credentials, list[str]]:
    credentials, keys = Credentials.empty(), []
    for name, tenant in (("ann", "lab"), ("bob", "lab"), ("cy", "shop")):
        credentials, key = credentials.add(name, tenant=tenant)
        keys.append(key)
    return credentials, keys


@given(st.lists(NAMES, unique=True, max_size=6))
def test_every_key_finds_its_own_entry_and_nothing_else_does(names: list[str]) -> None:
    credentials, keys = Credentials.empty(), {}
    for name in names:
        credentials, keys[name] = credentials.add(name)
    for name, key in keys.items():
        found = credentials.find(key)
        assert found is not None
        assert found.name == name
        assert credentials.find(key[:-1]) is None
        assert credentials.find(key + "A") is None


@given(st.text(max_size=80))
def test_no_guess_is_a_key(guess: str) -> None:
    assert three_keys()[0].find(guess) is None


def test_a_search_compares_with_every_entry_even_after_a_match(monkeypatch: pytest.MonkeyPatch) -> None:
    credentials, keys = three_keys()
    compared: list[bytes] = []

    def compare(kept: bytes, given: bytes) -> bool:
        compared.append(kept)
        return kept == given

    monkeypatch.setattr(hmac, "compare_digest", compare)
    assert credentials.find(keys[0]) is not None
    assert compared == [key.digest for key in credentials.keys]


def test_keys_have_256_random_bits_and_differ() -> None:
    drawn: list[int] = []

    def count(num_bytes: int) -> bytes:
        drawn.append(num_bytes)
        return os.urandom(num_bytes)

    credentials, first = Credentials.empty().add("a", random=count)
    assert drawn == [32, 32]  # the key, and the salt of its tenant
    assert credentials.add("b")[1] != first


def test_neither_key_nor_salt_nor_digest_shows_in_text() -> None:
    credentials, keys = three_keys()
    secrets = [credentials.salt, *credentials.tenants.values(), *(key.digest for key in credentials.keys)]
    shown = repr(credentials) + str(credentials) + repr(credentials.keys[0]) + repr(credentials.find(keys[0]))
    for secret in secrets:
        assert repr(secret)[2:-1] not in shown
        assert secret.hex() not in shown
    assert not any(key in shown for key in keys)


def test_keys_of_one_tenant_share_a_salt_that_its_name_does_not_tell() -> None:
    credentials, _ = three_keys()
    assert set(credentials.tenants) == {"lab", "shop"}
    assert credentials.tenants["lab"] != credentials.tenants["shop"]
    assert credentials.tenants["lab"] != three_keys()[0].tenants["lab"]
    assert hashlib.sha256(b"lab").digest() != credentials.tenants["lab"]


def test_a_removed_key_is_unknown_and_the_last_one_takes_the_tenant_along() -> None:
    credentials, keys = three_keys()
    without = credentials.remove("ann")
    assert without.find(keys[0]) is None
    assert without.find(keys[1]) is not None
    assert without.tenants["lab"] == credentials.tenants["lab"]
    gone = without.remove("bob")
    assert set(gone.tenants) == {"shop"}
    assert gone.add("ann", tenant="lab")[0].tenants["lab"] != credentials.tenants["lab"]


def test_impossible_keys_are_refused_with_what_to_do() -> None:
    credentials, _ = three_keys()
    with pytest.raises(ConfigError, match="remove it first"):
        credentials.add("ann")
    with pytest.raises(ConfigError, match="letters, digits"):
        credentials.add("two words")
    with pytest.raises(ConfigError, match="letters, digits"):
        credentials.add("dora", tenant="")
    with pytest.raises(ConfigError, match="from -10 to 10"):
        credentials.add("dora", priority=11)
    with pytest.raises(ConfigError, match="keys list"):
        credentials.remove("zoe")


def test_what_was_written_is_read(tmp_path: Path) -> None:
    credentials, keys = three_keys()
    path = tmp_path / "keys.json"
    write_credentials(path, credentials)
    assert read_credentials(path) == credentials
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not any(key in path.read_text() for key in keys)
    assert [p.name for p in tmp_path.iterdir()] == ["keys.json"]


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o602, 0o660, 0o644])
def test_a_file_that_others_can_open_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "keys.json"
    write_credentials(path, three_keys()[0])
    path.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_credentials(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:-20],
        lambda data: b"",
        lambda data: b"[]",
        lambda data: b"\xff\xfe",
        lambda data: data.replace(b'"version": 1', b'"version": 2'),
        lambda data: data.replace(b'"ann"', b'"bob"'),
        lambda data: data.replace(b'"lab": ', b'"bal": '),
        lambda data: data.replace(b'"priority": 0', b'"priority": "high"'),
        lambda data: json.dumps({**json.loads(data), "salt": "c2hvcnQ="}).encode(),
        lambda data: json.dumps({**json.loads(data), "salt": "***"}).encode(),
    ],
)
def test_a_broken_file_is_named_and_its_secrets_are_not(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "keys.json"
    write_credentials(path, three_keys()[0])
    secrets = [key["digest"] for key in json.loads(path.read_bytes())["keys"]]
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ConfigError, match="is broken") as error:
        read_credentials(path)
    assert str(path) in error.value.message
    assert "cloister keys add" in error.value.message
    assert error.value.__context__ is None
    assert not any(secret in error.value.message for secret in secrets)


@given(data=st.binary(max_size=200))
def test_no_bytes_crash_the_reader(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    path.touch(mode=0o600)
    path.write_bytes(data)
    with pytest.raises(ConfigError):
        read_credentials(path)


def test_a_missing_file_is_answered_with_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cloister keys add NAME --file"):
        read_credentials(tmp_path / "none.json")


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys.json"
    before, _ = three_keys()
    write_credentials(path, before)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(ConfigError, match="No space left on device; free some space, or name another file"):
        write_credentials(path, before.remove("cy"))
    assert read_credentials(path) == before
    assert [p.name for p in tmp_path.iterdir()] == ["keys.json"]


def test_two_writers_do_not_lose_each_others_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    with locked(file), pytest.raises(ConfigError, match="another process"), locked(file):
        raise AssertionError("both hold the lock")
    with locked(file) as path:
        assert path == file.resolve()
