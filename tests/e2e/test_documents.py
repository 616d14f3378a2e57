"""Documents that are encoded separately, on real back ends: beside transformers, and bit by bit beside themselves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AttentionInterface, AutoModelForCausalLM

from cloister.engine import EngineCore
from cloister.launch import build_engine, resolve_settings
from cloister.models import load
from cloister.models.adapters import Adapter, read_adapter
from cloister.models.safetensors import write_tensors
from cloister.types.documents import Documents
from cloister.types.request import Request, SamplingParams
from tests.adapter_factory import write_adapter
from tests.equality import Answer, ask
from tests.model_factory import make_model

SIZE = 8
NUM_LINKS = 3
RANDOM = np.random.default_rng(7)
PREFIX, A, B, C = (RANDOM.integers(2, 300, count).tolist() for count in (16, 40, 24, 8))
QUESTION = RANDOM.integers(2, 300, 11).tolist()
PLAIN = [
    Request(request_id="plain", token_ids=[*PREFIX, *B, *A, *QUESTION], sampling=SamplingParams(max_tokens=5, temperature=0))
]


def make_request(
    name: str,
    *texts: Sequence[int],
    weights: tuple[float, float] = (1.0, 1.0),
    positions: tuple[tuple[int, int], ...] = (),
    links: Adapter | None = None,
    **sampling: Any,
) -> Request:
    tokens, starts = list(PREFIX), []
    for text in texts:
        starts.append(len(tokens))
        tokens += text
    params = SamplingParams(**{"max_tokens": 4, "temperature": 0.0, "logprobs": 8, "ignore_eos": True, **sampling})
    documents = Documents(tuple(starts), len(tokens), *weights, positions, 0 if links is None else NUM_LINKS)
    tokens += [2] * (documents.links_end - documents.end)
    return Request(
        request_id=name, token_ids=tokens + QUESTION, sampling=params, documents=documents, adapter=links and links.digest
    )


def open_core(path: Path, backend: str, **settings: Any) -> EngineCore:
    chosen = {
        "model": str(path), "backend": backend, "dtype": "float32", "max_model_len": 256, "block_size": SIZE, "num_threads": 1,
        "weights_cache": "", "kv_memory_mb": 2, **settings,
    }  # fmt: skip
    return build_engine(resolve_settings(chosen, listens=False).engine.config)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("documents"), "llama")


def write_links(path: Path, folder: Path, **updates: Any) -> Adapter:
    """Writes an adapter with link tokens, and perhaps updates, and reads it."""
    spec = load(path).spec
    folder.mkdir(exist_ok=True)
    if updates:
        write_adapter(folder, path, **updates)
    rows = np.random.default_rng(3).standard_normal((NUM_LINKS, spec.hidden_size), dtype=np.float32)
    write_tensors(folder / "link_tokens.safetensors", {"link_tokens": rows * 0.05})
    return read_adapter(folder, spec, max_rank=4)


@pytest.fixture(scope="module")
def links(path: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Adapter]:
    folder = tmp_path_factory.mktemp("links")
    return f"links={folder}", write_links(path, folder)


@pytest.fixture(scope="module")
def tuned(path: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Adapter]:
    folder = tmp_path_factory.mktemp("tuned")
    return f"tuned={folder}", write_links(path, folder, rank=4, size=0.3)


def make_attention(documents: Documents) -> Any:
    """Returns APE's attention (Yang et al. 2025, section 4): documents have a softmax of their own, and then one score."""

    def attend(module: Any, queries: Any, keys: Any, values: Any, mask: Any, scaling: float, **_: Any) -> Any:
        groups = queries.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
        scores = queries @ keys.transpose(2, 3) * scaling + mask
        first, end = documents.starts[0], documents.end
        plain = scores[:, :, :end].softmax(-1) @ values  # hidden keys have no part in either softmax
        scores = scores[:, :, end:]
        apart = scores[..., first:end] / documents.temperature
        score = apart.logsumexp(-1, keepdim=True) * documents.temperature * documents.scale
        found = torch.cat((values[:, :, :first], values[:, :, end:]), 2)
        weights = torch.cat((scores[..., :first], scores[..., end:], score), -1).softmax(-1)
        weighed = weights[..., :-1] @ found + weights[..., -1:] * (apart.softmax(-1) @ values[:, :, first:end])
        return torch.cat((plain, weighed), 2).transpose(1, 2).contiguous(), None

    return attend


