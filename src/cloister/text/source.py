"""A model's text files (tokenizer, template, special tokens) in Hugging Face's terms, wherever they are stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from cloister.text.gguf import GGUFSource, TokenizerStore
from cloister.text.sentencepiece import convert_model, named_tokens
from cloister.types.errors import ModelError

SENTENCE_PIECE: Final = "tokenizer.model"


class _Head(msgspec.Struct):
    """What of tokenizer.json is not the library's alone; reading it skips the rest."""

    added_tokens: Any = None
    normalizer: Any = None
    decoder: Any = None


class TextSource(Protocol):
    """Reads a model's tokenizer and templates. Each method raises ModelError if they are missing or damaged."""

    def tokenizer(self) -> dict[str, Any]:
        """Returns what tokenizer.json holds."""
        ...

    def tokenizer_text(self) -> tuple[dict[str, Any], bytes]:
        """Returns what tokenizer.json holds beside the vocabulary, and all of it as JSON."""
        ...

    def config(self) -> dict[str, Any]:
        """Returns what tokenizer_config.json holds; empty if there is none."""
        ...

    def templates(self) -> dict[str, str]:
        """Returns the Jinja sources of the chat templates by name; the one without a name is "default"."""
        ...


class DirectorySource:
    """A Hugging Face model directory (protocol `TextSource`): tokenizer.json, or tokenizer.model where there is none."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def tokenizer(self) -> dict[str, Any]:
        if self._is_sentence_piece:
            return convert_model(_read_bytes(self._path / SENTENCE_PIECE), self._settings())
        return _read_json(self._path / "tokenizer.json")

    def tokenizer_text(self) -> tuple[dict[str, Any], bytes]:
        """Leaves the vocabulary in the text: as Python's strings, 150,000 entries take 40 MiB."""
        if self._is_sentence_piece:
            settings = self.tokenizer()
            head = {name: value for name, value in settings.items() if name != "model"}
            return head, msgspec.json.encode(settings)
        text = _read_bytes(self._path / "tokenizer.json")
        try:
            return msgspec.structs.asdict(msgspec.json.decode(text, type=_Head)), text
        except msgspec.ValidationError:
            raise ModelError("tokenizer.json must hold a JSON object; download the model again") from None
        except ValueError as error:
            raise _unreadable(self._path / "tokenizer.json", error) from None

    def config(self) -> dict[str, Any]:
        """Returns tokenizer_config.json over special_tokens_map.json, over what tokenizer.model names."""
        named = named_tokens(_read_bytes(self._path / SENTENCE_PIECE)) if self._is_sentence_piece else {}
        return {**named, **self._settings()}

    def _settings(self) -> dict[str, Any]:
        paths = [self._path / name for name in ("special_tokens_map.json", "tokenizer_config.json")]
        found = [_read_json(path) for path in paths if path.is_file()]
        return {key: value for settings in found for key, value in settings.items() if value is not None}

    @property
    def _is_sentence_piece(self) -> bool:
        path = self._path
        return not (path / "tokenizer.json").exists() and (path / SENTENCE_PIECE).exists()

    def templates(self) -> dict[str, str]:
        """Returns chat_template.jinja over chat_template.json over the `chat_template` of tokenizer_config.json."""
        path = self._path
        found = _sources_of(self.config().get("chat_template"))
        if (path / "chat_template.json").is_file():
            found |= _sources_of(_read_json(path / "chat_template.json").get("chat_template"))
        for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
            found[file.stem] = file.read_text(encoding="utf-8")
        if (path / "chat_template.jinja").is_file():
            found["default"] = (path / "chat_template.jinja").read_text(encoding="utf-8")
        return found


def open_source(path: Path, store: TokenizerStore | None = None) -> TextSource:
    """Returns the source at a path: a GGUF file, or else a model directory.

    Args:
        store: keeps what takes long to make.
    """
    return GGUFSource(path, store) if path.is_file() else DirectorySource(path)


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise ModelError(f"{path.name} is missing from the model directory; download the model again") from None
    except OSError as error:
        raise _unreadable(path, error) from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_read_bytes(path).decode())
    except ValueError as error:
        raise _unreadable(path, error) from None
    if not isinstance(value, dict):
        raise ModelError(f"{path.name} must hold a JSON object; download the model again")
    return value


def _unreadable(path: Path, error: Exception) -> ModelError:
    return ModelError(f"{path.name} cannot be read ({type(error).__name__}); download the model again")


def _sources_of(setting: object) -> dict[str, str]:
    """Reads `chat_template`: one source, or a list of objects with `name` and `template`."""
    if isinstance(setting, str):
        return {"default": setting}
    if isinstance(setting, list):
        return {entry["name"]: entry["template"] for entry in setting}
    return {}
