"""open-webui's back end, called as its page calls it: chat, streams, titles, embeddings, documents, and the Ollama API."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from checks import PROGRAMS, QUESTION, model_name, run_checks, server_url

URL = server_url()
MODEL = model_name(URL)
TEXT = b"VACUUM reclaims storage occupied by dead tuples. " * 8
START_LIMIT_S = 240.0
SETTINGS = {
    "WEBUI_AUTH": "False",
    "WEBUI_SECRET_KEY": "secret",
    "OFFLINE_MODE": "True",
    "OPENAI_API_BASE_URL": f"{URL}/v1",
    "OPENAI_API_KEY": "none",
    "ENABLE_OLLAMA_API": "True",
    "OLLAMA_BASE_URL": URL,
    "RAG_EMBEDDING_ENGINE": "openai",  # else it would look for a model on a hub
    "RAG_OPENAI_API_BASE_URL": f"{URL}/v1",
    "RAG_OPENAI_API_KEY": "none",
    "RAG_EMBEDDING_MODEL": MODEL,
}


@contextmanager
def open_webui() -> Iterator[httpx.Client]:
    """Yields a client that is signed in at an open-webui of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("w") as log:
        variables = {**os.environ, **SETTINGS, "DATA_DIR": folder, "HF_HOME": folder}
        command = [str(PROGRAMS / "open-webui"), "serve", "--host", "127.0.0.1", "--port", str(port)]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=variables, cwd=folder)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
                wait(client, process)
                signed_in = client.post("/api/v1/auths/signin", json={"email": "", "password": ""}).raise_for_status()
                client.headers["Authorization"] = f"Bearer {signed_in.json()['token']}"
                yield client
        finally:
            process.terminate()
            process.wait(20)


def wait(client: httpx.Client, process: subprocess.Popen[bytes]) -> None:
    """Returns when the program answers; SystemExit if it ended, or needs longer than START_LIMIT_S."""
    deadline_s = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline_s and process.poll() is None:
        try:
            if client.get("/health").is_success:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise SystemExit("open-webui did not start")


def post(path: str, **fields: object) -> Any:
    reply = client.post(path, json=fields)
    assert reply.is_success, f"{reply.status_code} {reply.text[:200]}"
    return reply.json()


def models() -> str:
    names = [model["id"] for model in client.get("/api/models").raise_for_status().json()["data"]]
    assert any(MODEL in name for name in names), names
    return ", ".join(sorted(names))


def chat() -> str:
    reply = post("/openai/chat/completions", model=MODEL, messages=QUESTION, stream=False, max_tokens=24)
    assert reply["choices"][0]["message"]["content"]
    return f"{reply['usage']['completion_tokens']} tokens"


def stream() -> str:
    body = {"model": MODEL, "messages": QUESTION, "stream": True, "max_tokens": 24}
    with client.stream("POST", "/openai/chat/completions", json=body) as reply:
        events = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    text = "".join(json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events[:-1])
    assert text
    return f"{len(events)} events"


def whole_chat() -> str:
    """The route of the page, which adds its own tools and filters."""
    reply = post("/api/chat/completions", model=MODEL, messages=QUESTION, stream=False, max_tokens=24)
    assert reply["choices"][0]["message"]["content"]
    return "by the route of the page"


def title() -> str:
    reply = post(
        "/api/v1/tasks/title/completions", model=MODEL, messages=[*QUESTION, {"role": "assistant", "content": "It..."}]
    )
    assert reply["choices"][0]["message"]["content"]
    return "a title was generated"


def embeddings() -> str:
    reply = post("/api/embeddings", model=MODEL, input="one")
    return f"{len(reply['data'][0]['embedding'])} numbers"


def document() -> str:
    """Uploads a text, whose pieces become vectors by our embeddings, and finds it again."""
    kept = client.post(
        "/api/v1/files/", files={"file": ("vacuum.txt", TEXT, "text/plain")}, params={"process_in_background": "false"}
    )
    assert kept.is_success, f"{kept.status_code} {kept.text[:200]}"
    found = post("/api/v1/retrieval/query/collection", collection_names=[f"file-{kept.json()['id']}"], query="dead tuples", k=1)
    assert "dead tuples" in str(found["documents"]), found
    return f"found again at a distance of {found['distances'][0][0]:.2f}"


def ollama_models() -> str:
    found = client.get("/ollama/api/tags").raise_for_status().json()["models"]
    assert found and client.get("/ollama/api/version").raise_for_status().json()["version"]
    return found[0]["model"]


def ollama_chat() -> str:
    name = client.get("/ollama/api/tags").json()["models"][0]["model"]
    reply = post("/ollama/api/chat", model=name, messages=QUESTION, stream=False, options={"num_predict": 24})
    assert reply["message"]["content"] and reply["done"]
    return f"{reply['eval_count']} tokens"


def ollama_stream() -> str:
    name = client.get("/ollama/api/tags").json()["models"][0]["model"]
    with client.stream("POST", "/ollama/api/chat", json={"model": name, "messages": QUESTION, "stream": True}) as reply:
        lines = [json.loads(line) for line in reply.iter_lines() if line]
    assert lines[-1]["done"] and "".join(line["message"]["content"] for line in lines)
    return f"{len(lines)} lines"


with open_webui() as client:
    run_checks(
        "open-webui",
        {
            "models": models,
            "chat": chat,
            "stream": stream,
            "chat of the page": whole_chat,
            "title": title,
            "embeddings": embeddings,
            "document": document,
            "Ollama: models": ollama_models,
            "Ollama: chat": ollama_chat,
            "Ollama: stream": ollama_stream,
        },
    )