def masked_logprobs(path: Path, request: Request, answer: Sequence[int], links: Adapter | None = None) -> np.ndarray:
    """Returns the log-probabilities of each token of the answer by transformers, which gets positions and a mask: a document
    stands directly behind the prefix and sees nothing else, and the links of a document see none behind it."""
    documents = request.documents
    assert documents is not None
    tokens = torch.tensor([*request.token_ids, *answer[:-1]])
    positions, sees = torch.arange(len(tokens)), torch.ones(len(tokens), len(tokens)).tril().bool()
    linked = documents.end
    for start, end in zip(documents.starts, (*documents.starts[1:], documents.end), strict=True):
        positions[start:end] -= start - documents.starts[0]
        sees[start:end, documents.starts[0] : start] = False
        first, linked = linked, linked + documents.num_links
        positions[first:linked] -= documents.end - end
        sees[first:linked, end : documents.end] = False
    if documents.positions:
        positions = torch.tensor(documents.turns(0, len(tokens)))
    mask = torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)
    AttentionInterface.register("weighed", make_attention(documents))
    implementation = "weighed" if documents.has_weights else "eager"
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=implementation).eval()
    with torch.no_grad():
        embedded = model.get_input_embeddings()(tokens)
        if links is not None and links.links is not None:
            rows = torch.tensor(links.links).repeat(len(documents.starts), 1)
            embedded = torch.cat((embedded[: documents.end], rows, embedded[linked:]))
        found = model(inputs_embeds=embedded[None], attention_mask=mask[None, None], position_ids=positions[None])
        logits = found.logits[0]
    logprobs = logits[len(request.token_ids) - 1 :].log_softmax(-1)
    return logprobs[torch.arange(len(answer)), torch.tensor(answer)].numpy()


def said(core: EngineCore, *requests: Request) -> dict[str, Answer]:
    return {name: answer for (name, index), answer in ask(core, requests).answers.items() if not index}


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_a_document_sees_the_prefix_and_itself_and_the_answer_sees_all(path: Path, backend: str) -> None:
    core = open_core(path, backend)
    assert core.model.document_block_size == SIZE
    for texts in ((A, B, C), (C, B), (A,)):
        request = make_request("asked", *texts)
        answer = said(core, request)["asked"]
        found = np.array([each.logprob for each in answer.logprobs])
        wanted = masked_logprobs(path, request, answer.token_ids)
        assert np.abs(found - wanted).max() < 1e-4
    separate, plain = said(
        core, make_request("asked", A, B), msgspec.structs.replace(make_request("p", A, B), documents=None)
    ).values()
    assert abs(separate.logprobs[0].logprob - plain.logprobs[0].logprob) > 1e-3, "encoding separately changes nothing"


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_an_answer_weighs_documents_by_their_temperature_and_scale(path: Path, backend: str) -> None:
    core = open_core(path, backend)
    plain = said(core, make_request("plain", A, B))["plain"]
    for weights in ((0.5, 1.0), (1.0, 0.8), (0.7, 1.3)):
        request = make_request("asked", A, B, weights=weights)
        answer = said(core, request)["asked"]
        found = np.array([each.logprob for each in answer.logprobs])
        assert np.abs(found - masked_logprobs(path, request, answer.token_ids)).max() < 1e-4
        assert abs(found[0] - plain.logprobs[0].logprob) > 1e-4, "the weights change nothing"


@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.7, 0.9)])
@pytest.mark.parametrize(
    ("backend", "settings"), [("native", {}), ("native", {"dtype": "bfloat16", "kv_dtype": "int8"}), ("torch", {})]
)
def test_an_answer_has_the_same_bits_whatever_is_cached_and_in_any_company(
    path: Path, backend: str, settings: dict[str, str], weights: tuple[float, float]
) -> None:
    request = make_request("asked", C, A, B, weights=weights)
    alone = said(open_core(path, backend, **settings), request)["asked"]
    core = open_core(path, backend, **settings)
    said(core, *PLAIN, make_request("other order", B, A))
    report = ask(core, [request])
    assert report.num_hits
    behind_hits = report.answers["asked", 0]
    again = said(core, msgspec.structs.replace(request, request_id="again"))["again"]
    in_chunks = said(open_core(path, backend, max_batched_tokens=13, prefix_cache=False, **settings), request)["asked"]
    others = [make_request(str(n), *texts, temperature=1.0, seed=n, n=2) for n, texts in enumerate([(B, C), (A, B, C), (A,)])]
    others += [make_request(f"{n} weighed", A, B, weights=(0.5 + n, 1.1)) for n in range(2)]
    in_company = said(open_core(path, backend, max_batched_tokens=64, **settings), *PLAIN, *others, request)["asked"]
    for found in (behind_hits, again, in_chunks, in_company):
        assert (found.token_ids, found.logprobs) == (alone.token_ids, alone.logprobs)


