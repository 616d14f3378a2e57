from __future__ import annotations

import json

import pytest

from cloister.cli import main


def verify(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as left:
        main(["verify", "routing", "--seed", "1", *arguments])
    return int(left.value.code or 0), capsys.readouterr().out


def test_too_few_requests_are_no_proof(capsys: pytest.CaptureFixture[str]) -> None:
    status, shown = verify(capsys, "--users", "2", "--requests", "10")
    assert status == 2
    assert "too few requests" in " ".join(shown.split())


def test_a_gateway_that_holds_back_is_called_dishonest(capsys: pytest.CaptureFixture[str]) -> None:
    status, shown = verify(capsys, "--users", "5", "--requests", "30", "--attack", "drop", "--rate", "1", "--json")
    assert status == 1
    verdict = json.loads(shown)
    assert not verdict["honest"]
    assert verdict["p_value"] < 1e-6
    assert verdict["worst"][0]["user"] == "user-3"
