"""Signed notes, keys, cosignatures and checkpoints."""

from __future__ import annotations

import pytest

from cloister.trust.transparency.merkle import EMPTY_ROOT
from cloister.trust.transparency.note import (
    Checkpoint,
    Kind,
    Note,
    PrivateKey,
    PublicKey,
    cosign,
    cosigned_at,
    open_checkpoint,
    parse_checkpoint,
    parse_note,
)
from cloister.trust.transparency.refusal import Reason, TransparencyError

# The example of C2SP signed-note: a key, and a note that it signed.
EXAMPLE_KEY = "example.com/foo+530d903a+AekyeRrm56hApGFkyQR4ZCbV54Id2LKaANYcrnKv3U2k"
EXAMPLE_NOTE = (
    "This is an example message.\n\n"
    "— example.com/foo Uw2QOkn8srV1yJGh2VYRlL1Tnagv1YEq6TfXppzi2ONncAlTgK7Ztg1ERYNZXsYjOBH3mFXmRKuwHjG1Yu72IneyaQM=\n"
)
LOG = PrivateKey.generate("log.example", Kind.NOTE)
WITNESS = PrivateKey.generate("witness.example/w1", Kind.COSIGNATURE)
CHECKPOINT = Checkpoint("log.example", 0, EMPTY_ROOT)


def refuse(act: object, *arguments: object) -> Reason:
    with pytest.raises(TransparencyError) as caught:
        act(*arguments)  # type: ignore[operator]
    return caught.value.reason


def test_the_published_note_verifies_under_the_published_key() -> None:
    key, note = PublicKey.parse(EXAMPLE_KEY), parse_note(EXAMPLE_NOTE)
    assert note.is_signed_by(key)
    assert str(note) == EXAMPLE_NOTE
    assert str(key) == EXAMPLE_KEY
    changed = parse_note(EXAMPLE_NOTE.replace("example message", "example Message"))
    assert refuse(changed.is_signed_by, key) == Reason.BAD_SIGNATURE


def test_keys_come_back_from_their_text_and_a_seed_is_not_in_a_repr() -> None:
    assert PrivateKey.parse(LOG.encode() + "\n") == LOG
    assert PublicKey.parse(str(LOG.public)) == LOG.public
    assert LOG.encode()[-20:] not in repr(LOG)
    assert "seed" not in repr(LOG)


@pytest.mark.parametrize("text", ["", "a+b", "log+00000000+AekyeRrm56hApGFkyQR4ZCbV54Id2LKaANYcrnKv3U2k", EXAMPLE_KEY[:-1]])
def test_what_is_not_a_key_is_refused(text: str) -> None:
    assert refuse(PublicKey.parse, text) == Reason.MALFORMED
    assert refuse(PrivateKey.parse, text) == Reason.MALFORMED


def test_a_signature_by_an_unknown_key_is_passed_over() -> None:
    other = PrivateKey.generate("log.example", Kind.NOTE)
    note = Note(str(CHECKPOINT)).sign(other)
    assert not note.is_signed_by(LOG.public)
    assert note.sign(LOG).is_signed_by(LOG.public)


@pytest.mark.parametrize(
    "text",
    [
        "no signatures\n",
        "text\n\n",
        "text\n\n— name\n",
        "text\n\n— name AAAA\n",
        "text\n\n— na+me AAAAAAA=\n",
        "text\n\n- name AAAAAAA=\n",
        "text\n\n— name AAAAAAA= \n",
        "te\rxt\n\n— name AAAAAAA=\n",
        "text\n\n— name AAAAAAB=\n",
        "text\n\n— name AAAAAAA=",
    ],
)
def test_what_is_not_a_signed_note_is_refused(text: str) -> None:
    assert refuse(parse_note, text) == Reason.MALFORMED


def test_a_note_of_any_length_is_not_read() -> None:
    assert refuse(parse_note, "x" * 20_000 + "\n\n— name AAAAAAA=\n") == Reason.TOO_LARGE
    assert refuse(parse_note, "text\n\n" + "— name AAAAAAA=\n" * 33) == Reason.TOO_LARGE


def test_a_cosignature_holds_its_time() -> None:
    note = Note(str(CHECKPOINT)).sign(LOG)
    signed = parse_note(str(note.add(cosign(note.text, WITNESS, 1_790_000_000))))
    assert cosigned_at(signed, [WITNESS.public]) == {WITNESS.public: 1_790_000_000}
    assert cosigned_at(note, [WITNESS.public]) == {}
    line = signed.signatures[-1]
    later = note.add(type(line)(line.name, line.key_id, (1_790_000_001).to_bytes(8, "big") + line.signature[8:]))
    assert refuse(cosigned_at, later, [WITNESS.public]) == Reason.BAD_SIGNATURE
    assert refuse(cosigned_at, note.add(type(line)(line.name, line.key_id, b"short")), [WITNESS.public]) == Reason.BAD_SIGNATURE


def test_a_plain_signature_by_a_witness_is_no_cosignature_and_the_other_way_round() -> None:
    plain = PrivateKey(WITNESS.name, Kind.NOTE, WITNESS.seed)
    note = Note(str(CHECKPOINT)).sign(plain)
    assert cosigned_at(note, [WITNESS.public]) == {}
    assert plain.public.key_id != WITNESS.public.key_id


def test_a_checkpoint_is_of_one_log_and_signed_by_it() -> None:
    note = Note(str(CHECKPOINT)).sign(LOG)
    assert open_checkpoint(str(note), LOG.public) == (CHECKPOINT, note)
    twin = PrivateKey.generate("log.example", Kind.NOTE)
    assert refuse(open_checkpoint, str(note), twin.public) == Reason.BAD_LOG_SIGNATURE
    assert refuse(open_checkpoint, str(note), WITNESS.public) == Reason.OTHER_LOG
    forged = str(note).replace("\n0\n", "\n1\n")
    assert refuse(open_checkpoint, forged, LOG.public) == Reason.BAD_LOG_SIGNATURE


@pytest.mark.parametrize(
    "change", [("\n0\n", "\n00\n"), ("\n0\n", "\n-1\n"), ("U=\n", "U=\nmark\n"), ("U=\n", "U\n"), ("log.example", "")]
)
def test_a_checkpoint_has_one_form_and_no_room_for_marks(change: tuple[str, str]) -> None:
    assert parse_checkpoint(str(CHECKPOINT)) == CHECKPOINT
    changed = str(CHECKPOINT).replace(*change)
    assert changed != str(CHECKPOINT)
    assert refuse(parse_checkpoint, changed) == Reason.MALFORMED
