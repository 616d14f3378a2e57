"""`cloister serve --sealed` as an operator starts it: it answers as any server does, and nobody gets in."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from cloister import LLM, SamplingParams
from cloister.client.verify_node import check_url, fetch_from
from cloister.models import locate
from cloister.private.gateway import NODE_PATH
from cloister.private.nodes import EVIDENCE_PATH, KEYS_PATH
from cloister.trust.attestation import AttestationPolicy, read_evidence, read_statement
from cloister.trust.attestation.measuring import measure_model
from cloister.trust.attestation.tsm import TSM_REPORTS
from cloister.trust.hardening import MEASURES
from cloister.trust.receipts import Transcript, Wish, is_signed, read_signature, with_wish
from cloister.trust.sealing import (
    WHOLE,
    HttpRequest,
    RequestHead,
    decode_response,
    encode_request,
    open_response,
    parse_keys,
    seal_request,
)
from cloister.trust.shape import Unshaper, find_edge
from cloister.trust.transparency.checks import View
from tests.server.test_tls import write_pair
from tests.serving import ServeProcess, descendants
from tests.trust.hardening.launching import drop, needs_measures, why_not_root

pytestmark = needs_measures

MODEL = "cloister-5m"
PROMPTS = ("Once upon a time", "def main():", "Zwei Dinge")
START_TIMEOUT_S = 300.0
READ_FILES = (
    "mem",
    "maps",
    "smaps",
    "environ",
    "auxv",
    "syscall",
    "stack",
    "exe",
    "root",
    "cwd",
    "ns/mnt",
    "map_files",
    "fd/0",
)
TRY_TO_READ = """
import ctypes, errno, json, os, sys
PTRACE_ATTACH, PTRACE_DETACH, ALL_CHILDREN = 16, 17, 0x40000000
LINKS = ("exe", "root", "cwd")
libc = ctypes.CDLL(None, use_errno=True)

def read(path, name):
    if name == "map_files":
        return os.listdir(path)
    return os.readlink(path) if name in LINKS else open(path, "rb", buffering=0).read(1)

def attach(pid):
    if libc.ptrace(PTRACE_ATTACH, pid, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "ptrace")
    os.waitpid(pid, ALL_CHILDREN)
    return libc.ptrace(PTRACE_DETACH, pid, 0, 0)

def outcome(attempt, *arguments):
    try:
        return repr(attempt(*arguments))
    except OSError as error:
        return errno.errorcode[error.errno]

told = {}
for pid in map(int, sys.argv[2:]):
    for name in json.loads(sys.argv[1]):
        told[f"/proc/{pid}/{name}"] = outcome(read, f"/proc/{pid}/{name}", name)
    told[f"{pid} ptrace"] = outcome(attach, pid)
print(json.dumps(told))
"""


class Node(ServeProcess):
    """A sealed server.

    Attributes:
        num_opened: bytes of the last answer, padding included.
    """

    num_opened = 0

    @property
    def pids(self) -> list[int]:
        """Every process of the node."""
        return [pid for pid in (self.process.pid, *descendants(self.process.pid)) if is_alive(pid)]

    def pids_named(self, name: str) -> list[int]:
        found = []
        for pid in self.pids:
            with contextlib.suppress(OSError):  # it has ended
                found += [pid] if Path(f"/proc/{pid}/comm").read_text().strip() == name else []
        return found

    def status(self, pid: int, field: str) -> set[str]:
        """What the kernel says of every thread of a process."""
        lines: list[str] = []
        with contextlib.suppress(OSError):  # it has ended
            for thread in os.listdir(f"/proc/{pid}/task"):
                with contextlib.suppress(OSError):  # this thread of it has
                    lines += Path(f"/proc/{pid}/task/{thread}/status").read_text().splitlines()
        return {line.split()[1] for line in lines if line.startswith(f"{field}:")}

    def complete(self, prompt: str, **options: Any) -> tuple[int, bytes]:
        """Seals a request to the node as the gateway passes it on; returns status and content of the answer."""
        keys = httpx.get(self.url + KEYS_PATH, timeout=300, verify=False).content
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 12, "temperature": 0, **options}
        head = RequestHead("POST", "https", "node", "/v1/completions", ((b"content-type", b"application/json"),))
        sealed, exchange = seal_request(parse_keys(keys)[0], encode_request(HttpRequest(head, json.dumps(body).encode())))
        headers = {"content-type": WHOLE.request_type}
        answer = httpx.post(self.url + NODE_PATH, content=sealed, headers=headers, timeout=300, verify=False)
        if answer.status_code != 200:
            return answer.status_code, answer.content
        frames, plain = Unshaper(required=True), open_response(exchange, answer.content)
        self.num_opened = len(plain)
        opened = decode_response(frames.feed(plain))
        return opened.head.status, opened.content


def is_alive(pid: int) -> bool:
    """False for a process that ended and still waits to be noticed, too: it has no memory."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("certificate"))


