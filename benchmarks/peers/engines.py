"""Engines that run inside the worker: Cloister, transformers, vLLM, OpenVINO GenAI. Imported only where they are installed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Final

from benchmarks.peers.work import Engine

CONTEXT: Final = 4096
NUM_SEQS: Final = 16
KV_TOKENS: Final = 8192
"""Positions that KV caches have room for, where an engine lets one say so: twice the longest figure's need."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What an engine is started with.

    Attributes:
        model: folder or file of the model.
        settings: what is only this engine's, by name.
        kv_token_bytes: KV of one position at 16 bits.
    """

    engine: str
    model: str
    num_threads: int
    kv_token_bytes: int
    vocab_size: int
    settings: Mapping[str, Any] = field(default_factory=dict)


class Cloister:
    """Our own engine through its Python face."""

    def __init__(self, launch: Launch) -> None:
        module = import_module("cloister")
        self._llm = module.LLM(**cloister_settings(launch))
        self._sampling = module.SamplingParams
        self.notes = {"memory": [[what, size] for what, size in self._llm.memory]}

    def generate(self, prompts: Sequence[Sequence[int]], num_new: int) -> None:
        sampling = self._sampling(temperature=0.0, max_tokens=num_new, ignore_eos=True)
        answers = self._llm.generate([list(prompt) for prompt in prompts], sampling)
        check_lengths([len(answer.outputs[0].token_ids) for answer in answers], len(prompts), num_new)

    def close(self) -> None:
        self._llm.close()


def cloister_settings(launch: Launch) -> dict[str, Any]:
    """Returns our engine's settings by name."""
    return {
        "model": launch.model,
        "num_threads": launch.num_threads,
        "dtype": "bfloat16",
        "prefix_cache": False,
        "max_model_len": CONTEXT,
        "max_num_seqs": NUM_SEQS,
        "kv_memory_mb": KV_TOKENS * launch.kv_token_bytes / 2**20,
        **launch.settings,
    }


class Transformers:
    """`generate` of transformers on left-padded static batches, bf16."""

    def __init__(self, launch: Launch) -> None:
        self._torch = import_module("torch")
        self._torch.set_num_threads(launch.num_threads)
        loader = import_module("transformers").AutoModelForCausalLM
        self._model = loader.from_pretrained(launch.model, dtype=self._torch.bfloat16, attn_implementation="sdpa").eval()
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0

    def generate(self, prompts: Sequence[Sequence[int]], num_new: int) -> None:
        width = max(map(len, prompts))
        ids = self._torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        mask = self._torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with self._torch.inference_mode():
            answers = self._model.generate(
                input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=num_new, min_new_tokens=num_new
            )
        check_lengths([answers.shape[1] - width] * answers.shape[0], len(prompts), num_new)

    def close(self) -> None:
        """There is nothing to end."""


class Vllm:
    """vLLM on CPU, bf16."""

    def __init__(self, launch: Launch) -> None:
        module = import_module("vllm")
        self._sampling = module.SamplingParams
        self._llm = module.LLM(
            model=launch.model,
            dtype="bfloat16",
            max_model_len=CONTEXT,
            max_num_seqs=NUM_SEQS,
            enable_prefix_caching=False,
            disable_log_stats=True,
            **launch.settings,
        )

    def generate(self, prompts: Sequence[Sequence[int]], num_new: int) -> None:
        sampling = self._sampling(temperature=0, max_tokens=num_new, min_tokens=num_new, ignore_eos=True, detokenize=False)
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        answers = self._llm.generate(inputs, sampling, use_tqdm=False)
        check_lengths([len(answer.outputs[0].token_ids) for answer in answers], len(prompts), num_new)

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


class OpenVino:
    """Continuous batching of OpenVINO GenAI."""

    def __init__(self, launch: Launch) -> None:
        self._numpy, self._openvino = import_module("numpy"), import_module("openvino")
        self._genai = import_module("openvino_genai")
        scheduler = self._genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.cache_size = launch.settings["cache_gib"]
        scheduler.max_num_seqs = NUM_SEQS
        scheduler.max_num_batched_tokens = launch.settings["max_batched_tokens"]
        properties = {"INFERENCE_NUM_THREADS": launch.num_threads}
        self._pipeline = self._genai.ContinuousBatchingPipeline(launch.model, scheduler, "CPU", properties)

    def generate(self, prompts: Sequence[Sequence[int]], num_new: int) -> None:
        config = self._genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = num_new
        config.ignore_eos, config.do_sample = True, False
        inputs = [self._openvino.Tensor(self._numpy.array([prompt], dtype=self._numpy.int64)) for prompt in prompts]
        answers = self._pipeline.generate(inputs, [config] * len(inputs))
        check_lengths([len(answer.m_generation_ids[0]) for answer in answers], len(prompts), num_new)

    def close(self) -> None:
        """There is nothing to end."""


class LlamaPython:
    """llama.cpp through llama-cpp-python, one request at a time: only for the time from start to first token."""

    def __init__(self, launch: Launch) -> None:
        module = import_module("llama_cpp")
        self._llama = module.Llama(
            launch.model, n_ctx=CONTEXT, n_threads=launch.num_threads, n_batch=512, verbose=False, logits_all=False
        )

    def generate(self, prompts: Sequence[Sequence[int]], num_new: int) -> None:
        for prompt in prompts:
            tokens = self._llama.generate(list(prompt), temp=0.0)
            check_lengths([len([next(tokens) for _ in range(num_new)])], 1, num_new)

    def close(self) -> None:
        self._llama.close()


ENGINES: Final[Mapping[str, Callable[[Launch], Engine]]] = {
    "cloister": Cloister,
    "transformers": Transformers,
    "vllm": Vllm,
    "openvino": OpenVino,
    "llama-python": LlamaPython,
}


def check_lengths(lengths: Sequence[int], num_prompts: int, num_new: int) -> None:
    """Raises RuntimeError unless each prompt has an answer of `num_new` tokens."""
    if list(lengths) != [num_new] * num_prompts:
        raise RuntimeError(f"asked for {num_new} tokens of each of {num_prompts} prompts, got {lengths}")