@pytest.mark.parametrize("warm_is_prefix", [True, False])
def test_text_that_moves_between_prefix_and_documents_is_another_context(path: Path, warm_is_prefix: bool) -> None:
    """Then each document has the chain of keys that it had, yet what follows stands elsewhere and sees other KV."""
    in_prefix = Request(
        request_id="in the prefix",
        token_ids=[*PREFIX, *C, *A, *B, *QUESTION],
        sampling=make_request("asked", A, B).sampling,
        documents=Documents((24, 64), 88),
    )
    in_documents = make_request("in the documents", [*C, *A], [*C, *B])
    first, second = (in_prefix, in_documents) if warm_is_prefix else (in_documents, in_prefix)
    alone = said(open_core(path, "native"), second)[second.request_id]
    core = open_core(path, "native")
    said(core, first)
    found = said(core, second)[second.request_id]
    assert (found.token_ids, found.logprobs) == (alone.token_ids, alone.logprobs)


PLACED = ((0, 0), (16, 100), (20, 112), (56, 40), (80, 104), (82, 160))
"""A is far from the prefix, with a place for 8 tokens in it, B nearer, two of the question's tokens in that place."""


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_modules_turn_by_the_positions_of_their_schema(path: Path, backend: str) -> None:
    core = open_core(path, backend)
    assert core.model.places_documents
    plain = said(core, make_request("plain", A, B))["plain"]
    for weights in ((1.0, 1.0), (0.7, 0.9)):
        request = make_request("asked", A, B, positions=PLACED, weights=weights)
        answer = said(core, request)["asked"]
        found = np.array([each.logprob for each in answer.logprobs])
        assert np.abs(found - masked_logprobs(path, request, answer.token_ids)).max() < 1e-4
        assert abs(found[0] - plain.logprobs[0].logprob) > 1e-3, "positions change nothing"


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_modules_have_the_same_bits_whatever_is_cached_and_in_any_company(path: Path, backend: str) -> None:
    request = make_request("asked", A, B, positions=PLACED)
    alone = said(open_core(path, backend), request)["asked"]
    core = open_core(path, backend)
    elsewhere = make_request("elsewhere", A, B, positions=((0, 0), (16, 90), (56, 40), (80, 160)))
    said(core, *PLAIN, make_request("documents", A, B), elsewhere)
    report = ask(core, [request, make_request("only B", B, positions=((0, 0), (16, 40), (40, 104)))])
    assert report.num_hits
    in_chunks = said(open_core(path, backend, max_batched_tokens=13, prefix_cache=False), request)["asked"]
    in_company = said(open_core(path, backend, max_batched_tokens=64), *PLAIN, elsewhere, request)["asked"]
    drafted = ask(open_core(path, "native", speculate="ngram", draft_tokens=4), [request]).answers["asked", 0]
    for found in (report.answers["asked", 0], in_chunks, in_company, *([drafted] if backend == "native" else [])):
        assert (found.token_ids, found.logprobs) == (alone.token_ids, alone.logprobs)


@pytest.mark.parametrize(
    ("positions", "reason"),
    [
        (((0, 1), (16, 16)), "the prefix at position 0"),
        (((0, 0), (8, 16)), "the prefix at position 0"),
        (((0, 0), (16, 16), (16, 20)), "runs in order"),
        (((0, 0), (16, -1)), "runs in order"),
        (((0, 0), (16, 200)), "beyond the context window"),
    ],
)
def test_modules_that_cannot_be_placed_are_refused(path: Path, positions: tuple[tuple[int, int], ...], reason: str) -> None:
    with pytest.raises(AssertionError, match=reason):
        ask(open_core(path, "native"), [make_request("asked", A, B, positions=positions)])