@pytest.fixture(scope="module")
def node(certificate: tuple[Path, Path]) -> Iterator[Node]:
    certfile, keyfile = map(str, certificate)
    with Node("--sealed", "--certfile", certfile, "--keyfile", keyfile) as running:
        yield running


def test_profile_private_is_what_a_sealed_server_takes(node: Node) -> None:
    assert any("profile private" in line for line in node.lines)


def test_its_start_advises_no_api_keys_which_would_tell_it_who_asks(node: Node) -> None:
    assert [line for line in node.lines if "api-keys" in line] == []


def test_a_hardened_engine_answers_the_same_tokens(node: Node) -> None:
    with LLM(MODEL, num_threads=1) as llm:
        params = SamplingParams(temperature=0, max_tokens=12)
        wanted = [completion.outputs[0].text for completion in llm.generate(list(PROMPTS), params)]
    answers = [node.complete(prompt) for prompt in PROMPTS]
    assert [status for status, _ in answers] == [200] * len(PROMPTS), answers
    assert [json.loads(content)["choices"][0]["text"] for _, content in answers] == wanted


@pytest.mark.parametrize(
    "options",
    [{"stream": True}, {"logprobs": 2}, {"response_format": {"type": "json_object"}}, {"echo": True, "n": 2}],
    ids=["stream", "logprobs", "json", "echo"],
)
def test_requests_of_every_kind_find_the_code_that_they_need(node: Node, options: dict[str, Any]) -> None:
    assert node.complete("Once", **options)[0] == 200


def test_every_thread_of_every_process_has_the_measures(node: Node) -> None:
    pids = node.pids
    assert len(pids) >= 5  # front, starter, engine, key service, zygote
    told = {pid: [node.status(pid, field) for field in ("Seccomp", "NoNewPrivs", "CapPrm", "CapBnd")] for pid in pids}
    lasting = [pid for pid in pids if is_alive(pid)]  # without the worker of the test before, which may just have ended
    assert len(lasting) >= 5
    for pid in lasting:
        assert told[pid] == [{"2"}, {"1"}, {"0000000000000000"}, {"0000000000000000"}]


def test_its_evidence_states_its_key_its_model_and_every_measure_of_every_process(node: Node) -> None:
    give_up_s = time.monotonic() + 300
    while (answer := httpx.get(node.url + EVIDENCE_PATH, timeout=300, verify=False)).status_code != 200:
        assert time.monotonic() < give_up_s
        time.sleep(0.1)
    statement = read_statement(read_evidence(answer.content).statement)
    assert statement.keys == httpx.get(node.url + KEYS_PATH, timeout=300, verify=False).content
    assert statement.model == measure_model(locate(MODEL))
    every = {f"{role}.{measure.name}" for role in ("front", "engine", "worker", "sealer") for measure in MEASURES}
    assert every | {"front.closed", "host"} <= statement.hardening.keys()
    missing = [name for name, told in statement.hardening.items() if told.startswith("missing")]
    assert missing == ["host"]
    policy = AttestationPolicy(accept_software=True, releases=frozenset({statement.release}))
    with httpx.Client(verify=False) as client:
        fetch = fetch_from(node.url, client)
        assert check_url(fetch, None, policy, View(), time.time()).accepted
        assert not check_url(fetch, None, replace(policy, accept_software=False), View(), time.time()).accepted


def test_its_closed_key_service_signs_a_receipt_with_the_key_in_its_evidence(node: Node) -> None:
    evidence = httpx.get(node.url + EVIDENCE_PATH, timeout=300, verify=False).content
    statement = read_statement(read_evidence(evidence).statement)
    body = json.dumps({"model": MODEL, "prompt": "Once", "max_tokens": 4}).encode()
    head = RequestHead("POST", "https", "node", "/v1/completions", ((b"content-type", b"application/json"),))
    wish = Wish("ab" * 32, hashlib.sha256(evidence).hexdigest())
    request, _ = with_wish(HttpRequest(head, body), wish)
    sealed, exchange = seal_request(parse_keys(statement.keys)[0], encode_request(request))
    answer = httpx.post(
        node.url + NODE_PATH, content=sealed, headers={"content-type": WHOLE.request_type}, timeout=300, verify=False
    )
    opened = decode_response(Unshaper(required=True).feed(open_response(exchange, answer.content)))
    transcript = Transcript(exchange, request)
    transcript.add(opened.content)
    claims = transcript.claim(200, epoch=wish.epoch, evidence=wish.evidence, profile="private")
    signature = read_signature(opened.trailers)
    assert signature is not None
    assert is_signed(claims, signature, statement.receipt_key)


def test_every_process_that_reads_requests_is_closed(node: Node) -> None:
    """A filter of the starter, of the process itself, and the closing one; the starter is never sent anything of a request."""
    assert node.status(node.process.pid, "Seccomp_filters") == {"2"}
    for name in ("cl-engine", "cl-sealer", "cl-zygote"):
        [pid] = node.pids_named(name)
        assert node.status(pid, "Seccomp_filters") == {"3"}


