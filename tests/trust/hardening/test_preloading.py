"""What a sealed node imports before it closes its imports."""

from __future__ import annotations

import subprocess
import sys

EXTRAS = ("dcap_qvl", "flashinfer", "joserfc", "lxml", "psycopg", "pypdf", "redis", "signxml", "torch", "triton")
"""Packages that no plain install brings."""

PRELOAD = """
import sys
for name in sys.argv[1:]:
    sys.modules[name] = None
from cloister.launch.processes import ENGINE_PACKAGES, FRONT_PACKAGES, LATE_MODULES
from cloister.trust import hardening
from cloister.private.workers.worker import WORKER_PACKAGES
hardening.preload({*ENGINE_PACKAGES, *FRONT_PACKAGES, *WORKER_PACKAGES}, LATE_MODULES)
"""


def test_every_module_that_a_sealed_node_imports_early_does_without_extras() -> None:
    done = subprocess.run([sys.executable, "-c", PRELOAD, *EXTRAS], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
