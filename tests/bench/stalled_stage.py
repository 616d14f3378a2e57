"""A stage of `benchmarks.gpu` that records one figure and then never ends."""

import sys
import time
from pathlib import Path

from benchmarks.gpu.records import Records

if __name__ == "__main__":
    Records(Path(sys.argv[sys.argv.index("--records") + 1]), "stalled").add("peaks", bytes=2e12, bfloat16=3e14)
    time.sleep(600)
