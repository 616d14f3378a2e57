"""Documents of a request that are encoded separately: from texts to one prompt, and where each stands in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cloister.server.errors import invalid
from cloister.server.schemas import CompletionBody
from cloister.text import Tokenizer
from cloister.types.documents import Documents


@dataclass(frozen=True, slots=True)
class DocumentPrompt:
    """A prompt with documents.

    Attributes:
        token_ids: prefix, documents, and the prompt behind them. Prefix and documents fill whole blocks, with newlines behind.
    """

    token_ids: list[int]
    documents: Documents


def read_documents(body: CompletionBody, tokenizer: Tokenizer, block_size: int) -> DocumentPrompt:
    """Returns the prompt of a body with `documents`.

    Args:
        block_size: documents begin and end at its multiples; 0 if the engine takes none.

    Raises:
        InvalidRequestError: the model, or another field, does not support documents.
    """
    if not block_size:
        raise invalid(
            "This model cannot encode documents separately: some of its layers do not see all positions, transformers computes "
            "it, or the server keeps KV as `kivi2`. Put the documents into `prompt`.",
            "documents",
            "no_documents",
        )
    for name, is_given in (("echo", body.echo), ("suffix", body.suffix)):
        if is_given:
            raise invalid(f"`{name}` does not go with `documents`; leave one of them out.", name)
    question = body.prompt[0]
    if len(body.prompt) > 1 or not isinstance(question, str):
        raise invalid("`prompt` must be one text where `documents` is set.", "prompt", "invalid_type")
    texts = [document.text for document in body.documents or ()]
    return join_documents(body.documents_prefix or "", texts, question, tokenizer, block_size)


def join_documents(prefix: str, texts: Sequence[str], question: str, tokenizer: Tokenizer, block_size: int) -> DocumentPrompt:
    """Returns a prompt with each text as a document; errors as in `read_documents`."""
    asked = tokenizer.encode(question, add_special_tokens=False)
    newline = tokenizer.encode("\n", add_special_tokens=False)[-1:]
    if not asked:
        raise invalid("`prompt` is empty; send at least one token.", "prompt", "empty_prompt")
    if not newline:
        raise invalid("This model's tokenizer has no newline, with which documents are filled up.", "documents", "no_documents")
    token_ids: list[int] = []
    bounds: list[int] = []
    for place, text in enumerate((prefix, *texts)):
        piece = tokenizer.encode(text, add_special_tokens=not place)
        token_ids += piece
        token_ids += newline * (-len(piece) % block_size if piece else block_size)
        bounds.append(len(token_ids))
    return DocumentPrompt(token_ids + asked, Documents(tuple(bounds[:-1]), bounds[-1]))
