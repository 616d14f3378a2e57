"""A server as its own process, for tests of signals: `python -m tests.server.site MODEL_PATH PORT STEP_S DRAIN_S`."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

from cloister.engine import EngineClient, ThreadTransport
from cloister.server.app import create_app
from cloister.server.serve import ServerApp, serve
from cloister.text import ChatTemplate, Tokenizer
from cloister.types.config import ServerConfig
from cloister.types.errors import CloisterError, ModelError
from tests.engine.replica import SteppedRunner, make_config, make_replica
from tests.server.running_server import make_gate


def run(path: Path, port: int, step_s: float, drain_s: float) -> int:
    config = ServerConfig(port=port, drain_timeout_s=drain_s)

    async def start() -> ServerApp:
        if step_s < 0:
            raise ModelError("the model cannot be used; choose another one")
        if step_s > 1:
            print("loading", flush=True)
            await asyncio.sleep(3600)
        engine = EngineClient(
            ThreadTransport(make_replica(path, wrap=lambda r: SteppedRunner(r, step_s=step_s)).core), make_config(path)
        )
        await engine.start()
        return ServerApp(create_app(engine, Tokenizer(path), ChatTemplate.load(path), make_gate(), config), engine)

    logging.getLogger("cloister.server.serve").setLevel(logging.INFO)
    logging.basicConfig(format="%(message)s")
    try:
        return serve(config, start, lambda line: print(line, flush=True))
    except CloisterError as error:
        print(f"{type(error).__name__}: {error.message}", flush=True)
        return 3


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])))
