"""`cloister release image` prints what the hardware will measure; `release make` takes it, and clients compare with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cloister.cli import release
from cloister.cli.release import read_launch
from cloister.types.errors import ConfigError
from tests.attestation_vectors import LAUNCH


@pytest.fixture
def image(tmp_path: Path) -> list[str]:
    files = {"kernel": b"kernel", "initrd": b"initrd", "command-line": b"ro root=/dev/dm-0\n"}
    arguments = ["--firmware", str(LAUNCH / "ovmf_AmdSev_suffix.bin")]
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        arguments += [f"--{name}", str(tmp_path / name)]
    return arguments


def run(*arguments: str) -> Result:
    return CliRunner().invoke(release.app, ["image", *arguments])


def test_an_image_is_measured_as_sev_snp_measure_says(image):
    vectors = json.loads((LAUNCH / "snp.json").read_bytes())
    (vector,) = [one for one in vectors if one["cpu"] == "EPYC-Milan"]
    result = run(*image, "--vcpus", "3", "--cpu", "EPYC-Milan")
    assert result.output == f"sev-snp={vector['measurement']}\n"


def test_what_is_printed_is_what_a_release_takes(tmp_path: Path):
    (tmp_path / "launch").write_text("sev-snp=AA\ntdx=bb\ntdx-rtmr1=cc\n")
    found = read_launch(["tdx-rtmr0=dd"], tmp_path / "launch")
    assert found == {"sev-snp": "aa", "tdx": "bb", "tdx-rtmr1": "cc", "tdx-rtmr0": "dd"}


def test_a_name_that_is_no_register_is_refused():
    with pytest.raises(Exception, match="names are"):
        read_launch(["tdx-rtmr-1=cc"], None)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--cpu", "Skylake"], "EPYC-Milan"),
        (["--features", "snp"], "hex"),
        (["--vcpus", "0"], "1 to 512"),
        (["--kernel", "/nowhere"], "cannot read"),
        (["--command-line", __file__], "one line"),
        (["--kind", "tdx"], "cut short"),
    ],
)
def test_what_cannot_be_measured_is_said(image, arguments, said):
    result = run(*image, *arguments)
    assert result.exit_code != 0
    assert said in (str(result.exception) if isinstance(result.exception, ConfigError) else result.output)


def test_a_measurement_that_is_named_twice_is_refused(tmp_path: Path):
    (tmp_path / "launch").write_text("sev-snp=aa")
    with pytest.raises(Exception, match="twice"):
        read_launch(["sev-snp=bb"], tmp_path / "launch")
