"""Spent tokens in PostgreSQL, for gateways on several machines. Needs `cloister[stores]`.

After a connection failure it reconnects and repeats the statement once. If the first one was executed after all, the second
finds its row and the token counts as spent: a token may be lost, but is never spent twice.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from cloister.trust.tokens.spend import WAIT_S, SpendStoreError, missing_extra
from cloister.types.errors import ConfigError

_TABLE = """
CREATE TABLE IF NOT EXISTS cloister_spent (
    key_id bytea NOT NULL, token bytea NOT NULL, expires_at bigint NOT NULL, PRIMARY KEY (key_id, token)
)
"""
_ENDED = "CREATE TABLE IF NOT EXISTS cloister_ended (key_id bytea PRIMARY KEY)"
_EPOCHS = "CREATE TABLE IF NOT EXISTS cloister_epochs (log text PRIMARY KEY, number bigint NOT NULL)"
_NOTE = (
    "INSERT INTO cloister_epochs SELECT %(log)s, 0 WHERE %(known)s = 0 ON CONFLICT DO NOTHING",
    """
    UPDATE cloister_epochs SET number = GREATEST(number, %(number)s) WHERE log = %(log)s AND number >= %(known)s
    """,
)
_SPEND = """
INSERT INTO cloister_spent SELECT %(key_id)s, %(token)s, %(expires_at)s
WHERE NOT EXISTS (SELECT FROM cloister_ended WHERE key_id = %(key_id)s) ON CONFLICT DO NOTHING
"""
_FORGET = (
    "BEGIN",
    # A spend that waits for this lock takes its snapshot afterwards, so it sees the ended keys; this waits for earlier spends.
    "LOCK TABLE cloister_spent IN EXCLUSIVE MODE",
    """
    INSERT INTO cloister_ended SELECT key_id FROM cloister_spent GROUP BY key_id HAVING MAX(expires_at) <= %(now)s
    ON CONFLICT DO NOTHING
    """,
    "DELETE FROM cloister_spent WHERE key_id IN (SELECT key_id FROM cloister_ended)",
    "COMMIT",
)
# A reply before the row is on disk could lose it in a crash; a server may be configured that way.
_OPTIONS = f"-c synchronous_commit=on -c statement_timeout={int(WAIT_S * 1000)} -c lock_timeout={int(WAIT_S * 1000)}"
_MAX_IDLE = 4


class PostgresSpendStore:
    """Connects to a URL such as `postgresql://user@host/database`, and creates its table if needed.

    Raises:
        ConfigError: psycopg is not installed, or the server does not write to disk.
        SpendStoreError: the server does not respond, or the user may not create the table.
    """

    def __init__(self, url: str) -> None:
        try:
            import psycopg
        except ImportError:
            raise missing_extra("psycopg") from None
        self._psycopg: Any = psycopg
        self._url = url
        self._lock = threading.Lock()
        self._idle: list[Any] = []
        self._check_durable()
        # Two gateways may start at once.
        self._run("SELECT pg_advisory_lock(4803321)", _TABLE, _ENDED, _EPOCHS, "SELECT pg_advisory_unlock(4803321)")

    def spend(self, key_id: bytes, token_digest: bytes, expires_at: int) -> bool:
        return self._run(_SPEND, parameters={"key_id": key_id, "token": token_digest, "expires_at": expires_at}) == 1

    def forget(self, now: int) -> None:
        self._run(*_FORGET, parameters={"now": now})

    def note_epoch(self, log: str, known: int, number: int) -> bool:
        return self._run(*_NOTE, parameters={"log": log, "known": known, "number": number}) == 1

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _check_durable(self) -> None:
        try:
            connection = self._borrow()
            row = connection.execute("SHOW fsync").fetchone()
        except self._psycopg.Error as error:
            raise _unavailable(error) from None
        self._give_back(connection)
        if row != ("on",):
            self.close()
            raise ConfigError(
                "this PostgreSQL could forget a spent token; set in postgresql.conf: fsync = on", param="spend_store"
            )

    def _run(self, *statements: str, parameters: dict[str, object] | None = None) -> int:
        """Runs statements on a separate connection; returns the number of rows written by the last one."""
        for is_last_try in (False, True):
            try:
                connection = self._borrow()
                try:
                    for statement in statements:
                        count: int = connection.execute(statement, parameters).rowcount
                except BaseException:
                    with contextlib.suppress(self._psycopg.Error):
                        connection.close()
                    raise
            except self._psycopg.OperationalError as error:
                if is_last_try:
                    raise _unavailable(error) from None
            except self._psycopg.Error as error:
                raise _unavailable(error) from None
            else:
                self._give_back(connection)
                return count
        raise AssertionError("unreachable")

    def _borrow(self) -> Any:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return self._psycopg.connect(self._url, autocommit=True, connect_timeout=int(WAIT_S), options=_OPTIONS)

    def _give_back(self, connection: Any) -> None:
        with self._lock:
            if len(self._idle) < _MAX_IDLE:
                self._idle.append(connection)
                return
        connection.close()


def _unavailable(error: Exception) -> SpendStoreError:
    return SpendStoreError(f"the database of spent tokens gives no answer ({type(error).__name__}); try again later")
