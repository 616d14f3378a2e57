"""A node's settings become evidence, or an error that says what to do before it serves."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from cloister.launch.sealed import fit_workers, launch_sealed, loaded_beside, watched_files
from cloister.launch.settings import resolve_settings
from cloister.models import locate
from cloister.private.attesting import Attesting, check_prefixes, open_announcer, read_attesting, read_checkpoint
from cloister.private.unsealing import LocalUnsealer
from cloister.private.workers.zygote import WAITING_WORKERS
from cloister.server import serve
from cloister.server.serve import RESERVED_FILES
from cloister.trust.attestation import AttestationError, read_evidence, read_statement
from cloister.trust.attestation.measuring import measure_model
from cloister.trust.attestation.process import AttesterBoot
from cloister.trust.attestation.tsm import TSM_REPORTS
from cloister.trust.sealing import NODE_KEY_LIFE_S, KeyRing, Receiver, ReplayCache
from cloister.trust.transparency.files import write_key
from cloister.trust.transparency.membership import build_membership, find_member
from cloister.trust.transparency.note import Kind, PrivateKey
from cloister.types.config import EngineConfig, ServerConfig
from cloister.types.errors import ConfigError


@pytest.fixture(autouse=True)
def measure_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloister.trust.attestation.node.measure_code", dict)  # the tests' own process may hold torch


@pytest.fixture
def model(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return model


def make_evidence(
    attesting: Attesting, model: Path, spawn: object = None, beside: Mapping[str, Path] = MappingProxyType({})
) -> bytes:
    async def make() -> bytes:
        unsealer = LocalUnsealer(Receiver(KeyRing(time.monotonic()), ReplayCache(NODE_KEY_LIFE_S)))
        announcer = await open_announcer(
            attesting,
            "private",
            model,
            unsealer,
            time.time(),
            lambda: {"front.seccomp": "applied: on"},
            spawn,  # type: ignore[arg-type]
            beside,
        )
        assert await announcer.renew()
        document = announcer.evidence()
        assert document is not None
        return document

    return asyncio.run(make())


def test_a_node_with_an_adapter_states_another_model_than_a_node_without(model: Path, tmp_path: Path):
    """Else an adapter under the name that clients ask for would answer in the model's place, proved."""
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    beside = loaded_beside(EngineConfig(lora=f"cloister-5m={adapter}"), model)
    assert beside == {"lora cloister-5m": adapter}
    stated = [
        read_statement(read_evidence(make_evidence(Attesting(AttesterBoot()), model, None, loaded)).statement).model
        for loaded in ({}, beside)
    ]
    assert stated[0] == measure_model(model)
    assert stated[1] != stated[0]


def test_small_models_and_public_text_are_loaded_beside_the_model(tmp_path: Path):
    beside = loaded_beside(EngineConfig(draft_model="cloister-draft", datastore=str(tmp_path)), tmp_path)
    assert beside == {"draft model 0": locate("cloister-draft"), "datastore": tmp_path}


def test_drafters_beside_a_gguf_file_and_adapters_at_home_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model.gguf").touch()
    (tmp_path / "drafters").mkdir()
    beside = loaded_beside(EngineConfig(lora="ann=~/adapter"), tmp_path / "model.gguf")
    assert beside == {"lora ann": tmp_path / "adapter", "drafters": tmp_path / "drafters"}


def test_what_pull_puts_beside_a_gguf_file_is_measured_since_it_changes_answers(tmp_path: Path):
    for name in ("model.gguf", "generation_config.json", "chat_template.jinja", "LICENSE"):
        (tmp_path / name).write_text("{}")
    assert loaded_beside(EngineConfig(), tmp_path / "model.gguf") == {
        "sampling defaults": tmp_path / "generation_config.json",
        "chat template": tmp_path / "chat_template.jinja",
    }


def test_what_is_not_beside_a_gguf_file_and_would_be_read_is_watched_with_its_folder(tmp_path: Path):
    model = tmp_path / "model.gguf"
    model.touch()
    files, folders = watched_files(EngineConfig(model=str(model)), model)
    names = ("model.gguf", "drafters", "generation_config.json", "chat_template.jinja")
    assert set(files) == {tmp_path / name for name in names}
    assert folders == [tmp_path]
    assert watched_files(EngineConfig(model=str(tmp_path)), tmp_path) == ([tmp_path], [])


