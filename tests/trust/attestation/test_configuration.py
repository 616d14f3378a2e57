"""The configuration of a node: whatever shapes an answer is in it, and a client is told which entry differs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import msgspec
import pytest

from cloister.launch.sealed import loaded_beside
from cloister.trust.attestation import AttestationError, AttestationPolicy, Statement
from cloister.trust.attestation.base import Outcome
from cloister.trust.attestation.configuration import LEFT_OUT, configuration_digest, describe_settings
from cloister.trust.attestation.evidence import EvidenceError, read_statement
from cloister.trust.attestation.measuring import measure_configuration, measure_package_files
from cloister.trust.attestation.software import SoftwareAttester
from cloister.trust.attestation.verify import verify_evidence
from cloister.types.config import ATTESTING, EngineConfig, ServerConfig

NOW = 1_790_000_000


class Machine:
    """What a node is started with: files in a folder, and settings."""

    def __init__(self, folder: Path) -> None:
        self.model, self.package = folder / "model", folder / "package"
        files = {
            "model/model-1.safetensors": "weights", "model/model-2.safetensors": "more weights", "model/tokenizer.json": "{}",
            "model/chat_template.jinja": "{{ x }}", "model/config.json": "{}", "model/drafters/medusa/heads.json": "{}",
            "adapter/adapter_config.json": "{}", "adapter/adapter_model.safetensors": "rank", "small/model.safetensors": "s",
            "store/tokens.bin": "text",
            "model/system.json": "[]", "model/other.json": "[1]", "package/app.py": "pass",
            "package/embedded/model.safetensors": "w",
            "package/_native.so": "code",
        }  # fmt: skip
        for name, text in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        self.engine = EngineConfig(
            model=str(self.model), lora=f"claims={folder / 'adapter'}", draft_model=str(folder / "small"),
            datastore=str(folder / "store"), profile="private", release_prefixes=str(self.model / "system.json"),
        )  # fmt: skip
        self.server = ServerConfig(sealed=True)

    def measure(self) -> dict[str, str]:
        found = measure_configuration(
            describe_settings(self.engine, self.server), self.model, loaded_beside(self.engine, self.model)
        )
        return found | measure_package_files(self.package)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def judge(stated: dict[str, str], published: dict[str, str], profile: str = "private") -> tuple[Outcome, str]:
    """Returns what a client finds of a node's configuration."""
    statement = Statement(
        release="ab" * 32, model="cd" * 32, profile=profile, profile_digest="ef" * 32, configuration=stated,
        hardening={"front.seccomp": "applied: on"}, keys=b"keys", capacity=1, not_before=NOW, not_after=NOW + 60,
    )  # fmt: skip
    policy = AttestationPolicy(profile=profile, accept_software=True, configuration=published)
    findings = verify_evidence(SoftwareAttester().attest(statement.encode()), policy, NOW)
    (found,) = [step for step in findings if step.slug == "configuration"]
    return found.outcome, found.text


def write(name: str) -> Callable[[Machine], None]:
    def change(machine: Machine) -> None:
        (machine.model.parent / name).write_text("changed")

    return change


def rename_adapter(machine: Machine) -> None:
    machine.engine = replace(machine.engine, lora=(machine.engine.lora or "").replace("claims=", "cloister-5m="))


def drop_datastore(machine: Machine) -> None:
    machine.engine = replace(machine.engine, datastore=None)


def name_other_prefixes(machine: Machine) -> None:
    machine.engine = replace(machine.engine, release_prefixes=str(machine.model / "other.json"))


def name_no_prefixes(machine: Machine) -> None:
    machine.engine = replace(machine.engine, release_prefixes=None)


def add_file(machine: Machine) -> None:
    (machine.model / "drafters" / "medusa" / "heads.safetensors").write_text("heads")


