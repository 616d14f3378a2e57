"""TLS: served over 1.2 and 1.3, clear errors for what does not fit, and a new certificate without a restart."""

from __future__ import annotations

import asyncio
import datetime
import socket
import ssl
import warnings
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from cloister.bench.load import find_model
from cloister.cli import main
from cloister.server.tls import Certificate
from cloister.types.config import ServerConfig
from cloister.types.errors import ConfigError
from tests.server.running_server import MODEL, ScriptedEngine, says, serving_script

PEM = serialization.Encoding.PEM


def write_pair(folder: Path, name: str = "server", passphrase: bytes | None = None) -> tuple[Path, Path]:
    """Writes a self-signed certificate for localhost, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    closed = serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
    certfile, keyfile = folder / f"{name}.pem", folder / f"{name}.key"
    certfile.write_bytes(certificate.public_bytes(PEM))
    keyfile.write_bytes(key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, closed))
    return certfile, keyfile


def config_for(certfile: Path, keyfile: Path | None) -> ServerConfig:
    return ServerConfig(
        port=0, certfile=str(certfile), keyfile=str(keyfile) if keyfile is not None else None, drain_timeout_s=1.0
    )


def trusting(certfile: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certfile))


def local(url: str) -> str:
    return url.replace("127.0.0.1", "localhost")


@pytest.mark.parametrize("in_one_file", [False, True])
def test_requests_and_streams_go_over_tls(model_path, tmp_path, in_one_file):
    certfile, keyfile = write_pair(tmp_path)
    trust = trusting(certfile)
    if in_one_file:
        certfile.write_bytes(certfile.read_bytes() + keyfile.read_bytes())
        keyfile = None
    with serving_script(model_path, ScriptedEngine(says("ok")), config=config_for(certfile, keyfile)) as server:
        assert server.url.startswith("https://")
        with httpx.Client(base_url=local(server.url), verify=trust) as client:
            for stream in (False, True):
                reply = client.post("/v1/completions", json={"model": MODEL, "prompt": "x", "stream": stream})
                assert reply.status_code == 200
                assert reply.headers["strict-transport-security"] == "max-age=31536000"


def test_nothing_older_than_tls_1_2_is_spoken(model_path, tmp_path):
    certfile, keyfile = write_pair(tmp_path)
    with serving_script(model_path, ScriptedEngine(says("ok")), config=config_for(certfile, keyfile)) as server:
        for version, engine_stats in (
            (ssl.TLSVersion.TLSv1_1, False),
            (ssl.TLSVersion.TLSv1_2, True),
            (ssl.TLSVersion.TLSv1_3, True),
        ):
            assert can_connect(server.url, trusting(certfile), version) == engine_stats


def can_connect(url: str, context: ssl.SSLContext, version: ssl.TLSVersion) -> bool:
    context.set_ciphers("ALL:@SECLEVEL=0")  # else this side would refuse the old versions by itself
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        context.minimum_version = context.maximum_version = version
    host, port = url.removeprefix("https://").split(":")
    try:
        with (
            socket.create_connection((host, int(port)), timeout=300) as connection,
            context.wrap_socket(connection, server_hostname="localhost") as wrapped,
        ):
            return wrapped.version() is not None
    except ssl.SSLError:
        return False


def test_plain_http_gets_no_answer_and_does_no_harm(model_path, tmp_path):
    certfile, keyfile = write_pair(tmp_path)
    with serving_script(model_path, ScriptedEngine(says("ok")), config=config_for(certfile, keyfile)) as server:
        with pytest.raises(httpx.HTTPError):
            httpx.get(server.url.replace("https://", "http://") + "/health")
        with httpx.Client(verify=trusting(certfile)) as client:
            assert client.get(f"{local(server.url)}/health").status_code == 200


def test_what_is_no_http_is_answered_over_tls_too(model_path, tmp_path):
    certfile, keyfile = write_pair(tmp_path)
    with serving_script(model_path, ScriptedEngine(says("ok")), config=config_for(certfile, keyfile)) as server:
        host, port = server.url.removeprefix("https://").split(":")
        with (
            socket.create_connection((host, int(port)), timeout=300) as connection,
            trusting(certfile).wrap_socket(connection, server_hostname="localhost") as wrapped,
        ):
            wrapped.sendall(b"nonsense\r\n\r\n")
            assert wrapped.recv(65536).startswith(b"HTTP/1.1 400 ")


def test_without_tls_browsers_are_told_nothing_of_it(client):
    assert "strict-transport-security" not in client.get("/health").headers


def test_files_that_do_not_fit_are_named(tmp_path):
    certfile, keyfile = write_pair(tmp_path)
    other_cert, other_key = write_pair(tmp_path, "other")
    _, closed_key = write_pair(tmp_path, "closed", passphrase=b"secret")
    cases = [
        (tmp_path / "none.pem", keyfile, r"certfile .*none\.pem cannot be read: .*; give --certfile a PEM file"),
        (certfile, tmp_path / "none.key", r"keyfile .*none\.key cannot be read: no such file"),
        (tmp_path, keyfile, "certfile .* cannot be read: is a directory"),
        (certfile, other_key, r"key in .*other\.key does not belong to the certificate in .*server\.pem"),
        (other_cert, None, r"no private key in .*other\.pem"),
        (keyfile, keyfile, r"certfile .*server\.key has no certificate"),
        (certfile, certfile, r"no private key in .*server\.pem"),
        (certfile, closed_key, "has a passphrase; write it without one"),
    ]
    for cert, key, message in cases:
        with pytest.raises(ConfigError, match=message):
            Certificate(cert, key)


def test_a_key_without_a_certificate_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="set certfile too"):
        Certificate.of(ServerConfig(keyfile=str(tmp_path / "k")))


def test_a_new_certificate_is_shown_to_new_connections_and_a_broken_one_is_not(model_path, tmp_path):
    certfile, keyfile = write_pair(tmp_path)
    certificate = Certificate(certfile, keyfile)
    first = certfile.read_bytes()
    new_cert, new_key = write_pair(tmp_path, "new")
    certfile.write_bytes(new_cert.read_bytes())
    with pytest.raises(ConfigError, match="does not belong"):
        certificate.renew()
    assert shown_by(certificate.context) == first
    keyfile.write_bytes(new_key.read_bytes())
    certificate.renew()
    assert shown_by(certificate.context) == new_cert.read_bytes()


def shown_by(context: ssl.SSLContext) -> bytes:
    """Returns the certificate that a server with the context shows, by a handshake in memory."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    asking.check_hostname, asking.verify_mode = False, ssl.CERT_NONE
    client = asking.wrap_bio(to_client, to_server)
    server = context.wrap_bio(to_server, to_client, server_side=True)
    for side in (client, server, client):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    return ssl.DER_cert_to_PEM_cert(client.getpeercert(binary_form=True)).encode()


