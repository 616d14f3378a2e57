"""What is wrong where a client and a server do not agree on TLS, from the exceptions of an HTTP library. No I/O."""

from __future__ import annotations

import ssl
from collections.abc import Iterator


def describe_tls_failure(url: str, error: BaseException) -> str | None:
    """Returns why no TLS connection came about and what to do; None if the error has another cause.

    Args:
        url: the address that was asked.
        error: what the HTTP library raised; its causes are read too.
    """
    for cause in _causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return (
                f"the certificate of {url} is not trusted: {cause.verify_message.rstrip('.')}; to trust it, name its "
                "authority's certificate (or itself) in SSL_CERT_FILE=FILE.pem; it must have the host as a subjectAltName"
            )
        if isinstance(cause, ssl.SSLError):
            return f"no TLS connection to {url} came about; check that the port speaks TLS, or use http://"
    # a server that reads a ClientHello's place and finds an HTTP request hangs up without a word
    if url.startswith("http://") and type(error).__name__ in ("RemoteProtocolError", "ReadError"):
        return f"the server at {url} hung up without an answer; if it speaks TLS, use https://"
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__