def read_from(pids: list[int], *, stripped: bool) -> dict[str, str]:
    command = [sys.executable, "-c", TRY_TO_READ, json.dumps(READ_FILES), *map(str, pids)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=True, preexec_fn=drop if stripped else None
    )
    told: dict[str, str] = json.loads(done.stdout)
    return told


@pytest.mark.skipif(why_not_root() is not None, reason=str(why_not_root()))
def test_root_without_capabilities_reads_none_of_the_processes(node: Node) -> None:
    told = read_from(node.pids, stripped=True)
    lasting = node.pids  # without the worker of the test before, which may just have ended
    told = {name: what for name, what in told.items() if any(f"{pid} " in name or f"/{pid}/" in name for pid in lasting)}
    assert len(told) >= 5 * (len(READ_FILES) + 1)
    assert {name: what for name, what in told.items() if what not in {"EACCES", "EPERM"}} == {}


@pytest.mark.skipif(why_not_root("SYS_PTRACE") is not None, reason=str(why_not_root("SYS_PTRACE")))
def test_the_host_reads_them_all(node: Node) -> None:
    told = read_from(node.pids, stripped=False)
    assert {told[f"/proc/{pid}/maps"][0] for pid in node.pids} == {"b"}
    assert {told[f"{pid} ptrace"] for pid in node.pids} == {"0"}


def test_no_signal_ends_a_node_or_makes_it_talk(node: Node) -> None:
    printed = node.printed
    for pid in node.pids:
        with contextlib.suppress(ProcessLookupError):  # a worker of the test before
            for name in ("SIGUSR1", "SIGUSR2", "SIGQUIT", "SIGPROF"):
                os.kill(pid, getattr(signal, name))
    assert node.complete("Once")[0] == 200
    assert node.printed == printed


def test_a_closed_node_still_reads_a_new_certificate(node: Node, certificate: tuple[Path, Path]) -> None:
    certfile, keyfile = certificate
    for new, old in zip(write_pair(certfile.parent, "new"), (certfile, keyfile), strict=True):
        new.replace(old)
    node.process.send_signal(signal.SIGHUP)
    wanted = ssl.PEM_cert_to_DER_cert(certfile.read_text())
    give_up_s = time.monotonic() + 300
    while shown_certificate(node.url) != wanted:
        assert time.monotonic() < give_up_s
        time.sleep(0.1)


def shown_certificate(url: str) -> bytes:
    host, port = url.removeprefix("https://").split(":")
    return ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate((host, int(port)), timeout=300))


def test_a_dead_engine_is_made_anew_without_executing_a_program(node: Node) -> None:
    [engine] = node.pids_named("cl-engine")
    os.kill(engine, signal.SIGKILL)
    give_up_s = time.monotonic() + START_TIMEOUT_S
    while node.complete("Once")[0] != 200:
        assert time.monotonic() < give_up_s
        time.sleep(0.1)
    [successor] = node.pids_named("cl-engine")
    assert successor != engine
    assert node.status(successor, "Seccomp") == {"2"}


def test_a_node_ends_in_order_and_leaves_no_process(node: Node) -> None:
    pids = node.pids
    status, printed = node.stop()
    assert status == 0, printed
    give_up_s = time.monotonic() + 300
    while [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < give_up_s
        time.sleep(0.05)


def test_a_node_that_drafts_answers_the_same_tokens_in_a_constant_shape() -> None:
    with LLM(MODEL, num_threads=1, speculate="none") as llm:
        params = SamplingParams(temperature=0, max_tokens=12)
        wanted = [completion.outputs[0].text for completion in llm.generate(list(PROMPTS), params)]
    running = Node("--sealed", "--speculate", "draft_model,ngram", "--draft-model", "cloister-draft", "--draft-tokens", "4")
    try:
        for prompt, text in zip(PROMPTS, wanted, strict=True):
            status, content = running.complete(prompt)
            assert status == 200, content
            assert json.loads(content)["choices"][0]["text"] == text
            num_frames, rest = divmod(running.num_opened, 512)
            assert (num_frames, rest) == (find_edge(num_frames), 0)  # one that is not constant would be padded to 1 KiB
    finally:
        running.kill()


def serve_in_vain(*flags: str) -> str:
    command = [sys.executable, "-m", "cloister.cli", "serve", "--sealed", "--port", "0", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    return done.stderr


def test_a_model_that_is_not_here_is_said_before_anything_is_sealed(tmp_path: Path) -> None:
    assert "there is no model" in serve_in_vain("--model", str(tmp_path / "none"))


def test_a_node_serves_one_model(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text('[models.a]\nmodel = "cloister-5m"\n[models.b]\nmodel = "cloister-5m"\n')
    assert "a sealed node serves one model" in serve_in_vain("--config", str(config))


@pytest.mark.skipif(TSM_REPORTS.is_dir(), reason="this is a confidential guest")
def test_a_machine_that_cannot_vouch_for_itself_does_not_serve() -> None:
    """The processor is asked by a hardened process of its own, after everything else has started."""
    assert "this is no confidential guest" in serve_in_vain("--attester", "sev-snp")