def status_error(url, capsys):
    with pytest.raises(SystemExit):
        main(["cluster", "status", url])
    return capsys.readouterr().err


def test_a_client_says_what_is_wrong_with_tls_and_how_a_certificate_is_trusted(model_path, tmp_path, capsys, monkeypatch):
    with serving_script(model_path, ScriptedEngine(says("ok")), config=config_for(*write_pair(tmp_path))) as server:
        assert "is not trusted: self-signed certificate; to trust it, name" in status_error(local(server.url), capsys)
        with pytest.raises(ConfigError, match=r"is not trusted: self-signed certificate; .* in SSL_CERT_FILE=FILE\.pem"):
            asyncio.run(find_model(local(server.url)))
        plain = server.url.replace("https://", "http://")
        assert "hung up without an answer; if it speaks TLS, use https://" in status_error(plain, capsys)
        with pytest.raises(ConfigError, match="if it speaks TLS, use https://"):
            asyncio.run(find_model(plain))
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "server.pem"))
        assert asyncio.run(find_model(local(server.url))) == MODEL
        assert "not valid for '127.0.0.1'; " in status_error(server.url, capsys)  # the certificate is for localhost
    with serving_script(model_path, ScriptedEngine(says("ok"))) as server:
        assert "check that the port speaks TLS, or use http://" in status_error(server.url.replace("http:", "https:"), capsys)
