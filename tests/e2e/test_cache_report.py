"""`/v1/cache` of a server as people start it: two tenants, two replicas with a tier each, an engine that does not answer."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import httpx

from cloister.policy import Credentials
from cloister.policy.keyfile import write_credentials
from tests.serving import MODEL, ServeProcess, find_processes

PROMPT = "the same long prompt " * 30


class Tenant:
    def __init__(self, url: str, key: str) -> None:
        self._url, self._headers = url, {"authorization": f"Bearer {key}"}

    def ask(self, prompt: str = PROMPT) -> int:
        """Returns how many tokens of a prompt were cached."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
        reply = httpx.post(f"{self._url}/v1/completions", json=body, headers=self._headers, timeout=300)
        usage = reply.json()["usage"]
        found: int = usage["prompt_tokens_details"]["cached_tokens"]
        return found

    def cache(self, method: str = "GET") -> tuple[dict[str, Any], list[int]]:
        """Returns what each place has of this tenant, and which replicas did not answer."""
        reply = httpx.request(method, f"{self._url}/v1/cache", headers=self._headers, timeout=300)
        assert reply.status_code == 200, reply.text
        return {place["place"]: place for place in reply.json()["data"]}, reply.json()["unanswered"]

    def num_blocks(self, place: str) -> int:
        found: int = self.cache()[0][place]["num_blocks"]
        return found


def test_tenants_see_and_drop_their_own_on_all_replicas_and_in_their_tiers(tmp_path: Path) -> None:
    credentials, anns = Credentials.empty().add("ann")
    credentials, bobs = credentials.add("bob")
    write_credentials(tmp_path / "keys.json", credentials)
    flags = ("--replicas", "2", "--router", "round_robin", "--num-threads", "1")
    limits = ("--max-model-len", "512", "--max-num-seqs", "2")
    tier = ("--kv-memory-mb", "12", "--kv-tier", f"disk:{tmp_path},64M", "--api-keys", str(tmp_path / "keys.json"))
    with ServeProcess(*flags, *limits, *tier) as server:
        ann, bob = Tenant(server.url, anns), Tenant(server.url, bobs)
        for tenant in (ann, bob):
            assert [tenant.ask() for _ in range(2)] == [0, 0]  # each replica has it once
            assert tenant.ask() > 0
        places, unanswered = ann.cache()
        assert unanswered == []
        assert places["device"]["num_tokens"] > 200
        assert places["device"]["num_bytes"] > places["device"]["num_blocks"] * 100
        assert places["disk"]["num_blocks"] == 0
        for number in range(60):
            if ann.num_blocks("disk"):
                break
            ann.ask(f"{number} {PROMPT}")
        assert bob.num_blocks("disk") == 0
        dropped, _ = ann.cache("DELETE")
        assert dropped["disk"]["num_blocks"] > 0
        assert (ann.num_blocks("device"), ann.num_blocks("disk")) == (0, 0)
        assert [ann.ask() for _ in range(2)] == [0, 0]
        assert bob.num_blocks("device") > 0
        stopped = find_processes(server.process.pid, "engine")[0]
        num_both = ann.num_blocks("device")
        os.kill(stopped, signal.SIGSTOP)
        try:
            dropped, unanswered = ann.cache("DELETE")
        finally:
            os.kill(stopped, signal.SIGCONT)
        assert len(unanswered) == 1
        assert dropped["device"]["num_blocks"] == num_both // 2
        server.wait_until(lambda: ann.cache()[1] == [] and ann.num_blocks("device") == 0)
        assert bob.num_blocks("device") > 0
