"""Files that were changed and are as before again: their digests are equal, and a node may have loaded others meanwhile."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cloister.trust.attestation import AttestationError
from cloister.trust.attestation.measuring import measure_model
from cloister.trust.attestation.unchanged_files import UnchangedFiles


def write_back(model: Path) -> None:
    file = model / "chat_template.jinja"
    before, times = file.read_bytes(), file.stat()
    file.write_bytes(b"another")
    file.write_bytes(before)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def replace_and_put_back(model: Path) -> None:
    file, kept = model / "chat_template.jinja", model.parent / "kept"
    os.link(file, kept)
    (model.parent / "other").write_bytes(b"another")
    os.replace(model.parent / "other", file)
    os.replace(kept, file)


def add_and_remove(model: Path) -> None:
    (model / "drafters" / "new.json").write_text("{}")
    (model / "drafters" / "new.json").unlink()


def exchange_folders(model: Path) -> None:
    aside = model.parent / "aside"
    model.rename(aside)
    model.mkdir()
    model.rmdir()
    aside.rename(model)


def lead_elsewhere(model: Path) -> None:
    (model / "weights.bin").unlink()
    (model / "weights.bin").symlink_to(model.parent / "same")


CHANGES = (write_back, replace_and_put_back, add_and_remove, exchange_folders, lead_elsewhere)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    (path / "drafters").mkdir(parents=True)
    (path / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "blob").write_bytes(bytes(100))
    (tmp_path / "same").write_bytes(bytes(100))
    (path / "weights.bin").symlink_to(tmp_path / "blob")
    return path


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_changed_and_put_back_is_noticed(model: Path, change: Callable[[Path], None]) -> None:
    digest, files = measure_model(model), UnchangedFiles([model])
    time.sleep(0.02)  # times of change have the resolution of the kernel's clock
    change(model)
    assert measure_model(model) == digest, "digests do not show it"
    with pytest.raises(AttestationError, match="was changed since this node was started"):
        files.check()


def test_a_blob_that_a_link_leads_to_counts(model: Path) -> None:
    files = UnchangedFiles([model])
    time.sleep(0.02)
    (model.parent / "blob").write_bytes(bytes(100))
    with pytest.raises(AttestationError, match=r"weights\.bin"):
        files.check()


def test_reading_changes_nothing_and_other_files_are_of_no_concern(model: Path) -> None:
    files = UnchangedFiles([model, model.parent / "absent"])
    (model / "chat_template.jinja").read_bytes()
    (model.parent / "blob").read_bytes()
    (model.parent / "neighbour").write_text("new")
    files.check()


def test_a_file_that_was_absent_has_to_stay_away(model: Path) -> None:
    files = UnchangedFiles([model, model.parent / "absent"])
    (model.parent / "absent").write_text("{}")
    with pytest.raises(AttestationError, match="absent was changed"):
        files.check()
