"""The verbs: keys, a log, a release, witnesses and trust, from an empty directory to an epoch that a client believes."""

from __future__ import annotations

import asyncio
import hashlib
import json
from functools import cache
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from cloister.cli import app
from cloister.private.witness import witness_app
from cloister.trust.attestation import measuring
from cloister.trust.attestation.evidence import read_evidence
from cloister.trust.transparency.checks import View, believe, needed_paths
from cloister.trust.transparency.epoch import GatewayEntry, IssuerEntry
from cloister.trust.transparency.files import read_key
from cloister.trust.transparency.log import Log
from cloister.trust.transparency.membership import sign_member
from cloister.trust.transparency.note import PublicKey, parse_signatures
from cloister.trust.transparency.publisher import Contents, Publisher
from cloister.trust.transparency.release import Release, make_lock, read_release
from cloister.trust.transparency.tiles import LogReader
from cloister.trust.transparency.trust import parse_trust
from cloister.trust.transparency.witness import MAX_REQUEST_BYTES, HttpWitness, Witness, encode_request
from cloister.types.errors import CloisterError, ConfigError
from tests.trust.transparency.world import NOW, make_evidence

CLI = CliRunner()


def run(*arguments: object) -> str:
    result = CLI.invoke(app, list(map(str, arguments)), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def make_release(directory: Path, release_key: Path) -> Release:
    """Makes a release of files that stand for the real ones."""
    model = directory / "model"
    model.mkdir()
    for path in (directory / "some.whl", directory / "lock.txt", model / "config.json"):
        path.write_text(path.name)
    files = ("--wheel", directory / "some.whl", "--lock", directory / "lock.txt", "--model", model)
    made = directory / "made"
    digest = run(
        "release", "make", "--number", 1, *files, "--key", release_key, "--out", made, "--launch", f"sev-snp={'AB' * 48}"
    )
    document = (made / "release.json").read_bytes()
    assert digest.strip() == hashlib.sha256(document).hexdigest()
    public = read_key(release_key).public
    release = read_release((made / "release.entry").read_bytes(), [public])
    assert release.encode() == document
    assert release.wheel == hashlib.sha256(b"some.whl").hexdigest()
    assert release.files == hashlib.sha256((made / "manifest.json").read_bytes()).hexdigest()
    assert release.profile_digest == measuring.measure_profile("private")
    assert release.launch == {"sev-snp": "ab" * 48}
    return release


def test_a_launch_measurement_of_a_register_that_there_is_none_of_is_refused(tmp_path: Path) -> None:
    files = ("--wheel", tmp_path, "--lock", tmp_path, "--model", tmp_path, "--key", tmp_path / "absent", "--out", tmp_path)
    result = CliRunner().invoke(app, ["release", "make", "--number", "1", *map(str, files), "--launch", "tdx-mrtd=00"])
    assert result.exit_code == 2
    assert "tdx-rtmr0" in result.output


def test_from_an_empty_directory_to_an_epoch_that_a_client_believes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "measure_installed", lambda: {"site/one.py": "ab" * 32})  # every file takes its time
    keys = {name: tmp_path / f"{name}.key" for name in ("log", "release", "node", "w0", "w1", "w2")}
    roles = {"log": "log", "release": "release", "node": "node"}
    public = {
        name: run("log", "key", f"{name}.example", "--role", roles.get(name, "witness"), "--out", path).strip()
        for name, path in keys.items()
    }
    assert all(path.stat().st_mode & 0o077 == 0 for path in keys.values())
    log = tmp_path / "log"
    assert run("log", "init", log, "--key", keys["log"]).strip() == public["log"]
    release = make_release(tmp_path, keys["release"])
    made = tmp_path / "made"
    run("log", "add", log, made / "release.entry", "--key", keys["log"], "--manifest", made / "manifest.json")
    monkeypatch.setattr("time.time", lambda: NOW)
    members = ("release", "members", "--number", 1, "--log", public["log"], "--member", f"{public['node']}=1", "--after-s", 0)
    assert "node.example 100%" in run(*members, "--key", keys["release"], "--out", made / "members.entry")
    run("log", "add", log, made / "members.entry", "--key", keys["log"])
    witnesses = [part for name in ("w0", "w1", "w2") for part in ("--witness", public[name])]
    trust = parse_trust(run("log", "trust", "--log", public["log"], "--release", public["release"], *witnesses).encode())

    bundle = asyncio.run(publish(tmp_path, trust.log, keys, release))
    reader = LogReader(log, trust.log)
    assert reader.resource(f"manifest/{release.files}") == ((made / "manifest.json").read_bytes(), "application/json")
    fetched = {path: found[0] for path in needed_paths(bundle, trust, View()) if (found := reader.resource(path))}
    assert believe(bundle, trust, View(), fetched, NOW).release == release

    shown = json.loads(run("log", "show", log, "--log", public["log"], "--json"))
    assert [row["kind"] for row in shown] == ["release", "membership", "epoch"]
    head, *lines = run("log", "show", log, "--log", public["log"]).splitlines()
    assert head.split() == ["index", "kind", "number", "details"]
    began = "not_before 2026-09-21T14:13:20Z"
    for line, row, details in zip(lines, shown, (f"release {release.digest}", began, "nodes 1, release"), strict=True):
        index, kind, number, rest = (line[head.index(name) :] for name in head.split())
        assert index.startswith(f"{row['index']} ")
        assert kind.startswith(f"{row['kind']} ")
        assert number.startswith("1 ")
        assert details in rest
    said = run("log", "verify", log, "--log", public["log"], "--release", public["release"])
    assert "membership 1 holds: 1 node with" in said
    assert "1 release with the signature of a trusted key; none was revoked" in said
    assert "numbered one after the other, up to 1" in run(
        "log", "verify", log, "--log", public["log"], "--release", public["release"]
    )
    assert len(json.loads(run("log", "proof", log, "--log", public["log"], "--index", 0))["proof"]) == 2
    run("release", "revoke", "--below", 2, "--key", keys["release"], "--out", tmp_path / "revoke.entry")
    run("log", "add", log, tmp_path / "revoke.entry", "--key", keys["log"])
    assert "2 is the least" in run("log", "verify", log, "--log", public["log"], "--release", public["release"])

    cosigned = ("witness", "cosign", log, "--key", keys["w0"], "--log", public["log"], "--state", tmp_path / "w0")
    (line,) = parse_signatures(run(*cosigned))
    assert line.name == "w0.example"
    Log.create(tmp_path / "other", read_key(keys["log"])).append([b"1", b"2", b"3", b"4"])
    with pytest.raises(ConfigError, match="does not extend"):
        run("witness", "cosign", tmp_path / "other", *cosigned[3:])