FLIPS: dict[str, tuple[Callable[[Machine], None], str]] = {
    "weights": (write("model/model-2.safetensors"), "model/*.safetensors is"),
    "tokenizer": (write("model/tokenizer.json"), "model/tokenizer.json is"),
    "chat template": (write("model/chat_template.jinja"), "model/chat_template.jinja is"),
    "drafter": (write("model/drafters/medusa/heads.json"), "model/drafters/medusa/heads.json is"),
    "a drafter more": (add_file, "model/drafters/medusa/*.safetensors is"),
    "adapter": (write("adapter/adapter_model.safetensors"), "lora claims/*.safetensors is"),
    "adapter's name": (rename_adapter, "lora cloister-5m/adapter_config.json is"),
    "small model": (write("small/model.safetensors"), "draft model 0/*.safetensors is"),
    "datastore": (write("store/tokens.bin"), "datastore/*.bin is"),
    "no datastore": (drop_datastore, "datastore/*.bin is absent"),
    "other prefixes": (name_other_prefixes, "release prefixes/other.json is"),
    "no prefixes": (name_no_prefixes, "release prefixes/system.json is absent"),
    "code": (write("package/app.py"), "package is"),
    "embedded model": (write("package/embedded/model.safetensors"), "package is"),
    "native library": (write("package/_native.so"), "native library is"),
}


def test_the_same_machine_measures_the_same(machine: Machine, tmp_path: Path) -> None:
    published = machine.measure()
    other = Machine(tmp_path / "elsewhere")
    assert other.measure() == published
    outcome, text = judge(other.measure(), published)
    assert outcome is Outcome.PROVED
    assert configuration_digest(published)[:16] in text
    assert str(tmp_path) not in json.dumps(published)


@pytest.mark.parametrize("flip", FLIPS)
def test_a_client_is_told_which_file_differs(machine: Machine, flip: str) -> None:
    published = machine.measure()
    change, phrase = FLIPS[flip]
    change(machine)
    outcome, text = judge(machine.measure(), published)
    assert outcome is Outcome.FAILED
    assert phrase in text


def test_another_interpreter_is_told(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published = machine.measure()
    python = tmp_path / "python"
    python.write_bytes(b"another one")
    monkeypatch.setattr("sys.executable", str(python))
    assert "python is" in judge(machine.measure(), published)[1]


SETTINGS = [(cls, field.name) for cls in (EngineConfig, ServerConfig) for field in fields(cls) if field.name not in LEFT_OUT]


@pytest.mark.parametrize(("cls", "name"), SETTINGS, ids=[name for _, name in SETTINGS])
def test_a_client_is_told_which_setting_differs(cls: type[object], name: str) -> None:
    """Such as `quant`, which lowers the quality of answers, or `served_model_name`, which says who answers."""
    configs = {EngineConfig: EngineConfig(), ServerConfig: ServerConfig()}
    published = describe_settings(*configs.values())
    value = getattr(configs[cls], name)
    other = (not value) if isinstance(value, bool) else "other" if value is None or isinstance(value, str) else value + 1
    configs[cls] = replace(configs[cls], **{name: other})
    outcome, text = judge(describe_settings(*configs.values()), published)
    assert outcome is Outcome.FAILED
    assert f"setting {name} is {msgspec.json.encode(other).decode()} and was published as" in text


def test_what_is_left_out_of_a_configuration_is_a_setting_that_exists() -> None:
    names = {field.name for cls in (EngineConfig, ServerConfig) for field in fields(cls)}
    assert LEFT_OUT.keys() <= names
    assert LEFT_OUT.keys() >= {*ATTESTING}


def test_a_configuration_that_nobody_published_is_said_to_be_not_proved() -> None:
    outcome, text = judge({"setting quant": '"int4"'}, {})
    assert outcome is Outcome.NOT_PROVED
    assert configuration_digest({"setting quant": '"int4"'}) in text


def test_a_node_that_states_no_configuration_is_refused_where_one_was_published() -> None:
    outcome, text = judge({}, {"setting quant": '"none"'})
    assert outcome is Outcome.FAILED
    assert 'setting quant is absent and was published as "none"' in text


def test_what_a_hostile_node_states_cannot_write_to_a_terminal() -> None:
    with pytest.raises(EvidenceError):
        judge({"setting quant": "\x1b[2J"}, {})
    with pytest.raises(EvidenceError):
        read_statement(b'{"configuration":{"a\\u001b":"b"}}')


def test_more_files_than_a_statement_holds_are_an_error_that_says_so(machine: Machine) -> None:
    for number in range(400):
        (machine.model / f"note-{number:04}-{'x' * 40}.txt").write_text("x")
    with pytest.raises(AttestationError, match="too many files"):
        machine.measure()


def test_compiled_python_beside_the_code_is_not_the_packages(machine: Machine) -> None:
    before = measure_package_files(machine.package)
    cache = machine.package / "__pycache__"
    cache.mkdir()
    shutil.copy(machine.package / "app.py", cache / "app.pyc")
    assert measure_package_files(machine.package) == before
