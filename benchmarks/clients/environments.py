"""Places where clients are installed, each apart from the others: a virtual environment, or a folder of npm packages."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from benchmarks.clients.catalogue import FOLDER, Client

INSTALL_LIMIT_S = 1200.0
QUIET = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "ANONYMIZED_TELEMETRY": "false", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
"""Clients that look for models, or tell their makers what they do, shall not."""


class Environment:
    """A client and the folder that it is installed in."""

    def __init__(self, client: Client, folder: Path) -> None:
        self.client = client
        self.folder = folder.absolute()

    def install(self) -> None:
        """Installs what is not there yet.

        Raises:
            subprocess.SubprocessError: if pip or npm failed, or took longer than INSTALL_LIMIT_S.
        """
        mark = self.folder / ".installed"
        if mark.exists():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.client.is_npm:
            (self.folder / "package.json").write_text("{}")
            self._call("npm", "install", "--silent", "--no-audit", "--no-fund", *self.client.packages)
        elif self.client.packages:
            self._call(sys.executable, "-m", "venv", str(self.folder))
            constraints = self.folder / "constraints.txt"
            constraints.write_text("\n".join(self.client.constraints))
            self._call(str(self._python), "-m", "pip", "install", "-qq", "-c", str(constraints), *self.client.packages)
        mark.touch()

    def run(self, url: str) -> list[dict[str, str]]:
        """Returns what each check of the script said: `check`, `result` ("ok" or "FAILED"), `seen`.

        A script that ends without saying anything, or too late, is a failed check of its own.
        """
        process = subprocess.Popen(
            [*self._command(), url],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            cwd=self.folder,
            env=self._variables(),
            start_new_session=True,
        )
        late = []
        try:
            output, errors = process.communicate(timeout=self.client.limit_s)
        except subprocess.TimeoutExpired:
            late.append({"check": "time", "result": "FAILED", "seen": f"not done after {self.client.limit_s:g} s"})
        finally:
            with suppress(ProcessLookupError):  # what the script started ends with it
                os.killpg(process.pid, signal.SIGKILL)
        if late:
            output, errors = process.communicate(timeout=10)
            return read_lines(output) + late
        found = read_lines(output)
        if not found or (process.returncode and all(row["result"] == "ok" for row in found)):
            last = (errors.strip().splitlines() or ["it said nothing"])[-1]
            found.append({"check": "script", "result": "FAILED", "seen": f"exit status {process.returncode}: {last[:300]}"})
        return found

    def find_version(self) -> str:
        """Returns the client's version, "" if nothing says it."""
        if self.client.program:
            told = subprocess.run(self.client.program, capture_output=True, text=True, timeout=30, check=False).stdout
            found = re.search(r"\d+(\.\d+)+", told)
            return found.group() if found else ""
        name = re.sub(r"\[.*", "", self.client.packages[0])
        if self.client.is_npm:
            package = json.loads((self.folder / "node_modules" / name / "package.json").read_text(encoding="utf-8"))
            return str(package["version"])
        ask = f"import importlib.metadata; print(importlib.metadata.version({name!r}))"
        return subprocess.run([self._python, "-c", ask], capture_output=True, text=True, timeout=60, check=True).stdout.strip()

    def remove(self) -> None:
        """Removes the folder and all that is in it."""
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def _python(self) -> Path:
        return self.folder / "bin" / "python"

    def _command(self) -> list[str]:
        script = FOLDER / self.client.script
        if self.client.is_npm:  # node looks for packages beside the script
            for name in (script.name, "checks.mjs"):
                shutil.copy(FOLDER / name, self.folder / name)
            return ["node", str(self.folder / script.name)]
        return ["sh", str(script)] if script.suffix == ".sh" else [str(self._python), str(script)]

    def _variables(self) -> dict[str, str]:
        path = os.pathsep.join([str(self.folder / "bin"), os.environ.get("PATH", "")])
        return {**os.environ, **QUIET, "PATH": path, "PYTHONPATH": str(FOLDER)}

    def _call(self, *command: str) -> None:
        subprocess.run(command, cwd=self.folder, timeout=INSTALL_LIMIT_S, check=True)


def read_lines(output: str) -> list[dict[str, str]]:
    """Returns the checks among the lines of a script; other lines are not looked at."""
    found = []
    for line in output.splitlines():
        cells = line.split("\t", 2)
        if len(cells) == 3:
            result, _, seen = cells[2].partition(": ")
            found.append({"check": cells[1], "result": result, "seen": seen})
    return found
