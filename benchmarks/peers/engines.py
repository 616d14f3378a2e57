"""Engines that run inside the worker: Cloister, transformers, vLLM, OpenVINO GenAI. Imported only where they are installed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any, Final

from benchmarks.peers.work import Engine

CONTEXT: Final = 4352
"""Longest sequence, prompt and answer, unless a figure needs more."""
NUM_SEQS: Final = 16
KV_TOKENS: Final = 8192
"""Positions that KV caches have room for, where an engine lets one say so and no figure needs more."""

OPENVINO_SETTINGS: Final[Mapping[str, Any]] = {"cache_gib": 1, "max_batched_tokens": 512, "properties": {}}
"""Settings of a launch of OpenVINO; properties are those of its CPU plugin."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What an engine is started with.

    Attributes:
        model: folder or file of the model.
        settings: what is only this engine's, by name.
        context: longest sequence, prompt and answer.
        kv_tokens: positions that the KV cache has room for.
        kv_token_bytes: KV of one position at 16 bits.
    """

    engine: str
    model: str
    num_threads: int
    kv_token_bytes: int
    vocab_size: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    context: int = CONTEXT
    kv_tokens: int = KV_TOKENS


class Cloister:
    """Our own engine through its Python API."""

    def __init__(self, launch: Launch) -> None:
        module = import_module("cloister")
        self._llm = module.LLM(**cloister_settings(launch))
        self._sampling = module.SamplingParams
        self.notes = {"memory": [[what, size] for what, size in self._llm.memory]}

    def generate(self, prompts: Sequence[Sequence[int]], num_new: int) -> None:
        sampling = self._sampling(temperature=0.0, max_tokens=num_new, ignore_eos=True)
        answers = self._llm.generate([list(prompt) for prompt in prompts], sampling)
        check_lengths([len(answer.outputs[0].token_ids) for answer in answers], len(prompts), num_new)

    def time_decode(self, prompt: Sequence[int], num_new: int) -> float:
        sampling = self._sampling(temperature=0.0, max_tokens=num_new + 1, ignore_eos=True)
        times = [time.perf_counter() for output in self._llm.stream(list(prompt), sampling) for _ in output.token_ids]
        check_lengths([len(times)], 1, num_new + 1)
        return times[-1] - times[0]

    def close(self) -> None:
        self._llm.close()


def file_backend(kernels: str) -> str:
    """Files the native back end on the kernels of one instruction set, which no setting can name; returns its name there."""
    backends, native = import_module("cloister.backends"), import_module("cloister.backends.native")
    name = f"native-{kernels}"
    if name not in backends.BACKENDS.names():
        backends.BACKENDS.register(name, native.THREAT)(partial(native.make_native_backend, kernels=kernels))
    return name


def cloister_settings(launch: Launch) -> dict[str, Any]:
    """Returns our engine's settings by name; `kernels` among the launch's holds the native back end to an instruction set."""
    settings = dict(launch.settings)
    if (kernels := settings.pop("kernels", None)) is not None:
        settings["backend"] = file_backend(kernels)
    return {
        "model": launch.model,
        "num_threads": launch.num_threads,
        "dtype": "bfloat16",
        "prefix_cache": False,
        "max_model_len": launch.context,
        "max_num_seqs": NUM_SEQS,
        "kv_memory_mb": launch.kv_tokens * launch.kv_token_bytes / 2**20,
        **settings,
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
    """vLLM, bf16."""

    def __init__(self, launch: Launch) -> None:
        module = import_module("vllm")
        self._sampling = module.SamplingParams
        settings: dict[str, Any] = {
            "model": launch.model,
            "dtype": "bfloat16",
            "max_model_len": launch.context,
            "max_num_seqs": NUM_SEQS,
            "enable_prefix_caching": False,
            "disable_log_stats": True,
        }
        self._llm = module.LLM(**{**settings, **launch.settings})

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
        properties = {"INFERENCE_NUM_THREADS": launch.num_threads, **launch.settings["properties"]}
        self._pipeline = self._genai.ContinuousBatchingPipeline(launch.model, scheduler, "CPU", properties)

    def generate(self, prompts: Sequence[Sequence[int]], num_new: int) -> None:
        config = self._make_config(num_new)
        inputs = [self._openvino.Tensor(self._numpy.array([prompt], dtype=self._numpy.int64)) for prompt in prompts]
        answers = self._pipeline.generate(inputs, [config] * len(inputs))
        check_lengths([len(answer.m_generation_ids[0]) for answer in answers], len(prompts), num_new)

    def time_decode(self, prompt: Sequence[int], num_new: int) -> float:
        ids = self._openvino.Tensor(self._numpy.array([prompt], dtype=self._numpy.int64))
        handle = self._pipeline.add_request(0, ids, self._make_config(num_new + 1))
        times: list[float] = []
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            while handle.can_read():
                times += [time.perf_counter() for output in handle.read().values() for _ in output.generated_ids]
        check_lengths([len(times)], 1, num_new + 1)
        return times[-1] - times[0]

    def close(self) -> None:
        """There is nothing to end."""

    def _make_config(self, num_new: int) -> Any:
        config = self._genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = num_new
        config.ignore_eos, config.do_sample = True, False
        return config


class LlamaPython:
    """llama.cpp through llama-cpp-python, one request at a time: only for the time from start to first token."""

    def __init__(self, launch: Launch) -> None:
        module = import_module("llama_cpp")
        self._llama = module.Llama(
            launch.model, n_ctx=launch.context, n_threads=launch.num_threads, n_batch=512, verbose=False, logits_all=False
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
