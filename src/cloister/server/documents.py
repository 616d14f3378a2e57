"""Documents of a request that are encoded separately: builds one prompt from their texts, with the place of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from cloister.server.errors import invalid
from cloister.server.sampling import check_text
from cloister.server.schemas import ChatBody, CompletionBody
from cloister.text import ChatTemplate, Tokenizer
from cloister.text.chat_documents import Render, render_in_pieces
from cloister.types.documents import Documents
from cloister.types.request import ModelInfo


@dataclass(frozen=True, slots=True)
class DocumentPrompt:
    """A prompt with documents.

    Attributes:
        token_ids: prefix, documents, newlines where link tokens stand, and the prompt behind them. Prefix and documents fill
            whole blocks, with newlines behind.
    """

    token_ids: list[int]
    documents: Documents


def read_documents(body: CompletionBody, tokenizer: Tokenizer, model: ModelInfo, num_links: int) -> DocumentPrompt:
    """Returns the prompt of a body with `documents`.

    Args:
        num_links: link tokens that the request's adapter has for each document.

    Raises:
        InvalidRequestError: the model, or another field, does not support documents.
    """
    check_documents(model)
    question = read_question(body, "documents")
    texts = [document.text for document in body.documents or ()]
    prefix = body.documents_prefix or ""
    for text, name in ((question, "prompt"), (prefix, "documents_prefix"), *((text, "documents") for text in texts)):
        check_text(text, tokenizer, model, name)
    prompt = join_documents(prefix, texts, question, tokenizer, model.document_block_size, num_links)
    return weigh_documents(prompt, body.documents_temperature, body.documents_scale, model)


def check_documents(model: ModelInfo) -> None:
    """Raises InvalidRequestError unless a model can encode documents separately."""
    if not model.document_block_size:
        raise invalid(
            "This model cannot encode documents separately: some of its layers do not see all positions, transformers computes "
            "it, or the server keeps KV as `kivi2`. Put the documents into the prompt.",
            "documents",
            "no_documents",
        )


def check_weights(body: ChatBody | CompletionBody) -> None:
    """Raises InvalidRequestError if a body has weights for documents, and no documents."""
    needed = "`documents` or `prompt_schema`" if isinstance(body, CompletionBody) else "`documents`"
    for name in ("documents_temperature", "documents_scale"):
        if getattr(body, name) is not None:
            raise invalid(f"`{name}` needs {needed}; send one, or leave `{name}` out.", name)


def weigh_documents(prompt: DocumentPrompt, temperature: float | None, scale: float | None, model: ModelInfo) -> DocumentPrompt:
    """Returns a prompt whose documents have the weights that a request asks for, else 1.

    Raises:
        InvalidRequestError: the back end cannot weigh documents.
    """
    documents = msgspec.structs.replace(prompt.documents, temperature=temperature or 1.0, scale=scale or 1.0)
    if documents.has_weights and not model.weighs_documents:
        name = "documents_temperature" if documents.temperature != 1.0 else "documents_scale"
        raise invalid("This back end cannot weigh documents; leave the field out, or serve with the native back end.", name)
    return replace(prompt, documents=documents)


def join_documents(
    prefix: str, texts: Sequence[str], question: str, tokenizer: Tokenizer, block_size: int, num_links: int = 0
) -> DocumentPrompt:
    """Returns a prompt with each text as a document; errors as in `read_documents`."""
    asked = tokenizer.encode(question, add_special_tokens=False)
    if not asked:
        raise invalid("`prompt` is empty; send at least one token.", "prompt", "empty_prompt")
    pieces = [tokenizer.encode(text, add_special_tokens=not place) for place, text in enumerate((prefix, *texts))]
    return join_pieces(pieces, asked, tokenizer, block_size, num_links)


def read_question(body: CompletionBody, param: str) -> str:
    """Returns the prompt of a body with documents, or with modules of a schema.

    Raises:
        InvalidRequestError: it is not one text, is empty, or a field does not go with `param`.
    """
    others = {"echo": body.echo, "suffix": body.suffix, "prompt_schema": param != "prompt_schema" and body.prompt_schema}
    for name, is_given in others.items():
        if is_given:
            raise invalid(f"`{name}` does not go with `{param}`; leave one of them out.", name)
    question = body.prompt[0]
    if len(body.prompt) > 1 or not isinstance(question, str):
        raise invalid(f"`prompt` must be one text where `{param}` is set.", "prompt", "invalid_type")
    if not question:
        raise invalid("`prompt` is empty; send at least one token.", "prompt", "empty_prompt")
    return question


def read_chat_documents(
    body: ChatBody, messages: Sequence[Mapping[str, Any]], template: ChatTemplate, render: Render, tokenizer: Tokenizer,
    model: ModelInfo, num_links: int,
) -> tuple[DocumentPrompt, str]:  # fmt: skip
    """Returns the prompt of a conversation with `documents`, and the text behind them.

    Args:
        messages, render: as in `render_in_pieces`.
        num_links: as in `read_documents`.

    Raises:
        InvalidRequestError: the model, its chat template, or another field does not support documents.
    """
    check_documents(model)
    if any(message.has_images for message in body.messages):
        raise invalid("`documents` do not go with images; leave one of them out.", "documents")
    documents = [document.model_dump(exclude_none=True) for document in body.documents or ()]
    texts = render_in_pieces(template, render, messages, documents)
    for text in texts:
        check_text(text, tokenizer, model, "messages")
    pieces = [tokenizer.encode(text) for text in texts]
    prompt = join_pieces(pieces[:-1], pieces[-1], tokenizer, model.document_block_size, num_links)
    return weigh_documents(prompt, body.documents_temperature, body.documents_scale, model), texts[-1]


def find_newline(tokenizer: Tokenizer) -> list[int]:
    """Returns the token that fills blocks up, and holds the places of link tokens.

    Raises:
        InvalidRequestError: there is none.
    """
    newline = tokenizer.encode("\n", add_special_tokens=False)[-1:]
    if not newline:
        raise invalid("This model's tokenizer has no newline, with which documents are filled up.", "documents", "no_documents")
    return newline


def join_pieces(
    pieces: Sequence[list[int]], asked: list[int], tokenizer: Tokenizer, block_size: int, num_links: int = 0
) -> DocumentPrompt:
    """Returns a prompt of a prefix, documents, and what follows them: link tokens, then `asked`."""
    newline = find_newline(tokenizer)
    token_ids: list[int] = []
    bounds: list[int] = []
    for piece in pieces:
        token_ids += piece
        token_ids += newline * (-len(piece) % block_size if piece else block_size)
        bounds.append(len(token_ids))
    documents = Documents(tuple(bounds[:-1]), bounds[-1], num_links=num_links)
    return DocumentPrompt(token_ids + newline * (documents.links_end - documents.end) + asked, documents)
