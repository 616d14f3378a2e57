"""`python -m benchmarks.gpu` where there is nothing to measure."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import gpu
from tests.device import HAS_GPU


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU here, which the benchmark would measure")
def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "gpu.md"
    assert gpu.main(["--output", str(page)]) == 2
    assert "nothing was measured" in capsys.readouterr().err
    assert not page.exists()