async def publish(directory: Path, log_key: PublicKey, keys: dict[str, Path], release: Release) -> bytes:
    """Publishes an epoch with witnesses that are asked over HTTP."""
    log = Log(directory / "log", read_key(keys["log"]))
    trust_keys = []
    askers = []
    async with httpx.AsyncClient() as _:
        clients = []
        for name in ("w0", "w1", "w2"):
            witness = Witness(directory / name, read_key(keys[name]), [log_key])
            client = httpx.AsyncClient(transport=httpx.ASGITransport(witness_app(witness, lambda: NOW)))
            clients.append(client)
            trust_keys.append(witness.key)
            askers.append(HttpWitness("http://witness.example", witness.key, client))
        trust = parse_trust(
            run(
                *("log", "trust", "--log", log_key, "--release", read_key(keys["release"]).public),
                *(part for key in trust_keys for part in ("--witness", key)),
            ).encode()
        )
        contents = Contents(
            gateway=GatewayEntry("https://gateway.example", b"keys"),
            issuers=(IssuerEntry("https://issuer.example", b"key", 0),),
            evidence=(sign_member(read_key(keys["node"]), read_evidence(make_evidence(release))).encode(),),
            release=release.digest,
            profile=release.profile,
        )
        published = await Publisher(log, trust, askers).publish(contents, NOW)
        for client in clients:
            await client.aclose()
    return published.bundle


