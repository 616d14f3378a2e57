"""TLS: the context of a server's certificate, with errors that name the file at fault."""

from __future__ import annotations

import ssl
from pathlib import Path

from cloister.server.reload import WatchedFiles
from cloister.types.config import ServerConfig
from cloister.types.errors import ConfigError


class Certificate:
    """A certificate and its key, read from files. TLS 1.2 at least; no client certificates.

    Attributes:
        context: what connections are made with.

    Raises:
        ConfigError: a file is missing or of another kind, or they do not belong together.
    """

    def __init__(self, certfile: Path, keyfile: Path | None = None) -> None:
        self._certfile = certfile.expanduser()
        self._keyfile = keyfile.expanduser() if keyfile is not None else None
        self.context = self._load()

    @classmethod
    def of(cls, config: ServerConfig) -> Certificate | None:
        """Returns the certificate that the settings name, None for plain HTTP.

        Raises:
            ConfigError: it cannot be used, or there is a key without a certificate.
        """
        if config.certfile is None:
            if config.keyfile is not None:
                raise ConfigError("keyfile is the key of a certificate; set certfile too", param="keyfile")
            return None
        return cls(Path(config.certfile), Path(config.keyfile) if config.keyfile is not None else None)

    def source(self) -> WatchedFiles:
        """Returns it as something to read again."""
        paths = (self._certfile,) if self._keyfile is None else (self._certfile, self._keyfile)
        return WatchedFiles("certificate and its key", paths, self.renew)

    def renew(self) -> None:
        """Reads the files again, for connections from now on.

        Raises:
            ConfigError: they cannot be used; the former certificate stays.
        """
        self._load()  # tried apart, so that a broken file leaves the context as it was
        self._read_into(self.context)

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._read_into(context)
        return context

    def _read_into(self, context: ssl.SSLContext) -> None:
        _check_readable(self._certfile, "certfile")
        if self._keyfile is not None:
            _check_readable(self._keyfile, "keyfile")
        # The function keeps OpenSSL from asking for a passphrase on a terminal that nobody watches.
        try:
            context.load_cert_chain(self._certfile, self._keyfile, password=lambda: b"")
        except ssl.SSLError as error:
            raise self._explain(error) from None

    def _explain(self, error: ssl.SSLError) -> ConfigError:
        key = self._keyfile or self._certfile
        if "KEY_VALUES_MISMATCH" in str(error):
            return ConfigError(
                f"the key in {key} does not belong to the certificate in {self._certfile}; use the key it was made with",
                param="keyfile",
            )
        if b"BEGIN CERTIFICATE" not in self._certfile.read_bytes():
            return ConfigError(f"certfile {self._certfile} has no certificate; it must be in PEM", param="certfile")
        data = key.read_bytes()
        if b"PRIVATE KEY-----" not in data:
            return ConfigError(f"there is no private key in {key}; name its file, in PEM, with keyfile", param="keyfile")
        if b"ENCRYPTED" in data:
            return ConfigError(
                f"the private key in {key} has a passphrase; write it without one with: openssl pkey -in {key} -out KEY",
                param="keyfile",
            )
        return ConfigError(
            f"TLS cannot be set up with {self._certfile} and {key}: {error.reason or 'unknown reason'}; check both files",
            param="certfile",
        )


def _check_readable(path: Path, setting: str) -> None:
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise ConfigError(
            f"{setting} {path} cannot be read: {(error.strerror or 'unknown reason').lower()}", param=setting
        ) from None
