"""Measuring: one changed byte of code, model or rules is another digest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cloister.policy import Profile
from cloister.trust.attestation import AttestationError, measuring
from cloister.trust.attestation.measuring import (
    _beside,
    encode_manifest,
    find_foreign,
    measure_file,
    measure_loaded,
    measure_model,
    measure_profile,
    read_manifest,
)

PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
import extra_module
from cloister.trust.attestation.measuring import encode_manifest, measure_code
sys.stdout.buffer.write(encode_manifest(measure_code()))
"""


def measure_elsewhere(folder: Path) -> dict[str, str]:
    run = subprocess.run([sys.executable, "-c", PROGRAM, str(folder)], capture_output=True, check=True, timeout=300)
    return read_manifest(run.stdout)


def test_a_process_measures_its_modules_its_interpreter_and_its_libraries(tmp_path: Path):
    module = tmp_path / "extra_module.py"
    module.write_text("x = 1\n")
    measured = measure_elsewhere(tmp_path)
    assert measured[str(module)] == measure_file(module)
    assert "site/cloister/trust/attestation/measuring.py" in measured
    assert "python/json/__init__.py" in measured
    assert str(Path(sys.executable).resolve()) in measured
    assert any("libc" in name for name in measured)
    module.write_text("x = 2\n")
    again = measure_elsewhere(tmp_path)
    assert find_foreign(again, measured) == [str(module)]
    assert find_foreign(measured, measured) == []
    del measured[str(module)]
    assert find_foreign(again, measured) == [str(module)], "what the release does not know is foreign too"


def test_libraries_that_lie_beside_a_mapped_one_are_in_a_release_too(tmp_path: Path):
    mapped = tmp_path / "libone.so.1"
    for name in ("libone.so.1", "libtwo.so", "readme.txt"):
        (tmp_path / name).write_text(name)
    assert sorted(_beside([mapped])) == [mapped, tmp_path / "libtwo.so"]
    assert not list(_beside([Path(json.__file__)])), "Python's own directories are walked whole"


def test_every_profile_rules_something_else():
    digests = {measure_profile(profile) for profile in Profile}
    assert len(digests) == len(Profile)
    assert measure_profile("private") == measure_profile("private")


def test_a_model_is_measured_with_every_file_and_name(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    first = measure_model(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{ }")
    second = measure_model(tmp_path)
    (tmp_path / "tokenizer.json").rename(tmp_path / "other.json")
    third = measure_model(tmp_path)
    assert len({first, second, third}) == 3
    assert measure_model(tmp_path / "config.json") not in {first, second, third}


def test_files_in_folders_of_a_model_are_measured(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    bare = measure_model(tmp_path)
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    mean = measure_model(tmp_path)
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": false}')
    assert len({bare, mean, measure_model(tmp_path)}) == 3


def test_a_model_whose_folder_is_a_link_is_refused(tmp_path: Path):
    (tmp_path / "model").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "model" / "1_Pooling").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(AttestationError, match="is a link to a folder"):
        measure_model(tmp_path / "model")


def test_what_cannot_be_measured_is_refused(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "additional_chat_templates").mkdir()
    os.mkfifo(tmp_path / "additional_chat_templates" / "default.jinja")
    with pytest.raises(AttestationError, match="is no file"):
        measure_model(tmp_path)
    with pytest.raises(AttestationError, match="cannot measure"):
        measure_model(tmp_path / "nowhere")


def test_whatever_is_loaded_beside_a_model_makes_another_digest(tmp_path: Path):
    for name in ("model", "adapter"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text(name)
    model, adapter = tmp_path / "model", tmp_path / "adapter"
    alone, named = measure_loaded(model, {}), measure_loaded(model, {"lora ann": adapter})
    renamed, drafting = measure_loaded(model, {"lora base": adapter}), measure_loaded(model, {"draft model 0": adapter})
    (adapter / "weights").write_text("others")
    assert alone == measure_model(model)
    assert len({alone, named, renamed, drafting, measure_loaded(model, {"lora ann": adapter})}) == 5


def test_what_cannot_be_read_is_an_error(tmp_path: Path):
    with pytest.raises(AttestationError, match="cannot measure"):
        measure_file(tmp_path / "absent")
    with pytest.raises(AttestationError, match="manifest"):
        read_manifest(b"[]")


def test_a_manifest_is_canonical():
    encoded = encode_manifest({"b": "1", "a": "2"})
    assert encoded == json.dumps({"a": "2", "b": "1"}, separators=(",", ":")).encode()
    assert read_manifest(encoded) == {"a": "2", "b": "1"}


def test_files_that_python_runs_when_it_starts_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measuring, "_roots", lambda: [(tmp_path, "site")])
    assert "site/hooked.pth" not in measuring.measure_code()
    (tmp_path / "hooked.pth").write_text("import os\n")
    digest = measure_file(tmp_path / "hooked.pth")
    assert measuring.measure_code()["site/hooked.pth"] == digest
    assert measuring.measure_installed()["site/hooked.pth"] == digest, "a release made here has it"
