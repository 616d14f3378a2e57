"""Write a trained decoder as a Hugging Face directory: bfloat16 safetensors, configuration, tokenizer, template."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from tokenizers import Tokenizer

from cloister.train.decoder import Decoder, Shape
from cloister.train.draft_training import llama_config
from training.chat import TEMPLATE
from training.tokenizer import CONTROL_TOKENS, END, END_OF_TEXT, token_id


def stop_ids(tokenizer: Tokenizer) -> list[int]:
    """The tokens that end an answer."""
    return [token_id(tokenizer, END), token_id(tokenizer, END_OF_TEXT)]


def generation_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """``generation_config.json``: greedy, because what the model knows it knows by heart."""
    return {
        "bos_token_id": token_id(tokenizer, END_OF_TEXT),
        "eos_token_id": stop_ids(tokenizer),
        "pad_token_id": token_id(tokenizer, END_OF_TEXT),
        "do_sample": False,
        "temperature": 0.0,
    }


def tokenizer_config(shape: Shape) -> dict[str, Any]:
    """``tokenizer_config.json``, the chat template included."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": shape.max_positions,
        "bos_token": END_OF_TEXT,
        "eos_token": END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [t for t in CONTROL_TOKENS if t not in (END_OF_TEXT, END)],
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }


def hugging_face_name(name: str) -> str:
    """The name ``LlamaForCausalLM`` gives a weight."""
    return f"model.{name}"


def export_model(model: Decoder, tokenizer: Tokenizer, folder: Path) -> None:
    """Write everything but the model card; the tied output matrix is not written twice."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        hugging_face_name(name): weight.detach().to(torch.bfloat16).contiguous() for name, weight in model.state_dict().items()
    }
    (folder / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    for name, content in (
        ("config.json", llama_config(model.shape, token_id(tokenizer, END_OF_TEXT), stop_ids(tokenizer))),
        ("generation_config.json", generation_config(tokenizer)),
        ("tokenizer_config.json", tokenizer_config(model.shape)),
    ):
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def load_exported(model: Decoder, folder: Path) -> Decoder:
    """Put the weights of an exported model into a decoder of its shape.

    Raises:
        FileNotFoundError: if the folder holds no weights.
    """
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({name.removeprefix("model."): weight.float() for name, weight in weights.items()})
    return model
