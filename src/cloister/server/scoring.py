"""/v1/score, /v1/rerank and /classify: request bodies and replies.

A score of a cross-encoder (Nogueira and Cho 2019) is the model's own for the two texts together. With any other model it is the
cosine of the angle between the two texts' vectors, from -1 to 1, computed from the model's embeddings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
import numpy as np
from pydantic import BeforeValidator, Field, PlainValidator

from cloister.policy.gate import Admission
from cloister.server.embeddings import (
    MAX_INPUTS,
    EmbeddingUsage,
    PooledBody,
    Text,
    TextInput,
    Words,
    check_fits,
    make_pooled_job,
    pooled_job,
    text_list,
    usage_of,
    vector_of,
)
from cloister.server.errors import invalid
from cloister.server.jobs import GenerationJob
from cloister.server.parse import parse_body
from cloister.server.prompts import PromptReader
from cloister.server.schemas import INT32, Strict
from cloister.types.request import Embedding, EncoderInfo, PoolingParams


class ScoreBody(PooledBody):
    """Body of /v1/score: one text with each of many, or two lists of one length pair by pair."""

    text_1: Annotated[list[Text], PlainValidator(text_list("text_1"), json_schema_input_type=TextInput)]
    text_2: Annotated[list[Text], PlainValidator(text_list("text_2"), json_schema_input_type=TextInput)]


class Score(msgspec.Struct, frozen=True):
    index: int
    score: float
    object: Literal["score"] = "score"


class ScoreList(msgspec.Struct, frozen=True):
    """Reply of /v1/score."""

    id: str
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


class Document(Strict):
    """A document to rank."""

    text: Words


def _as_document(value: object) -> object:
    return {"text": value} if isinstance(value, str) else value


class RerankBody(PooledBody):
    """Body of /v1/rerank (the shape of Jina and Cohere)."""

    query: Words
    documents: Annotated[
        list[Annotated[Document, BeforeValidator(_as_document, json_schema_input_type=Words | Document)]],
        Field(min_length=1, max_length=MAX_INPUTS - 1),
    ]
    top_n: int | None = Field(None, ge=1, lt=INT32)
    return_documents: bool | None = None


class RankedDocument(msgspec.Struct, frozen=True, omit_defaults=True):
    """One ranked document; `document` is omitted unless requested."""

    index: int
    relevance_score: float
    document: dict[str, str] | None = None


class Ranking(msgspec.Struct, frozen=True):
    """Reply of /v1/rerank, the most relevant first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: EmbeddingUsage


@dataclass(frozen=True, slots=True)
class ScoreJob:
    """A parsed request of /v1/score.

    Attributes:
        pairs: indices of two texts in the job's requests, one pair for each score.
        judge: the cross-encoder whose requests are the pairs themselves; None for cosines.
    """

    job: GenerationJob
    pairs: tuple[tuple[int, int], ...]
    judge: EncoderInfo | None = None


@dataclass(frozen=True, slots=True)
class RerankJob:
    """A parsed request of /v1/rerank; the query is the job's first request, the documents follow.


    Attributes:
        judge: the cross-encoder; each request has the query and a document; None for cosines.
    """

    job: GenerationJob
    documents: tuple[str, ...]
    top_n: int
    returns_documents: bool
    judge: EncoderInfo | None = None


def read_score(reader: PromptReader, raw: bytes, admission: Admission) -> ScoreJob:
    """Reads a body of /v1/score; errors as in `read_embeddings`."""
    body = parse_body(raw, ScoreBody)
    first, second = body.text_1, body.text_2
    if len(first) not in (1, len(second)):
        raise invalid(
            f"`text_1` has {len(first)} texts and `text_2` has {len(second)}; send one text first, or two lists of one length.",
            "text_1",
        )
    if (judge := _judge(reader)) is not None:
        couples = [(first[i if len(first) > 1 else 0], second[i]) for i in range(len(second))]
        job = _judged_job(reader, body, couples, ("text_1", "text_2"), admission, prefix="score")
        return ScoreJob(job, (), judge)
    texts = [*(("text_1", text) for text in first), *(("text_2", text) for text in second)]
    job = pooled_job(reader, body, texts, _pooling(reader), admission, prefix="score")
    pairs = tuple((i if len(first) > 1 else 0, len(first) + i) for i in range(len(second)))
    return ScoreJob(job, pairs)


def read_rerank(reader: PromptReader, raw: bytes, admission: Admission) -> RerankJob:
    """Reads a body of /v1/rerank; errors as in `read_embeddings`."""
    body = parse_body(raw, RerankBody)
    documents = tuple(document.text for document in body.documents)
    top_n, returns_documents = body.top_n or len(documents), body.return_documents is not False
    if (judge := _judge(reader)) is not None:
        couples = [(body.query, text) for text in documents]
        job = _judged_job(reader, body, couples, ("query", "documents"), admission, prefix="rerank")
        return RerankJob(job, documents, top_n, returns_documents, judge)
    texts = [("query", body.query), *(("documents", text) for text in documents)]
    job = pooled_job(reader, body, texts, _pooling(reader), admission, prefix="rerank")
    return RerankJob(job, documents, top_n, returns_documents)