def test_a_witness_over_http_bounds_what_it_reads_and_says_when_it_cannot_keep_its_state(tmp_path: Path) -> None:
    run("log", "key", "log.example", "--out", tmp_path / "log.key")
    run("log", "key", "w.example", "--role", "witness", "--out", tmp_path / "w.key")
    log = Log.create(tmp_path / "log", read_key(tmp_path / "log.key"))
    witness = Witness(tmp_path / "w", read_key(tmp_path / "w.key"), [log.key])

    async def ask(body: bytes) -> int:
        transport = httpx.ASGITransport(witness_app(witness, lambda: NOW))
        async with httpx.AsyncClient(transport=transport, base_url="http://w.example") as client:
            return (await client.post("/add-checkpoint", content=body)).status_code

    body = encode_request(0, (), log.checkpoint()[1])
    assert asyncio.run(ask(body)) == 200
    assert asyncio.run(ask(b"x" * (MAX_REQUEST_BYTES + 1))) == 413
    (state,) = (tmp_path / "w").glob("*.checkpoint")
    state.write_text("damaged")
    assert asyncio.run(ask(body)) == 503


def test_a_signer_key_is_kept_from_others_and_never_written_over(tmp_path: Path) -> None:
    path = tmp_path / "log.key"
    run("log", "key", "log.example", "--out", path)
    secret = path.read_text().strip()
    with pytest.raises(ConfigError, match="never written over"):
        run("log", "key", "log.example", "--out", path)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_key(path)
    path.chmod(0o600)
    path.write_text(secret[:-4])
    with pytest.raises(ConfigError) as caught:
        read_key(path)
    assert secret[-20:-8] not in caught.value.message
    with pytest.raises(ConfigError, match="cloister log key"):
        read_key(tmp_path / "nowhere")


def item(name: str, version: str = "1.0", digest: str | None = "ab" * 32) -> dict[str, object]:
    archive = {} if digest is None else {"archive_info": {"hash": "x", "hashes": {"sha256": digest}}}
    return {"download_info": {"url": "https://example.com", **archive}, "metadata": {"name": name, "version": version}}


def test_a_lock_file_has_every_dependency_with_its_digest_and_not_the_package_itself() -> None:
    report = json.dumps({"version": "1", "install": [item("Zope.Interface"), item("cloister"), item("anyio", "4.0+cpu")]})
    assert make_lock(report.encode()) == (
        f"anyio==4.0+cpu --hash=sha256:{'ab' * 32}\nzope-interface==1.0 --hash=sha256:{'ab' * 32}\n"
    )
    for broken in (item("a", digest=None), item("a", "1.0 --pre"), item("a\nb"), item("a", digest="00")):
        with pytest.raises(ConfigError, match="SHA-256"):
            make_lock(json.dumps({"install": [broken]}).encode())
    with pytest.raises(ConfigError, match="newer pip"):
        make_lock(b"not json")


def test_the_installation_has_whatever_this_process_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the directories cut down to this package, which is quick; the manifest is what a node's files are held against."""
    package = Path(measuring.__file__).parents[2]
    monkeypatch.setattr(measuring, "_roots", lambda: [(package, "site/cloister")])
    monkeypatch.setattr(measuring, "_beside", lambda mapped: ())
    monkeypatch.setattr(measuring, "measure_file", cache(measuring.measure_file))  # hundreds of MB of libraries are in both
    installed, loaded = measuring.measure_installed(), measuring.measure_code()
    assert "site/cloister/trust/attestation/measuring.py" in installed
    assert measuring.find_foreign(loaded, installed) == []
    del installed["site/cloister/trust/attestation/measuring.py"]
    assert measuring.find_foreign(loaded, installed) == ["site/cloister/trust/attestation/measuring.py"]


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    key = run("log", "key", "log.example", "--out", tmp_path / "log.key").strip()
    with pytest.raises(CloisterError, match="cloister log init"):
        run("log", "show", tmp_path / "nothing", "--log", key)
    run("log", "init", tmp_path / "log", "--key", tmp_path / "log.key")
    with pytest.raises(ConfigError, match="0 entries"):
        run("log", "proof", tmp_path / "log", "--log", key, "--index", 0)


def test_a_missing_key_is_told_the_whole_command_that_makes_it(tmp_path):
    path = tmp_path / "witness.key"
    with pytest.raises(ConfigError, match=rf"make one with: cloister log key NAME --out {path}, .* --role ROLE"):
        read_key(path)
