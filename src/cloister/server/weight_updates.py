"""Checks that requests that a front has read with one model are also valid for other weights (decisions/0035)."""

from __future__ import annotations

from cloister.models.location import locate_here
from cloister.server.errors import invalid
from cloister.server.prompts import PromptReader
from cloister.text import ChatTemplate, Tokenizer
from cloister.types.errors import CloisterError


def check_weights(reader: PromptReader, model: str) -> None:
    """Checks other weights before any engine loads them. Takes seconds for a large vocabulary.

    Args:
        model: as the setting `model`; it must be on this machine.

    Raises:
        InvalidRequestError: they are not on this machine, or have another tokenizer, chat template or image processor.
    """
    try:
        other = _find_differences(reader, model)
    except CloisterError as error:
        raise invalid(error.message, "model") from None
    if other:
        raise invalid(
            f"{model} has another {' and another '.join(other)} than the served model, which this server has used to read "
            "requests; start another server for it, and send requests there",
            "model",
        )


def _find_differences(reader: PromptReader, model: str) -> list[str]:
    from cloister.models.image_processing import open_image_processor  # only now: it imports every family

    path = locate_here(model)
    tokenizer = Tokenizer(path)
    template = ChatTemplate.load(path, tokenizer.special)
    images = reader.chat_format.images
    pairs = {
        "tokenizer": (tokenizer.digest(), reader.tokenizer.digest()),
        "chat template": (template.source, reader.chat_format.template.source),
        "image processor": (open_image_processor(path), None if images is None else (images.processor, images.token_id)),
    }
    return [name for name, (new, own) in pairs.items() if new != own]
