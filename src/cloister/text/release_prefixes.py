"""System prompts shipped with a release, as tokens: the only content whose KV every scope may share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from cloister.text.chat import ChatTemplate
from cloister.text.tokenizer import Tokenizer
from cloister.types.errors import CloisterError, ConfigError

MAX_BYTES: Final = 1 << 20
_WHERE: Final = {"param": "release_prefixes"}


def read_release_prefixes(path: Path, tokenizer: Tokenizer, template: ChatTemplate) -> list[list[int]]:
    """Returns the token ids with which conversations begin that open with these system prompts.

    Args:
        path: a JSON list of texts.

    Raises:
        ConfigError: the file is no such list, or the model's template takes no system message by itself.
    """
    prompts = _read(path)
    found = []
    for prompt in prompts:
        try:
            text = template.render([{"role": "system", "content": prompt}], add_generation_prompt=False)
        except CloisterError as error:
            raise ConfigError(
                f"a release prefix cannot be written by the model's chat template: {error.message}", **_WHERE
            ) from None
        found.append(tokenizer.encode(text))
    return found


def _read(path: Path) -> list[str]:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{path} has more than {MAX_BYTES} bytes; keep release prefixes short", **_WHERE)
        prompts = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the release prefixes {path} cannot be read: {error.strerror}", **_WHERE) from None
    except ValueError:
        raise ConfigError(f"{path} is not JSON; write a list of system prompts", **_WHERE) from None
    if not isinstance(prompts, list) or not prompts or not all(isinstance(prompt, str) and prompt for prompt in prompts):
        raise ConfigError(f"{path} is not a list of texts; write a JSON list of system prompts", **_WHERE)
    return prompts