def test_a_sealed_node_reads_no_packed_weights_and_takes_no_adapters_later(tmp_path: Path):
    """Packed weights are files of another run, which no statement names: a flipped bit changed answers and no digest."""
    settings = resolve_settings({"sealed": True})
    assert settings.engine.config.weights_cache == ""
    assert resolve_settings({}).engine.config.weights_cache
    with pytest.raises(ConfigError, match="leave `weights_cache` out"):
        resolve_settings({"sealed": True, "weights_cache": str(tmp_path)})
    with pytest.raises(ConfigError, match="name its adapters with `lora`"):
        resolve_settings({"sealed": True, "runtime_adapters": True})


@pytest.mark.parametrize(("unit", "files_each"), [({}, 1), ({"unit_members": "10.0.0.2:9100"}, 6), ({"unit_port": 9100}, 6)])
def test_a_machine_of_a_unit_may_open_the_files_of_all_its_requests(
    monkeypatch: pytest.MonkeyPatch, unit: dict[str, object], files_each: int
):
    """A leader's front has six for a request that two engines of a member work on: client, worker, two ends, two links."""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")  # as the launcher sets it, until the test ends
    limits = {"now": (64, 100_000)}
    monkeypatch.setattr(serve.resource, "getrlimit", lambda _: limits["now"])
    monkeypatch.setattr(serve.resource, "setrlimit", lambda _, new: limits.update(now=new))
    monkeypatch.setattr("cloister.trust.hardening.launching.execute", lambda launch: None)
    settings = resolve_settings({"sealed": True, "max_num_seqs": 8, **unit})
    launch_sealed(settings, ())
    wanted = (2 if "unit_members" in unit else 1) * 8 + WAITING_WORKERS
    assert limits["now"][0] == wanted * files_each + RESERVED_FILES
    limits["now"] = (64, RESERVED_FILES + 9 * files_each)
    assert fit_workers(settings.engine.config, settings.server.config) == (9, wanted)
    limits["now"] = (64, RESERVED_FILES)
    with pytest.raises(ConfigError, match="ulimit -n"):
        launch_sealed(settings, ())


def test_settings_become_evidence(model: Path, tmp_path: Path):
    (tmp_path / "checkpoint").write_text("log.example\n7\nAAAA\n")
    attesting = Attesting(AttesterBoot(), log_checkpoint=str(tmp_path / "checkpoint"), capacity=5)
    statement = read_statement(read_evidence(make_evidence(attesting, model)).statement)
    assert (statement.profile, statement.capacity, statement.checkpoint) == ("private", 5, "log.example\n7\nAAAA\n")
    assert statement.hardening == {"front.seccomp": "applied: on", "host": "missing: host not excluded"}


@pytest.mark.skipif(TSM_REPORTS.is_dir(), reason="this is a confidential guest")
def test_a_node_signs_its_evidence_as_the_member_that_it_is(model: Path, tmp_path: Path):
    key = PrivateKey.generate("node1.example", Kind.NOTE)
    write_key(tmp_path / "member.key", key)
    attesting = Attesting(AttesterBoot(), member_key=str(tmp_path / "member.key"))
    assert tmp_path / "member.key" in attesting.files
    evidence = read_evidence(make_evidence(attesting, model))
    membership = build_membership(1, "log.example", 0, {key.public: 1})
    member = find_member(membership, evidence)
    assert member is not None
    assert member.name == "node1.example"
    imposter = PrivateKey.generate("node1.example", Kind.NOTE)
    assert find_member(build_membership(1, "log.example", 0, {imposter.public: 1}), evidence) is None
    (tmp_path / "member.key").chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        make_evidence(attesting, model)


def test_hardware_is_asked_by_a_process_of_its_own_and_a_machine_without_it_does_not_start(model: Path):
    started: list[subprocess.Popen[bytes]] = []

    def spawn(module: str, sock: socket.socket) -> None:
        started.append(subprocess.Popen([sys.executable, "-m", module, str(sock.fileno())], pass_fds=(sock.fileno(),)))

    make_evidence(Attesting(AttesterBoot()), model, spawn)
    assert started == []
    attesting = Attesting(AttesterBoot(kind="sev-snp"))
    with pytest.raises(AttestationError, match="no confidential guest"):
        make_evidence(attesting, model, spawn)
    (process,) = started
    assert process.wait(300) == 0


