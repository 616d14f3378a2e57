"""A GGUF file as a Hugging Face directory in float32, with the very numbers that its codes stand for.

The weights are read by `transformers`, so that what our own reader makes of the file can be compared with them. The tokenizer
is ours: the library's conversion loses how the text is split into words.
"""

from __future__ import annotations

import json
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any, Final

from cloister.text.source import open_source

_UNKNOWN_TO_FAMILIES: Final = ("unk_token_id", "quantization_config")


def dequantize(path: Path, out: Path) -> Path:
    """Writes `out`: config.json, model.safetensors in float32, and the tokenizer. A directory that is whole is left alone.

    Args:
        path: a GGUF file.

    Returns:
        `out`.
    """
    if (out / "config.json").exists():
        return out
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    with redirect_stderr(StringIO()):  # its progress bars would break the caller's
        model: Any = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    out.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(path, out)
    config = {name: value for name, value in model.config.to_diff_dict().items() if _is_known(name)}
    config |= {"architectures": [type(model).__name__], "dtype": "float32"}
    _write_json(out / "config.json", config)  # last: now it is a model
    return out


def _is_known(name: str) -> bool:
    return not name.startswith("_") and name not in _UNKNOWN_TO_FAMILIES


def _write_tokenizer(path: Path, out: Path) -> None:
    source = open_source(path)
    _write_json(out / "tokenizer.json", source.tokenizer())
    _write_json(out / "tokenizer_config.json", {**source.config(), "tokenizer_class": "PreTrainedTokenizerFast"})
    if template := source.templates().get("default"):
        (out / "chat_template.jinja").write_text(template, encoding="utf-8")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
