"""/classify: request body and reply, in the shape of vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from pydantic import PlainValidator

from cloister.policy.gate import Admission
from cloister.server.embeddings import EmbeddingUsage, PooledBody, Text, TextInput, pooled_job, text_list, usage_of, vector_of
from cloister.server.errors import invalid
from cloister.server.jobs import GenerationJob
from cloister.server.parse import parse_body
from cloister.server.prompts import PromptReader
from cloister.types.request import Embedding, EncoderInfo, PoolingParams


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
