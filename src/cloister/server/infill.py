"""Fill-in-the-middle requests of every API."""

from __future__ import annotations

from cloister.server.errors import invalid
from cloister.server.schemas import CompletionBody
from cloister.text import Tokenizer
from cloister.text.infill import Infill


def require_infill(tokenizer: Tokenizer, param: str | None = None) -> Infill:
    """Returns how the model fills in the middle.

    Args:
        param: the field that asks for it; None where the whole request does.

    Raises:
        InvalidRequestError: the model was not trained to.
    """
    if (infill := Infill.of(tokenizer)) is None:
        what = f"`{param}` is refused: this model" if param else "This model"
        raise invalid(
            f"{what} does not fill in the middle: its vocabulary has no tokens for that. Serve one that was trained to.",
            param,
            "no_infill",
        )
    return infill


def read_suffix(body: CompletionBody, tokenizer: Tokenizer) -> CompletionBody:
    """Returns a body whose prompts have its `suffix` in them, between the model's own tokens.

    Raises:
        InvalidRequestError: the model, or another field, does not go with a suffix.
    """
    if not body.suffix:
        return body
    infill = require_infill(tokenizer, "suffix")
    if body.echo:
        raise invalid("`echo` does not go with `suffix`: the prompt has an end too. Leave one of them out.", "echo")
    texts = [prompt for prompt in body.prompt if isinstance(prompt, str)]
    if len(texts) < len(body.prompt):
        raise invalid("`prompt` must be text where `suffix` is set, not token ids.", "prompt", "invalid_type")
    return body.model_copy(
        update={
            "prompt": [infill.encode(text, body.suffix) for text in texts],
            "stop_token_ids": [*(body.stop_token_ids or ()), *infill.stop_token_ids],
        }
    )