LINKED = ((0, 0), (16, 100), (20, 112), (56, 40), (80, 148), (86, 104), (88, 160))
"""As PLACED, and six links before the question."""


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_links_see_the_documents_before_them_and_the_answer_sees_all(
    path: Path, backend: str, links: tuple[str, Adapter]
) -> None:
    core = open_core(path, backend, lora=links[0])
    assert [each.num_links for each in core.adapters.loaded] == [NUM_LINKS]
    plain = said(core, make_request("plain", A, B))["plain"]
    ways: list[tuple[Sequence[list[int]], dict[str, Any]]] = [
        ((A, B, C), {}), ((C, B), {}), ((A,), {}), ((A, B), {"weights": (0.7, 0.9)}), ((A, B), {"positions": LINKED}),
    ]  # fmt: skip
    for texts, how in ways:
        request = make_request("asked", *texts, links=links[1], **how)
        answer = said(core, request)["asked"]
        found = np.array([each.logprob for each in answer.logprobs])
        assert np.abs(found - masked_logprobs(path, request, answer.token_ids, links[1])).max() < 1e-4
        assert abs(found[0] - plain.logprobs[0].logprob) > 1e-3, "links change nothing"


@pytest.mark.parametrize(
    ("backend", "settings"),
    [
        ("native", {}),
        ("native", {"dtype": "bfloat16", "kv_dtype": "int8"}),
        ("native", {"kv_layout": "virtual"}),
        ("torch", {}),
    ],
)
def test_an_answer_with_links_has_the_same_bits_whatever_is_cached_and_in_any_company(
    path: Path, backend: str, settings: dict[str, str], tuned: tuple[str, Adapter]
) -> None:
    request = make_request("asked", C, A, B, links=tuned[1], weights=(0.7, 0.9))
    given = {**settings, "lora": tuned[0]}
    alone = said(open_core(path, backend, **given), request)["asked"]
    core = open_core(path, backend, **given)
    said(core, *PLAIN, make_request("other order", B, A, C, links=tuned[1]))
    report = ask(core, [request])
    assert report.num_hits
    assert report.num_steps == 4, "behind cached documents links and question take one step, as each further token does"
    again = said(core, msgspec.structs.replace(request, request_id="again"))["again"]
    in_chunks = said(open_core(path, backend, max_batched_tokens=7, prefix_cache=False, **given), request)["asked"]
    others = [
        make_request(f"{n}", *texts, links=tuned[1], temperature=1.0, seed=n, n=2) for n, texts in enumerate([(B, C), (A,)])
    ]
    others.append(make_request("without links", A, B))
    in_company = said(open_core(path, backend, max_batched_tokens=64, **given), *PLAIN, *others, request)["asked"]
    drafting = {"speculate": "ngram", "draft_tokens": 4} if backend == "native" else {}
    drafted = said(open_core(path, backend, **given, **drafting), request)["asked"]
    for found in (report.answers["asked", 0], again, in_chunks, in_company, drafted):
        assert (found.token_ids, found.logprobs) == (alone.token_ids, alone.logprobs)


def test_links_are_refused_without_an_adapter_that_has_so_many(path: Path, links: tuple[str, Adapter]) -> None:
    core = open_core(path, "native", lora=links[0])
    asked = make_request("asked", A, B, links=links[1])
    assert asked.documents is not None
    more = msgspec.structs.replace(asked.documents, num_links=NUM_LINKS - 1)
    for documents, adapter, reason in (
        (asked.documents, None, "only with an adapter"),
        (msgspec.structs.replace(asked.documents, num_links=65), links[1].digest, "up to 64 link tokens"),
        (msgspec.structs.replace(asked.documents, num_links=9), links[1].digest, "nothing follows"),
        (more, links[1].digest, "not so many link tokens"),
    ):
        with pytest.raises(AssertionError, match=reason):
            ask(core, [msgspec.structs.replace(asked, documents=documents, adapter=adapter)])


def test_drafts_do_not_change_an_answer_about_documents(path: Path) -> None:
    request = make_request("asked", A, B, max_tokens=24, weights=(0.8, 0.9))
    plain = said(open_core(path, "native"), request)["asked"]
    drafted = ask(open_core(path, "native", speculate="ngram", draft_tokens=4), [request])
    assert drafted.num_drafted
    answer = drafted.answers["asked", 0]
    assert (answer.token_ids, answer.logprobs) == (plain.token_ids, plain.logprobs)


def test_documents_are_refused_where_layers_or_kv_see_a_window(path: Path, tmp_path: Path) -> None:
    core = open_core(make_model(tmp_path, "gemma2", sliding_window=32), "native")
    packed = open_core(path, "torch", dtype="bfloat16", kv_dtype="kivi2", block_size=32)
    assert core.model.document_block_size == packed.model.document_block_size == 0
    for refusing in (core, packed):
        with pytest.raises(AssertionError, match="see all positions"):
            ask(refusing, [make_request("asked", A, B)])
