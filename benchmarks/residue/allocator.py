"""What overwriting of freed memory costs: CPU seconds of an engine for the same work under each choice, best of several rounds.

    python benchmarks/residue/allocator.py [ROUNDS]

CPU time and not wall time, so that a busy machine changes little. The embedded model is the worst case: its arithmetic is next
to nothing, so what is measured is the interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

PERTURB = "glibc.malloc.perturb=85"
NO_TCACHE = "glibc.malloc.tcache_count=0"
CHOICES = {
    "as it is": {},
    "perturb": {"GLIBC_TUNABLES": PERTURB},
    "perturb, no tcache": {"GLIBC_TUNABLES": f"{PERTURB}:{NO_TCACHE}"},
    "PYTHONMALLOC=malloc": {"PYTHONMALLOC": "malloc"},
    "PYTHONMALLOC=malloc, perturb": {"PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": PERTURB},
    "PYTHONMALLOC=malloc, perturb, no tcache": {"PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": f"{PERTURB}:{NO_TCACHE}"},
    "the same, no fast bins": {
        "PYTHONMALLOC": "malloc",
        "GLIBC_TUNABLES": f"{PERTURB}:{NO_TCACHE}:glibc.malloc.mxfast=0",
    },
}
NUM_SEQUENCES, NUM_TOKENS, NUM_PROMPT = 16, 128, 64


def work() -> None:
    """Runs an engine in this process and prints what it took."""
    from cloister.launch import build_engine, resolve_settings
    from cloister.types.events import Submit
    from cloister.types.request import Request, SamplingParams

    core = build_engine(resolve_settings({"profile": "private", "num_threads": 1}, listens=False).engine.config)
    begun = 0.0
    num_steps = 0
    for round_ in range(3):  # the first warms up
        begun = time.process_time() if round_ == 1 else begun
        for number in range(NUM_SEQUENCES):
            ids = [300 + (number * 37 + place * 11 + round_) % 3000 for place in range(NUM_PROMPT)]
            sampling = SamplingParams(temperature=1.0, max_tokens=NUM_TOKENS, ignore_eos=True)
            core.input_queue.put(Submit(Request(request_id=f"{round_}-{number}", token_ids=ids, sampling=sampling)))
        while core.step() is not None:
            num_steps += 1
    print(json.dumps({"cpu_s": time.process_time() - begun, "tokens": 2 * NUM_SEQUENCES * NUM_TOKENS}))


def main(rounds: int) -> None:
    best: dict[str, float] = {}
    tokens = 0
    for _ in range(rounds):
        for name, variables in CHOICES.items():
            environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONMALLOC", "GLIBC_TUNABLES")}
            done = subprocess.run(
                [sys.executable, __file__, "work"], env=environment | variables, check=True, capture_output=True, text=True
            )
            said = json.loads(done.stdout.splitlines()[-1])
            tokens = said["tokens"]
            best[name] = min(best.get(name, float("inf")), said["cpu_s"])
    base = next(iter(best.values()))
    for name, cpu_s in best.items():
        print(f"{name:42} {tokens / cpu_s:8.0f} tokens per CPU second  {base / cpu_s:5.2f}x")


if __name__ == "__main__":
    if sys.argv[1:] == ["work"]:
        work()
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
