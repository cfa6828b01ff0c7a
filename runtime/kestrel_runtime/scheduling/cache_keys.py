"""Makes keys that name the content of a sequence's positions: keys are equal if and only if the content is equal.

A key is the SHA-256 of typed parts of known length; it includes the key of everything before its positions. The key
of each page of an image is made of the SHA-256 of the whole span of the image, and of the number of the page.
Workers make the keys of prompts; the engine thread adds one when a page fills while decoding.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple, NewType

from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.output.output_parser import Token

Digest = NewType("Digest", bytes)

_values_of = attrgetter("value")
_pack_length = struct.Struct("<Q").pack
_pack_text_token = struct.Struct("<cq").pack

_MAX_KNOWN_NAMESPACES = 1024
_MAX_KNOWN_IMAGES = 1024
"""The most images whose keys are kept; the keys of an image with 46 pages take about 5 KB."""

FIELDS_WITHOUT_EFFECT: Mapping[str, str] = {
    "cuda_graphs": "graphs replay the very kernels that run without them",
    "max_batch_size": "how many sequences run together; rows of a step do not read each other",
    "num_kv_pages": "how many pages there are, not what they hold",
    "memory_utilization": "how many pages there are, not what they hold",
    "memory_limit": "how many pages there are, not what they hold",
    "image_cache_bytes": "how many image embeddings are kept, not what they hold",
    "adapters": "where adapters are; keys have the content of each",
    "adapter_repositories": "where adapters are; keys have the content of each",
    "num_adapter_slots": "how many adapters are loaded together; rows of a step do not read each other",
    "max_adapter_rank": "which adapters are refused",
    "max_queued_requests": "who may wait",
    "max_queued_image_bytes": "who may wait",
    "max_queued_tokens": "who may wait",
    "ageing_s": "who starts first",
    "max_image_bytes": "which images are refused",
    "max_image_pixels": "which images are refused",
    "max_decoded_image_bytes": "which images are refused, and how many are decoded together",
    "num_preprocess_threads": "how many images are decoded together",
    "max_prefill_tokens": "how prompts are divided into chunks; a chunk reads what those before it have written",
    "max_crops_per_step": "how images are divided among steps; crops do not read each other",
    "step_timeout_s": "when a device counts as hung",
}
"""The fields of `EngineConfig` that change neither keys and values nor image embeddings of a sequence, and why.

No key contains them. The number of rows of a step may change the last bits of a result, as it does without a cache.
"""


class CacheScope(NamedTuple):
    """The namespace and the images of cached content, by which it is removed."""

    namespace: str = ""
    images: frozenset[bytes] = frozenset()
    """SHA-256 of each image's encoded bytes."""

    def is_part_of(self, namespace: str | None, image: bytes | None) -> bool:
        """Returns True if removing a namespace, or an image in it, removes this content. None stands for all."""
        return namespace in (None, self.namespace) and (image is None or image in self.images)


EVERYBODY = CacheScope()
"""The scope of content without an image, in the only namespace of a server that does not distinguish callers."""


class EmbeddingKey(NamedTuple):
    """The key of the embeddings of an image."""

    digest: Digest
    scope: CacheScope


