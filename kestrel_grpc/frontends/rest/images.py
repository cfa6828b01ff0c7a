"""Serves `/v1/images`: stores, describes and deletes image files; requests name their `image_id` instead of an
image."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from kestrel_grpc.calls.call_context import CallContext
from kestrel_grpc.frontends.http.endpoint import Description, Group, Operation
from kestrel_grpc.frontends.http.output_json import to_json
from kestrel_grpc.images.image_store import ImageIntake
from kestrel_grpc.images.stored_images import BAD_SHA256, ImageHandle, Retention, StoredImage, is_sha256
from kestrel_runtime.api.errors import ImageError, InvalidRequest, Violation

PARAMETERS: Mapping[str, str] = {
    "sha256": "The digest of the file, 64 lower-case hexadecimal digits; another file is refused.",
    "ttl_seconds": "How long the image is kept.",
    "pin": "`true`: the image does not leave for others before its time.",
}


@dataclass(frozen=True, slots=True)
class ParsedImage:
    """Holds a file, the handle that the caller announces, and the time to keep the file."""

    data: bytes
    announced: ImageHandle | None
    retention: Retention


class ImageRoutes:
    """Serves the routes of images, with store, quotas and limits of `ImageService`.

    `max_image_bytes` is the largest encoded image.
    """

    def __init__(self, intake: ImageIntake, *, max_image_bytes: int) -> None:
        self._intake = intake
        self._max_image_bytes = max_image_bytes
        one = "/v1/images/{image_id}"
        self.operations: Sequence[Operation] = (
            Operation(
                "PUT",
                "/v1/images",
                "rest/images",
                self._parsed,
                self._put,
                takes_file=True,
                group=Group.IMAGES,
                description=Description(
                    "putImage",
                    "Stores an image file, whose `image_id` other requests name in place of the image.",
                    "The stored image.",
                    parameters=PARAMETERS,
                ),
            ),
            Operation(
                "GET",
                one,
                "rest/images.get",
                None,
                self._get,
                group=Group.IMAGES,
                description=Description("getImage", "Describes a stored image.", "The stored image."),
            ),
            Operation(
                "DELETE",
                one,
                "rest/images.delete",
                None,
                self._delete,
                group=Group.IMAGES,
                description=Description(
                    "deleteImage", "Deletes a stored image and what is cached of it.", "The image is deleted."
                ),
            ),
        )

    def _parsed(self, data: bytes, parameters: Mapping[str, str]) -> ParsedImage:
        """Reads a file. Raises `InvalidRequest`, or `ImageError` for a file that is too large."""
        violations = [Violation(name, "is no parameter here") for name in parameters.keys() - PARAMETERS.keys()]
        sha256, pin = parameters.get("sha256"), parameters.get("pin", "false")
        if sha256 is not None and not is_sha256(sha256):
            violations.append(Violation("sha256", BAD_SHA256))
        if pin not in ("true", "false"):
            violations.append(Violation("pin", "must be true or false"))
        ttl_s = _seconds(parameters["ttl_seconds"]) if "ttl_seconds" in parameters else None
        if ttl_s is not None and not 0.0 < ttl_s < math.inf:
            violations.append(Violation("ttl_seconds", "must be a number above 0"))
        if not data:
            violations.append(Violation("", "the body must not be empty"))
        if violations:
            raise InvalidRequest(tuple(violations))
        if len(data) > self._max_image_bytes:
            raise ImageError(f"must not exceed {self._max_image_bytes} bytes", too_large=True)
        return ParsedImage(data, None if sha256 is None else ImageHandle(sha256), Retention(ttl_s, pin == "true"))

    async def _put(self, parsed: ParsedImage, call: CallContext) -> bytes:
        self._intake.require_serving()
        image = await self._intake.put(call.namespace, parsed.data, parsed.announced, parsed.retention)
        return _rendered(image, call)

    async def _get(self, parameters: Mapping[str, str], call: CallContext) -> bytes:
        handle = ImageHandle.require(parameters["image_id"])
        return _rendered(await self._intake.found(call.namespace, handle), call)

    async def _delete(self, parameters: Mapping[str, str], call: CallContext) -> bytes:
        handle = ImageHandle.require(parameters["image_id"])
        await self._intake.delete(call.namespace, handle)
        return to_json({"request_id": call.request_id, "image_id": str(handle), "deleted": True})


def _rendered(image: StoredImage, call: CallContext) -> bytes:
    expires = datetime.now(UTC) + timedelta(seconds=image.remaining_s)
    facts = {
        "request_id": call.request_id,
        "image_id": str(image.handle),
        "size_bytes": image.size_bytes,
        "media_type": image.info.media_type,
        "width_px": image.info.width_px,
        "height_px": image.info.height_px,
        "expires_at": expires.isoformat(timespec="milliseconds"),
        "pinned": image.is_pinned,
    }
    return to_json(facts)


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
