"""Files that were changed and are as before again: their digests are equal, and a node may have loaded others meanwhile."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cloister.trust.attestation import AttestationError
from cloister.trust.attestation.measuring import measure_model
from cloister.trust.attestation.unchanged_files import FilesChangedError, UnchangedFiles


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
        asyncio.run(files.check())


def test_a_blob_that_a_link_leads_to_counts(model: Path) -> None:
    files = UnchangedFiles([model])
    time.sleep(0.02)
    (model.parent / "blob").write_bytes(bytes(100))
    with pytest.raises(AttestationError, match=r"weights\.bin"):
        asyncio.run(files.check())


def test_reading_changes_nothing_and_other_files_are_of_no_concern(model: Path) -> None:
    files = UnchangedFiles([model, model.parent / "absent"])
    (model / "chat_template.jinja").read_bytes()
    (model.parent / "blob").read_bytes()
    (model.parent / "neighbour").write_text("new")
    asyncio.run(files.check())


def test_a_file_that_was_absent_has_to_stay_away(model: Path) -> None:
    files = UnchangedFiles([model, model.parent / "absent"])
    (model.parent / "absent").write_text("{}")
    with pytest.raises(AttestationError, match="absent was changed"):
        asyncio.run(files.check())


def test_a_folder_that_was_absent_has_to_stay_away_and_is_not_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = UnchangedFiles([model.parent / "absent"])
    (model.parent / "absent").mkdir()
    monkeypatch.delattr(os, "scandir")
    with pytest.raises(AttestationError, match="absent was changed"):
        asyncio.run(files.check())


def test_a_file_that_came_and_went_is_noticed(model: Path) -> None:
    files = UnchangedFiles([model / "weights.bin", model / "generation_config.json"], [model])
    time.sleep(0.02)
    (model / "generation_config.json").write_text("{}")
    (model / "generation_config.json").unlink()
    with pytest.raises(AttestationError, match="was changed since this node was started"):
        asyncio.run(files.check())


def load(files: UnchangedFiles, meanwhile: Callable[[], object] = lambda: None) -> None:
    async def main() -> None:
        async with files.guard_load():
            meanwhile()

    time.sleep(0.02)
    asyncio.run(main())


def test_nothing_is_loaded_from_a_file_that_was_changed(model: Path) -> None:
    files, loads = UnchangedFiles([model]), []
    (model / "chat_template.jinja").write_text("another")
    with pytest.raises(FilesChangedError, match="chat_template"):
        load(files, lambda: loads.append(1))
    assert not loads


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_and_put_back_during_a_load_is_noticed(model: Path, change: Callable[[Path], None]) -> None:
    files = UnchangedFiles([model])
    load(files)
    with pytest.raises(FilesChangedError):
        load(files, lambda: change(model))


def test_a_folder_may_get_and_lose_files_between_loads(model: Path) -> None:
    files = UnchangedFiles([model / "weights.bin", model / "generation_config.json"], [model])
    (model / "another.gguf").write_text("")
    add_and_remove(model)
    load(files)


def test_what_no_loader_reads_may_change(model: Path) -> None:
    for name in (".git", ".cache"):
        (model / name).mkdir()
    files = UnchangedFiles([model])
    (model / ".git" / "index").write_text("")
    (model / ".cache" / "huggingface").mkdir()
    asyncio.run(files.check())
    (model / ".DS_Store").write_text("")
    load(files)


def test_a_link_to_a_folder_is_refused_as_when_it_is_measured(model: Path) -> None:
    (model / "more").symlink_to(model / "drafters")
    with pytest.raises(AttestationError, match="more is a link to a folder"):
        UnchangedFiles([model])


def test_a_folder_that_cannot_be_read_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scandir = os.scandir

    def refuse(path: str) -> object:
        if str(path).endswith("drafters"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)  # root, who runs tests, may read all
    with pytest.raises(AttestationError, match="drafters: Permission denied"):
        UnchangedFiles([model])


def test_a_file_system_that_does_not_answer_ends_the_wait_and_blocks_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, answer, lstat = UnchangedFiles([model], timeout_s=1.5), threading.Event(), os.lstat

    def hang(name: str) -> os.stat_result:
        answer.wait(300)
        return lstat(name)

    async def main() -> int:
        checking, num_turns = asyncio.create_task(files.check()), 0
        while not checking.done():
            await asyncio.sleep(0.01)
            num_turns += 1
        with pytest.raises(FilesChangedError, match=r"did not answer within 1\.5 s"):
            checking.result()
        return num_turns

    monkeypatch.setattr(os, "lstat", hang)
    try:
        assert asyncio.run(main()) > 3
    finally:
        answer.set()
