"""Makes keys that name the content of a sequence's positions: keys are equal if and only if the content is equal.

A key is the SHA-256 of typed parts of known length; it includes the key of everything before its positions. The key
of each page of an image is made of the SHA-256 of the whole span of the image, and of the number of the page. The
first part of a page has a key of its own up to share points, which are the ends of images and of answers. Workers
make the keys of prompts; the engine thread adds one when a page fills while decoding, or when an answer ends.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple, NewType

from msgspec import Struct, field

from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.output.output_parser import Token
from kestrel_runtime.scheduling.positions import bidirectional_spans

Digest = NewType("Digest", bytes)

_values_of, _id_of = attrgetter("value"), attrgetter("id")
_pack_length = struct.Struct("<Q").pack
_pack_text_token = struct.Struct("<cq").pack
_pack_run = struct.Struct("<cqq").pack
_pack_image = struct.Struct("<32sqqqq").pack
_pack_number = struct.Struct("<I").pack

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
    "crop_cache_bytes": "how many encoded crops are kept, not what they hold",
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


class ImageContent(NamedTuple):
    """An image among the positions of a prompt."""

    start: int
    """The first of its positions."""
    num_positions: int
    digest: bytes
    """SHA-256 of its encoded bytes."""

    @property
    def end(self) -> int:
        """The position behind its last one."""
        return self.start + self.num_positions


class PrefixKeys(Struct):
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
    images: tuple[ImageContent, ...] = ()
    """The images, in the order of their positions."""

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
                return self.share_point(end, page_size)
        return None

    def share_point(self, num_positions: int, page_size: int) -> Digest:
        """Returns the key of the first `num_positions`, which end at a share point."""
        if num_positions % page_size:
            return self.boundaries[num_positions]
        return self.pages[num_positions // page_size - 1]

    def extend(self, tokens: Sequence[Token], num_positions: int, page_size: int) -> None:
        """Adds the keys of the pages that `num_positions` fill, and that are not within a span. `tokens` are those
        of the sequence."""
        pages = self.pages
        for start in range(len(pages) * page_size, num_positions - page_size + 1, page_size):
            content = _content(tokens, self.images, start, start + page_size)
            pages.append(_digest(b"page", self._last, content))

    def add_share_point(self, tokens: Sequence[Token], num_positions: int, page_size: int) -> None:
        """Adds the key of the first `num_positions`, which end outside of every span. Those before have keys."""
        self.extend(tokens, num_positions, page_size)
        start = len(self.pages) * page_size
        if start < num_positions and num_positions not in self.boundaries:
            content = _content(tokens, self.images, start, num_positions)
            self.boundaries[num_positions] = _digest(b"part", self._last, content)

    def add_span(self, tokens: Sequence[Token], span: tuple[int, int], page_size: int) -> None:
        """Adds the keys of a span, the next one. All full pages before it have keys."""
        start, end = span
        self.extend(tokens, start, page_size)
        first = len(self.pages)
        key = _digest(b"span", self._last, _content(tokens, self.images, first * page_size, end))
        # The span is shared whole or not at all, so each of its pages only needs a distinct name.
        names = [Digest(key + _pack_number(number)) for number in range(first, -(-end // page_size))]
        if end % page_size:
            self.boundaries[end] = names.pop()
        self.pages += names
        self.spans += (span,)

    @property
    def _last(self) -> Digest:
        return self.pages[-1] if self.pages else self.root


class PrefixKeyMaker:
    """Makes the keys of prompts. May be used in any thread."""

    def __init__(self, parts: Mapping[str, str], page_size: int) -> None:
        """Creates a maker of keys. `parts`: everything that changes keys and values of an engine, by name; see
        `key_parts`."""
        self._parts = dict(parts)
        self.page_size = page_size
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
        images: tuple[ImageContent, ...] = (),
        namespace: str = "",
        adapter: bytes = b"",
        *,
        answer_ends: Sequence[int] = (),
    ) -> PrefixKeys:
        """Returns the keys of a prompt.

        `tokens` are all that are not of the images, which are in the order of their positions, `answer_ends` the
        positions behind earlier answers of a conversation. `adapter`: SHA-256 of the adapter's content, b"" without
        one.
        """
        if len(images) == 1 and images[0].start == 1 and not answer_ends:
            known = self._span(tokens[0], images[0], namespace, adapter)
            # The pages of the sequence's tokens are added to the list, and the end of its answer to the boundaries.
            pages, boundaries = known.pages.copy(), known.boundaries.copy()
            keys = PrefixKeys(known.root, pages, boundaries, known.spans, known.scope, images)
        else:
            digests = frozenset([image.digest for image in images])
            keys = PrefixKeys(self.root(namespace, adapter), scope=CacheScope(namespace, digests), images=images)
            spans = bidirectional_spans([(image.start, image.end) for image in images])
            for start, end in sorted([*spans, *zip(answer_ends, answer_ends, strict=True)]):
                if start < end:
                    keys.add_span(tokens, (start, end), self.page_size)
                else:
                    keys.add_share_point(tokens, end, self.page_size)
        num_positions = len(tokens)
        for image in images:
            num_positions += image.num_positions
        keys.extend(tokens, num_positions, self.page_size)
        return keys

    def _new_span(self, first: Token, image: ImageContent, namespace: str, adapter: bytes) -> PrefixKeys:
        """Returns the keys of the first token and an image."""
        scope = CacheScope(namespace, frozenset((image.digest,)))
        keys = PrefixKeys(self.root(namespace, adapter), scope=scope, images=(image,))
        keys.add_span([first], (0, image.end), self.page_size)
        return keys

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


def _content(tokens: Sequence[Token], images: tuple[ImageContent, ...], start: int, end: int) -> bytes:
    """Returns positions [start, end) as bytes: each record begins with its type and has a length that follows from
    it.

    Text tokens without values form one record, which is several times as fast.
    """
    # Not by `text_runs`, since every page of every request takes this path.
    of_images, of_text, position, num_before = b"", b"", start, 0
    for image_start, num_positions, digest in images:
        image_end = image_start + num_positions
        if image_start < end and start < image_end:
            # The positions of an image see each other, so each page with a part of it depends on the whole.
            of_images += b"i" + _pack_image(digest, num_positions, image_start, start, min(end, image_end))
        stop = min(image_start, end)
        if position < stop:
            of_text += _text_content(position, tokens[position - num_before : stop - num_before])
        position = max(position, image_end)
        num_before += num_positions
    if position < end:
        of_text += _text_content(position, tokens[position - num_before : end - num_before])
    return of_images + of_text


def _text_content(position: int, text: Sequence[Token]) -> bytes:
    if any(map(_values_of, text)):
        return _pack_run(b"p", position, len(text)) + b"".join(map(_record, text))
    return struct.pack(f"<cqq{len(text)}q", b"r", position, len(text), *map(_id_of, text))


def _record(token: Token) -> bytes:
    if not token.value:
        return _pack_text_token(b"t", token.id)
    return b"v" + struct.pack(f"<qB{len(token.value)}d", token.id, len(token.value), *token.value)


def _digest(kind: bytes, *parts: bytes) -> Digest:
    """Returns the SHA-256 of the kind and the parts, each with its length."""
    for part in parts:
        kind += _pack_length(len(part)) + part
    return Digest(hashlib.sha256(kind).digest())