def _judge(reader: PromptReader) -> EncoderInfo | None:
    """Returns the model where it scores pairs of texts; None where it makes vectors.

    Raises:
        InvalidRequestError: it does neither.
    """
    encoder = reader.model.encoder
    if encoder is None or not encoder.labels:
        return None
    if not encoder.is_cross_encoder:
        raise invalid(
            f"This model tells {len(encoder.labels)} classes of texts apart and scores no pairs; ask /classify.",
            "model",
            "no_scores",
        )
    return encoder


def _judged_job(
    reader: PromptReader,
    body: PooledBody,
    couples: Sequence[tuple[Text, Text]],
    fields: tuple[str, str],
    admission: Admission,
    *,
    prefix: str,
) -> GenerationJob:
    """Returns a job with a request for each pair of texts."""
    prompts, ways = [], []
    for first, second in couples:
        if not (isinstance(first, str) and isinstance(second, str)):
            field = fields[isinstance(first, str)]
            raise invalid(f"`{field}` must be text with this model, which reads both texts together.", field, "invalid_type")
        check_fits(reader, sum(map(reader.tokenizer.least_tokens, (first, second))), fields[1], counts="at least ")
        token_ids, second_start = reader.tokenizer.encode_pair(first, second)
        check_fits(reader, len(token_ids), fields[1])
        prompts.append(token_ids)
        ways.append(PoolingParams(kind="classify", normalize=False, second_start=second_start))
    return make_pooled_job(reader, body, prompts, ways, admission, prefix=prefix)


def _read_judgements(judge: EncoderInfo, scores: Sequence[Embedding]) -> list[float]:
    return [judge.probabilities(vector_of(score).tolist())[0] for score in scores]


def _pooling(reader: PromptReader) -> PoolingParams:
    return PoolingParams(kind=reader.model.pooling.kind)


def score_pairs(asked: ScoreJob, embeddings: Sequence[Embedding]) -> ScoreList:
    """Returns the reply of /v1/score."""
    if asked.judge is not None:
        scores = _read_judgements(asked.judge, embeddings)
    else:
        scores = [cosine(embeddings[a], embeddings[b]) for a, b in asked.pairs]
    data, job = [Score(i, score) for i, score in enumerate(scores)], asked.job
    return ScoreList(job.job_id, job.created_s, job.model_name, data, usage_of(job))


def rank_documents(asked: RerankJob, embeddings: Sequence[Embedding]) -> Ranking:
    """Returns the reply of /v1/rerank; of equal documents the earlier one comes first."""
    if asked.judge is not None:
        scores = _read_judgements(asked.judge, embeddings)
    else:
        query, *others = embeddings
        scores = [cosine(query, other) for other in others]
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: asked.top_n]
    results = [
        RankedDocument(index, scores[index], {"text": asked.documents[index]} if asked.returns_documents else None)
        for index in best
    ]
    return Ranking(asked.job.job_id, asked.job.model_name, results, usage_of(asked.job))


def cosine(one: Embedding, other: Embedding) -> float:
    """Returns the cosine of the angle between two normalised vectors, kept within [-1, 1]."""
    product = float(np.dot(vector_of(one).astype(np.float64), vector_of(other).astype(np.float64)))
    return min(1.0, max(-1.0, product))


# /classify, in the shape of vLLM.
class ClassifyBody(PooledBody):
    """Body of /classify. `use_activation` false leaves the scores of classes as the model has them."""

    input: Annotated[list[Text], PlainValidator(text_list("input"), json_schema_input_type=TextInput)]
    use_activation: bool | None = None


class Classified(msgspec.Struct, frozen=True):
    """The classes of one text: the most likely one by name, and the probability of each in the order of the model."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class Classification(msgspec.Struct, frozen=True):
    """Reply of /classify."""

    id: str
    created: int
    model: str
    data: list[Classified]
    usage: EmbeddingUsage
    object: str = "list"


@dataclass(frozen=True, slots=True)
class ClassifyJob:
    """A parsed request of /classify.

    Attributes:
        classes: of the model.
        activates: scores become probabilities.
    """

    job: GenerationJob
    classes: EncoderInfo
    activates: bool


def read_classify(reader: PromptReader, raw: bytes, admission: Admission) -> ClassifyJob:
    """Reads a body of /classify; errors as in `embeddings.read_embeddings`."""
    body = parse_body(raw, ClassifyBody)
    encoder = reader.model.encoder
    if encoder is None or not encoder.labels:
        raise invalid("This model has no classes; serve one that was trained to classify texts.", "model", "no_classes")
    pooling = PoolingParams(kind="classify", normalize=False)
    job = pooled_job(reader, body, [("input", text) for text in body.input], pooling, admission, prefix="classify")
    return ClassifyJob(job, encoder, body.use_activation is not False)


def write_classes(asked: ClassifyJob, scores: Sequence[Embedding]) -> Classification:
    """Returns the reply of /classify; of equally likely classes the first one is named."""
    data = []
    for index, found in enumerate(scores):
        values = vector_of(found).tolist()
        shown = asked.classes.probabilities(values) if asked.activates else values
        label = asked.classes.labels[values.index(max(values))]
        data.append(Classified(index, label, shown, len(values)))
    job = asked.job
    return Classification(job.job_id, job.created_s, job.model_name, data, usage_of(job))