def test_what_the_node_reads_is_named_for_its_rules(tmp_path: Path):
    boot = AttesterBoot(kind="tdx", certificates="/c", collateral="/d/collateral.json")
    attesting = Attesting(boot, release="/r", log_checkpoint="/l/checkpoint")
    assert attesting.folders == (Path("/r"), Path("/c"))
    assert attesting.files == (Path("/l/checkpoint"), Path("/d/collateral.json"))
    assert attesting.uses_hardware
    assert Attesting(AttesterBoot(gpus=True)).uses_hardware
    assert not Attesting(AttesterBoot()).uses_hardware


def test_a_checkpoint_that_is_none_is_an_error(tmp_path: Path):
    assert read_checkpoint(None) == ""
    with pytest.raises(AttestationError, match="cannot read"):
        read_checkpoint(str(tmp_path / "absent"))
    for content in (b"x" * 20_000, b"\xff\xfe"):
        (tmp_path / "broken").write_bytes(content)
        with pytest.raises(AttestationError, match="no checkpoint"):
            read_checkpoint(str(tmp_path / "broken"))


def test_a_release_that_is_not_there_stops_the_start(model: Path, tmp_path: Path):
    with pytest.raises(AttestationError, match="cannot read the release"):
        make_evidence(Attesting(AttesterBoot(), release=str(tmp_path / "absent")), model)


def test_settings_of_the_server_say_what_evidence_is_made_of():
    front = ServerConfig(
        sealed=True, attester="tdx", attest_gpus=True, intel_collateral="c", release="r", log_checkpoint="l", node_capacity=7
    )
    assert read_attesting(front) == Attesting(AttesterBoot("tdx", True, None, "c"), "r", "l", 7)
    assert read_attesting(ServerConfig()) == Attesting(AttesterBoot())


@pytest.mark.parametrize(
    "given",
    [
        {"attester": "sev-snp"},
        {"attest_gpus": True},
        {"amd_certificates": "c"},
        {"intel_collateral": "c"},
        {"nvidia_collateral": "c"},
        {"release": "r"},
        {"log_checkpoint": "l"},
        {"node_capacity": 2},
    ],
    ids=lambda given: next(iter(given)),
)
def test_what_only_a_sealed_node_has_a_use_for_is_refused_by_another_server(given: dict[str, object]):
    with pytest.raises(ConfigError, match="--sealed"):
        resolve_settings(given)


def test_collateral_of_nvidia_is_read_where_gpus_vouch_and_refused_elsewhere():
    attesting = read_attesting(ServerConfig(sealed=True, attest_gpus=True, nvidia_collateral="/c"))
    assert attesting.boot == AttesterBoot(gpus=True, gpu_collateral="/c")
    assert attesting.folders == (Path("/c"),), "the node may read it"
    with pytest.raises(ConfigError, match="--attest-gpus"):
        read_attesting(ServerConfig(sealed=True, nvidia_collateral="/c"))


def test_tdx_without_collateral_is_refused_at_once():
    with pytest.raises(ConfigError, match="collateral"):
        read_attesting(ServerConfig(sealed=True, attester="tdx"))


def test_release_prefixes_have_to_lie_where_the_models_digest_binds_them(model: Path, tmp_path: Path):
    (model / "prefixes.json").write_text("[]")
    check_prefixes(None, model)
    check_prefixes(str(model / "prefixes.json"), model)
    (tmp_path / "prefixes.json").write_text("[]")
    (model / "link.json").symlink_to(tmp_path / "prefixes.json")
    for elsewhere in (tmp_path / "prefixes.json", model / "link.json", model / ".." / "prefixes.json"):
        with pytest.raises(ConfigError, match="model's directory"):
            check_prefixes(str(elsewhere), model)
    with pytest.raises(ConfigError, match="model's directory"):
        check_prefixes(str(model / "prefixes.json"), model / "config.json")
