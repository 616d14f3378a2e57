from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from cloister.trust.transparency.trust import encode_trust
from tests.sealed_cloud import LoopbackCloud

EXAMPLE = Path(__file__).parents[2] / "examples" / "sealed.py"


def run(cloud: LoopbackCloud, directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (directory / "trust.json").write_bytes(encode_trust(cloud.trust))
    (directory / "key").write_text(f"{cloud.api_key}\n")
    given = ["--relay", cloud.relay_url, "--trust", str(directory / "trust.json"), "--api-key-file", str(directory / "key")]
    home = {**os.environ, "HOME": str(directory)}  # where the client remembers
    return subprocess.run([sys.executable, EXAMPLE, *given, *arguments], capture_output=True, text=True, timeout=300, env=home)


def test_the_first_steps_show_what_was_verified_and_the_answer(cloud: LoopbackCloud, tmp_path: Path) -> None:
    done = run(cloud, tmp_path, "--accept-software", "What is the Python module json?")
    assert done.returncode == 0, done.stderr
    assert "NOT PROVED: no hardware vouches" in done.stdout
    assert "Encode and decode the JSON format." in done.stdout
    assert "of epoch 1, after 1 draw(s)" in done.stdout


def test_the_first_steps_say_why_nothing_was_sent(cloud: LoopbackCloud, tmp_path: Path) -> None:
    done = run(cloud, tmp_path)
    assert done.returncode == 1
    assert "EvidenceRefusedError" in done.stderr
    assert "--accept-software lets it through" in done.stderr
