"""Asks the starter for processes, also for what it does not make, and loses it in the end; prints what became, as JSON."""

import json
import os
import signal
import socket
import time
from pathlib import Path

from cloister.trust.hardening import HardeningError, sealed
from cloister.trust.hardening.starter import Child, Starter

PATIENCE_S = 300.0


def main() -> None:
    state = sealed()
    assert state is not None
    assert state.starter is not None
    starter = state.starter
    told: dict[str, object] = {"shell": refusal(starter, "shell"), "module": refusal(starter, "timeit")}
    near, far = socket.socketpair()
    engine = starter.start("engine", [], far.fileno())
    told["measures"] = all(result.applied for result in engine.results)
    told["runs"] = engine.poll()
    far.close()
    near.close()  # nobody says what it shall become, so it ends
    told["ended"] = wait(engine)
    near, far = socket.socketpair()
    engine = starter.start("engine", [], far.fileno())
    engine.kill()
    told["killed"] = wait(engine)
    told["stranger"] = starter.poll(os.getpid())
    engine = starter.start("engine", [], far.fileno())
    os.kill(int(Path("/proc/self/task", str(os.getpid()), "children").read_text().split()[0]), signal.SIGKILL)
    told["without starter"] = wait(engine)
    told["no starter"] = refusal(starter, "engine")
    engine.kill()
    print(json.dumps(told))


def wait(child: Child) -> int | None:
    give_up_s = time.monotonic() + PATIENCE_S
    while (status := child.poll()) is None and time.monotonic() < give_up_s:
        time.sleep(0.02)
    return status


def refusal(starter: Starter, role: str) -> str:
    near, far = socket.socketpair()
    with near, far:
        try:
            starter.start(role, [], far.fileno())
        except HardeningError as error:
            return error.message
    return "made"


if __name__ == "__main__":
    main()
