"""Prefix keys, seeded by the scope: the scheduler computes them, and the prefix cache finds blocks by them. Pure."""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Sequence

from cloister.types.documents import Documents
from cloister.types.images import ImageTile
from cloister.types.scope import PUBLIC_SCOPE, Scope


class PrefixKeys:
    """Computes SHA-256 chains: a key covers all tokens and images up to its block's end, and the scope that may read them.

    Args:
        identity: everything else that KV depends on, such as the system fingerprint (weights, KV format, numerics, back end).
        block_size: tokens in a block; keys of other block sizes never match.
        public: token ids of public prefixes, such as the release's system prompts. The keys of a prompt that begins with one
            are shared by all scopes up to the point where it diverges; from there they are those of its own scope.
    """

    def __init__(self, identity: str, block_size: int, public: Sequence[Sequence[int]] = ()) -> None:
        self.block_size = block_size
        self._identity = identity.encode()
        self._public_root = self.root(PUBLIC_SCOPE)
        keys: set[bytes] = set()
        for token_ids in public:
            parent = self._public_root
            for end in range(block_size, len(token_ids) + 1, block_size):
                parent = self.next(parent, token_ids[end - block_size : end])
                keys.add(parent)
        self.public = frozenset(keys)

    def root(self, scope: Scope, adapter: str | None = None) -> bytes:
        """Returns the 32 bytes that start the chain of one scope and adapter; no other scope can produce it."""
        digest = hashlib.sha256(b"cloister/prefix/1\0")
        for part in (scope.seed, self._identity, (adapter or "").encode(), str(self.block_size).encode()):
            digest.update(len(part).to_bytes(8, "little") + part)
        return digest.digest()

    def next(self, parent: bytes, token_ids: Sequence[int], image_digests: bytes = b"") -> bytes:
        """Returns the key of a full block of `token_ids` (exactly `block_size`) that follows `parent`.

        Args:
            image_digests: of the images at its positions, with their places (`digest_images`).
        """
        if len(token_ids) != self.block_size:
            raise ValueError("only a full block has a key")
        return hashlib.sha256(parent + array("q", token_ids).tobytes() + image_digests).digest()

    def chain(
        self,
        scope: Scope,
        adapter: str | None,
        token_ids: Sequence[int],
        images: Sequence[ImageTile] = (),
        documents: Documents | None = None,
    ) -> list[bytes]:
        """Returns the keys of all blocks of a prompt that a hit can cover: those before its last token, which must be computed
        for its logits."""
        keys: list[bytes] = []
        num_blocks = (len(token_ids) - 1) // self.block_size
        root = self.root(scope, adapter)
        self.extend(keys, root, token_ids, num_blocks, reads_public=adapter is None, images=images, documents=documents)
        return keys

    def extend(
        self,
        chain: list[bytes],
        root: bytes,
        token_ids: Sequence[int],
        num_blocks: int,
        *,
        reads_public: bool = True,
        images: Sequence[ImageTile] = (),
        documents: Documents | None = None,
    ) -> None:
        """Appends keys to `chain` until it covers the first `num_blocks` blocks of `token_ids`.

        Args:
            reads_public: the chain may begin with public prefixes; False if an adapter is used.
            images: images among the tokens: equal placeholders of other images have other keys.
            documents: parts that are encoded separately: each has the keys that it has directly behind the prefix, and what
                follows them has keys that cover all of them, in their order.
        """
        size = self.block_size
        parent = chain[-1] if chain else None
        for i in range(len(chain), num_blocks):
            block = token_ids[i * size : (i + 1) * size]
            if documents is not None and (piece := self._open_piece(documents, chain, root)) is not None:
                parent = piece
            image_digests = digest_images(images, i * size, (i + 1) * size) if images else b""
            if reads_public and self.public and (parent is None or parent in self.public):
                key = self.next(parent or self._public_root, block, image_digests)
                if key in self.public:
                    parent = key
                    chain.append(key)
                    continue
                parent = root if parent is None else hashlib.sha256(root + parent).digest()
            parent = self.next(root if parent is None else parent, block, image_digests)
            chain.append(parent)

    def _open_piece(self, documents: Documents, chain: Sequence[bytes], root: bytes) -> bytes | None:
        """Returns what precedes the next key of a chain, if a document or what follows the last one begins there."""
        position, size = len(chain) * self.block_size, self.block_size
        if position in documents.starts:
            prefix = chain[documents.starts[0] // size - 1]
            return _open_module(documents, position, prefix, root) if documents.positions else prefix
        if position != documents.end:
            return None
        # The root is in it because the prefix and all documents may be public; the bounds are, because documents that begin
        # alike have the same keys as those behind a prefix that is longer by this beginning, yet are seen elsewhere. Documents
        # have the same KV however they are weighed, and whatever links follow them; what follows has not. The root is another
        # one for each adapter, and so for the embeddings of links.
        digest = hashlib.sha256(b"cloister/documents/4\0" + root)
        digest.update(array("q", [*documents.starts, documents.end]).tobytes())
        numbers = documents.temperature, documents.scale, documents.num_links, len(documents.positions)
        digest.update(struct.pack("<ddqq", *numbers))
        for run in documents.positions:
            digest.update(array("q", run).tobytes())
        for end in (*documents.starts[1:], documents.end):
            digest.update(chain[end // size - 1])
        return digest.digest()


def _open_module(documents: Documents, start: int, prefix: bytes, root: bytes) -> bytes:
    """Returns what precedes the first key of a document whose tokens have positions of their own: these, and the prefix.

    The root is in it because the prefix may be public.
    """
    digest = hashlib.sha256(b"cloister/module/1\0" + root + prefix)
    end = documents.find_piece_end(start) or documents.end
    digest.update(array("q", documents.turns(start, end)).tobytes())
    return digest.digest()


def digest_images(images: Sequence[ImageTile], start: int, end: int) -> bytes:
    """Returns the places and digests of the images that have positions in [start, end)."""
    found = [image for image in images if image.offset < end and image.end > start]
    return b"".join(
        image.offset.to_bytes(8, "little") + image.num_tokens.to_bytes(8, "little") + image.digest for image in found
    )
