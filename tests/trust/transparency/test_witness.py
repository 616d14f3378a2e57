"""Witnesses: what they cosign, what they do not, and that no crash or race makes them forget."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloister.trust.transparency.log import Log
from cloister.trust.transparency.note import Checkpoint, Kind, Note, PrivateKey, cosigned_at, parse_signatures
from cloister.trust.transparency.witness import SIZE_TYPE, CosignResponse, Witness, encode_request
from cloister.types.errors import ConfigError

NOW = 1_790_000_000.0
LOG = PrivateKey.generate("log.example", Kind.NOTE)
KEY = PrivateKey.generate("witness.example", Kind.COSIGNATURE)


@pytest.fixture
def log(tmp_path: Path) -> Log:
    log = Log.create(tmp_path / "log", LOG)
    log.append([b"one", b"two", b"three"])
    return log


@pytest.fixture
def witness(tmp_path: Path) -> Witness:
    return Witness(tmp_path / "witness", KEY, [LOG.public])


def ask(witness: Witness, log: Log, old: int) -> CosignResponse:
    checkpoint, note = log.checkpoint()
    return witness.add_checkpoint(encode_request(old, log.prove_consistency(old, checkpoint.size), note), NOW)


def test_a_witness_cosigns_a_log_that_only_grows(log: Log, witness: Witness) -> None:
    for old in (0, 3, 5, 5):
        answer = ask(witness, log, old)
        assert answer.status == 200
        note = log.checkpoint()[1].add(*parse_signatures(answer.body))
        assert cosigned_at(note, [KEY.public]) == {KEY.public: int(NOW)}
        if old == 0:
            log.append([b"more", b"and more"])
    assert witness.known(LOG.public) == log.checkpoint()[0]


def test_a_witness_says_which_size_it_knows(log: Log, witness: Witness, tmp_path: Path) -> None:
    ask(witness, log, 0)
    log.append([b"more"])
    again = Witness(tmp_path / "witness", KEY, [LOG.public])  # the state is on disk
    for old in (0, 2, 4):
        assert ask(again, log, old) == CosignResponse(409, "3\n", SIZE_TYPE)
    assert ask(again, log, 3).status == 200


def test_a_witness_does_not_cosign_a_second_history(log: Log, witness: Witness, tmp_path: Path) -> None:
    ask(witness, log, 0)
    other = Log.create(tmp_path / "other", LOG)
    other.append([b"one", b"two", b"another"])
    assert ask(witness, other, 3) == CosignResponse(409, "3\n", SIZE_TYPE)
    other.append([b"more"])
    assert ask(witness, other, 3).status == 422
    checkpoint, note = log.checkpoint()
    assert witness.add_checkpoint(encode_request(4, [], note), NOW).status == 400
    assert witness.known(LOG.public) == checkpoint


def test_a_witness_hears_only_logs_that_it_watches(log: Log, witness: Witness) -> None:
    text = str(Checkpoint("other.example", 0, bytes(32)))
    stranger = PrivateKey.generate("other.example", Kind.NOTE)
    assert witness.add_checkpoint(encode_request(0, [], Note(text).sign(stranger)), NOW).status == 404
    forger = PrivateKey.generate("log.example", Kind.NOTE)
    forged = Note(log.checkpoint()[1].text).sign(forger)
    assert witness.add_checkpoint(encode_request(0, [], forged), NOW).status == 403


@pytest.mark.parametrize(
    "change",
    [
        (b"old 0", b"old 00"),
        (b"old 0", b"old x"),
        (b"old 0", b"old -1"),
        (b"old 0", b"new 0"),
        (b"old 0\n", b"old 0\nnot base64\n"),
        (b"old 0\n", b"old 0\nAAAA\n"),
        (b"\n\n", b"\n"),
        (b"old 0", b"old \xff"),
        (b"old 0\n", b"old 0\n" + b"A" * 43 * 64 + b"=\n"),
        (b"old 0", b" " * 40_000),
    ],
)
def test_a_malformed_request_is_refused_and_changes_nothing(log: Log, witness: Witness, change: tuple[bytes, bytes]) -> None:
    body = encode_request(0, [], log.checkpoint()[1])
    changed = body.replace(*change, 1)
    assert changed != body
    assert witness.add_checkpoint(changed, NOW).status == 400
    assert witness.known(LOG.public).size == 0


def test_a_witness_that_cannot_keep_its_state_does_not_cosign(
    log: Log, witness: Witness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", fail)
        with pytest.raises(ConfigError, match="No space left"):
            ask(witness, log, 0)
    assert witness.known(LOG.public).size == 0


def test_a_damaged_state_is_not_taken_for_a_first_time(log: Log, witness: Witness, tmp_path: Path) -> None:
    ask(witness, log, 0)
    (state,) = (tmp_path / "witness").glob("*.checkpoint")
    state.write_text(state.read_text()[:-8])
    with pytest.raises(ConfigError, match="damaged"):
        ask(witness, log, 0)


def test_a_key_of_a_log_is_no_witness_and_the_other_way_round(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="witness"):
        Witness(tmp_path / "witness", LOG, [])
    with pytest.raises(ConfigError, match="log"):
        Log(tmp_path / "log", KEY)