@dataclass(slots=True)
class PrefixKeys:
    """The keys of the content of a sequence's positions.

    `root` covers everything that changes keys and values, except the tokens: model, revision, backends, data types,
    adapter and namespace. `pages[i]` covers `pages[i - 1]` and positions [i * page_size, (i + 1) * page_size).
    """

    root: Digest
    pages: list[Digest] = field(default_factory=list)
    boundaries: dict[int, Digest] = field(default_factory=dict)
    """Keys at share points inside a page: number of positions → key of these positions."""
    spans: tuple[tuple[int, int], ...] = ()
    """Bidirectional spans [start, end): their positions can only be shared together."""
    scope: CacheScope = EVERYBODY
    image: bytes = b""
    """SHA-256 of the encoded bytes of the image; b"" without an image."""

    def shareable(self, num_positions: int) -> int:
        """Returns the largest number of positions up to `num_positions` that can be shared without splitting a
        span."""
        for start, end in self.spans:
            if start < num_positions < end:
                return start
        return num_positions

    def missing_share_point(self, num_positions: int, page_size: int) -> Digest | None:
        """Returns the key of the first span that `num_positions` do not cover, or None if they cover all."""
        for _, end in self.spans:
            if end > num_positions:
                return self.boundaries[end] if end % page_size else self.pages[end // page_size - 1]
        return None

    def extend(self, tokens: Sequence[Token], num_image_tokens: int, num_positions: int, page_size: int) -> None:
        """Adds the keys of the pages that `num_positions` fill; tokens and image are those of the sequence."""
        previous = self.pages[-1] if self.pages else self.root
        for start in range(len(self.pages) * page_size, num_positions - page_size + 1, page_size):
            content = _content(tokens, num_image_tokens, self.image, start, start + page_size)
            previous = _digest(b"page", previous, content)
            self.pages.append(previous)


class PrefixKeyMaker:
    """Makes the keys of prompts. May be used in any thread."""

    def __init__(self, parts: Mapping[str, str], page_size: int) -> None:
        """Creates a maker of keys. `parts`: everything that changes keys and values of an engine, by name; see
        `key_parts`."""
        self._parts = dict(parts)
        self._page_size = page_size
        self._root = lru_cache(_MAX_KNOWN_NAMESPACES)(self._new_root)
        self._span = lru_cache(_MAX_KNOWN_IMAGES)(self._new_span)
        self._embedding_key = lru_cache(_MAX_KNOWN_IMAGES)(self._new_embedding_key)

    def root(self, namespace: str, adapter: bytes = b"") -> Digest:
        """Returns the common prefix of a namespace's keys. `adapter`: SHA-256 of an adapter's content; b"" for
        none."""
        return self._root(namespace, adapter)

    def embedding_key(self, image: bytes, namespace: str) -> EmbeddingKey:
        """Returns the key of an image's embeddings. `image`: SHA-256 of its encoded bytes.

        The key covers more than the embeddings depend on, such as the data type of cached keys and values.
        """
        return self._embedding_key(image, namespace)

    def _new_root(self, namespace: str, adapter: bytes) -> Digest:
        named = [item.encode() for pair in sorted(self._parts.items()) for item in pair]
        return _digest(b"root", *named, b"namespace", namespace.encode(), b"adapter", adapter)

    def keys(
        self,
        tokens: Sequence[Token],
        num_image_tokens: int,
        image: bytes | None,
        namespace: str,
        adapter: bytes = b"",
    ) -> PrefixKeys:
        """Returns the keys of a prompt: its first token, its image, then the other tokens.

        `image`: SHA-256 of the image's encoded bytes; `adapter`: SHA-256 of the adapter's content, b"" without one.
        """
        root = self.root(namespace, adapter)
        if image is None:
            keys = PrefixKeys(root, scope=CacheScope(namespace))
        else:
            span = self._span(tokens[0], num_image_tokens, image, namespace, adapter)
            # The pages of the sequence's tokens are added to the list; the rest does not change.
            keys = PrefixKeys(root, span.pages.copy(), span.boundaries, span.spans, span.scope, image)
        keys.extend(tokens, num_image_tokens, len(tokens) + num_image_tokens, self._page_size)
        return keys

    def _new_span(
        self, first: Token, num_image_tokens: int, image: bytes, namespace: str, adapter: bytes
    ) -> PrefixKeys:
        """Returns the keys of the first token and an image."""
        root, span_end = self.root(namespace, adapter), 1 + num_image_tokens
        span = _digest(b"span", root, _content([first], num_image_tokens, image, 0, span_end))
        # The span is shared whole or not at all, so each of its pages only needs a distinct name.
        numbers = range(-(-span_end // self._page_size))
        pages = [Digest(span + struct.pack("<I", number)) for number in numbers]
        boundaries = {span_end: pages.pop()} if span_end % self._page_size else {}
        scope = CacheScope(namespace, frozenset((image,)))
        return PrefixKeys(root, pages, boundaries, spans=((0, span_end),), scope=scope, image=image)

    def _new_embedding_key(self, image: bytes, namespace: str) -> EmbeddingKey:
        digest = _digest(b"embeddings", self.root(namespace), image)
        return EmbeddingKey(digest, CacheScope(namespace, frozenset((image,))))


def key_parts(config: EngineConfig, **others: object) -> dict[str, str]:
    """Returns the parts of an engine's keys, except namespace, tokens and images.

    The parts are all fields of the engine's configuration that may change a result, and `others`, such as the
    model's own configuration.
    """
    own = {
        item.name: repr(getattr(config, item.name))
        for item in fields(config)
        if item.name not in FIELDS_WITHOUT_EFFECT
    }
    return {**{f"config.{name}": value for name, value in own.items()}, **{k: repr(v) for k, v in others.items()}}


def _content(tokens: Sequence[Token], num_image_tokens: int, image: bytes, start: int, end: int) -> bytes:
    """Returns positions [start, end) as bytes: each record begins with its type and has a length that follows from
    it.

    Text tokens without values form one record, which is several times as fast.
    """
    records: list[bytes] = []
    if num_image_tokens and start <= num_image_tokens:
        # The first token sees the image too, so every page within the span depends on the whole image.
        records.append(
            b"i" + struct.pack("<32sqqq", image, num_image_tokens, start, min(end, 1 + num_image_tokens))
        )
    if start == 0:
        records.append(_record(tokens[0]))
    first_token = max(start, 1 + num_image_tokens) - num_image_tokens
    text = tokens[first_token : end - num_image_tokens]
    if any(map(_values_of, text)):
        records += map(_record, text)
    else:
        records.append(struct.pack(f"<cq{len(text)}q", b"r", len(text), *(token.id for token in text)))
    return b"".join(records)


def _record(token: Token) -> bytes:
    if not token.value:
        return _pack_text_token(b"t", token.id)
    return b"v" + struct.pack(f"<qB{len(token.value)}d", token.id, len(token.value), *token.value)


def _digest(kind: bytes, *parts: bytes) -> Digest:
    """Returns the SHA-256 of the kind and the parts, each with its length."""
    framed = [kind]
    for part in parts:
        framed += (_pack_length(len(part)), part)
    return Digest(hashlib.sha256(b"".join(framed)).digest())
