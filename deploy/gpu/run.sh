#!/usr/bin/env bash
# Tests and measures Cloister on a CUDA device, without a network, in under nine minutes: gpu.md, gpu.json and gpu.jsonl.
#   ./run.sh [--minutes 8.5] [--output DIR] [--stages limits,tests,...] [--interpreter]
# It needs Python with torch, Triton, numpy, safetensors and tokenizers (PYTHON names another one than python3).
# Checkpoints of random weights take up to 20 GB of the temporary folder (TMPDIR names another one).
set -euo pipefail
output=$PWD
cd "$(dirname "$0")"
PYTHON=${PYTHON:-python3}
if [ ! -e site/.whole ]; then
  rm -rf site
  "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --target site wheels/*.whl \
    || { echo "the wheels do not fit $("$PYTHON" -V) here; make the pack with GPU_PYTHON=VERSION" >&2; exit 1; }
  touch site/.whole
fi
export PYTHONPATH="$PWD/site:$PWD" PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
# exec: a signal to this script reaches the run, which then writes what it has.
exec "$PYTHON" -m benchmarks.gpu --output "$output" "$@"
