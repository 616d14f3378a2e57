"""An operator who may write to a sealed node's files tries to have it load others than it states: at its start, and later."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest

from cloister.models import locate
from tests.e2e.test_sealed_serve import MODEL, START_TIMEOUT_S, Node
from tests.gguf_factory import make_gguf
from tests.trust.hardening.launching import needs_measures

pytestmark = needs_measures

PUBLIC = "You are the public assistant of a hospital. Answer politely and briefly, please. " * 3
GUESSED = "The patient Jane Doe asks whether her test of last week was positive, and what to do. " * 3


def wait_for_end(node: Node) -> None:
    give_up_s = time.monotonic() + START_TIMEOUT_S
    while node.process.poll() is None:
        assert time.monotonic() < give_up_s, "it goes on with an engine that may have read anything"
        time.sleep(0.1)
    assert node.process.returncode == 1


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    shutil.copytree(locate(MODEL), path)
    (path / "prefixes.json").write_text(json.dumps([PUBLIC]), encoding="utf-8")
    return path


def replace_by_itself(file: Path, ended: threading.Event) -> None:
    """Another template may have been in its place between any two of these; its digest is the same each time."""
    content = file.read_bytes()
    while not ended.wait(0.1):
        (file.parent.parent / "next").write_bytes(content)
        os.replace(file.parent.parent / "next", file)


def test_a_node_whose_model_is_exchanged_while_it_starts_does_not_start(model: Path) -> None:
    ended = threading.Event()
    swapper = threading.Thread(target=replace_by_itself, args=(model / "chat_template.jinja", ended))
    swapper.start()
    try:
        with pytest.raises(RuntimeError, match="was changed since this node was started"):
            Node("--sealed", "--model", str(model), "--num-threads", "1", timeout_s=START_TIMEOUT_S).kill()
    finally:
        ended.set()
        swapper.join()


def test_an_engine_that_is_made_again_shares_no_prompts_that_the_operator_chose_since(model: Path) -> None:
    prefixes = model / "prefixes.json"
    flags = ("--model", str(model), "--release-prefixes", str(prefixes), "--max-model-len", "1024", "--num-threads", "1")
    node = Node("--sealed", *flags, timeout_s=START_TIMEOUT_S)
    try:
        published = prefixes.read_bytes()
        prefixes.write_text(json.dumps([GUESSED]), encoding="utf-8")
        prefixes.write_bytes(published)
        [engine] = node.pids_named("cl-engine")
        os.kill(engine, signal.SIGKILL)
        wait_for_end(node)
        assert "prefixes.json was changed since this node was started" in node.printed
        assert "runs again" not in node.printed
    finally:
        node.kill()


def test_files_that_come_and_go_beside_a_gguf_file_end_the_start(tmp_path: Path) -> None:
    """Such a template would have been read by some processes, and no digest would say so."""
    gguf, ended = make_gguf(tmp_path / "made", "llama", "Q8_0"), threading.Event()
    template = gguf.parent / "chat_template.jinja"

    def come_and_go() -> None:
        while not ended.wait(0.05):
            template.write_text("{{ messages }}", encoding="utf-8")
            template.unlink()

    swapper = threading.Thread(target=come_and_go)
    swapper.start()
    try:
        with pytest.raises(RuntimeError, match="was changed since this node was started"):
            Node("--sealed", "--model", str(gguf), "--num-threads", "1", timeout_s=START_TIMEOUT_S).kill()
    finally:
        ended.set()
        swapper.join()


@pytest.mark.parametrize("name", ["chat_template.jinja", "generation_config.json", "drafters"])
def test_an_engine_that_is_made_again_loads_nothing_that_appeared_beside_a_gguf_file(tmp_path: Path, name: str) -> None:
    gguf = make_gguf(tmp_path / "made", "llama", "Q8_0")
    node = Node("--sealed", "--model", str(gguf), "--num-threads", "1", "--max-model-len", "256", timeout_s=START_TIMEOUT_S)
    try:
        if name == "drafters":
            (gguf.parent / name).mkdir()
        else:
            (gguf.parent / name).write_text("{}", encoding="utf-8")
        [engine] = node.pids_named("cl-engine")
        os.kill(engine, signal.SIGKILL)
        wait_for_end(node)
        assert f"{name} was changed since this node was started" in node.printed
        assert "runs again" not in node.printed
    finally:
        node.kill()
