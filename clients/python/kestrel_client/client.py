"""Provides the blocking client, which has one method for each request.

`blocking_calls` sends them, `requests` and `results` build values.

Generated from `aio.py` by tools/blocking_client.py. Change that file, and generate this one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from types import TracebackType
from typing import Self, Unpack

import grpc

from kestrel_client import requests, results
from kestrel_client.batches import DEFAULT_CONCURRENCY, Job, Outcome, Progress, blocking_map
from kestrel_client.blocking_calls import (
    BlockingCalls,
    DetectStream,
    PointStream,
    SegmentStream,
    TextStream,
)
from kestrel_client.blocking_frames import FrameStream
from kestrel_client.connection import (
    DEFAULT_MAX_RETRIES,
    DEFAULT_MAX_RETRY_S,
    DEFAULT_TIMEOUT_S,
    Connection,
    FileName,
)
from kestrel_client.images import ImageInput, StoredImage
from kestrel_client.requests import CallOptions, ChatMessage, EmbeddingType, Length, SpatialRef
from kestrel_client.results import (
    Adapter,
    CallerUsage,
    CaptionResult,
    ClearedCache,
    DetectResult,
    EmbedResult,
    GazeResult,
    Model,
    Point,
    PointResult,
    QueryResult,
    SegmentResult,
    ServerInfo,
    ServerLoad,
    UploadedAdapter,
)
from kestrel_client.sending import DEFAULT_STORE_FROM_BYTES
from kestrel_client.v1 import engine_service_pb2 as engine_pb2
from kestrel_client.v1 import image_service_pb2 as image_pb2
from kestrel_client.v1 import vision_service_pb2 as vision_pb2


class Client:
    """Calls one server, or several behind one name, from any thread.

    Every failed call raises a `KestrelClientError`, which carries the `request_id` that the server's log names.

    Args:
        address: Where the server is: host:port, host (port 50051), http://host:port, https://host:port (with TLS),
            or a target of gRPC, such as unix:/run/kestrel.sock or dns:///name:50051. None takes the environment
            variable KESTREL_GRPC_ADDRESS, or else localhost:50051.
        timeout_s: The longest time for a call that does not say it itself, in seconds.
        wait_for_ready: Whether a call waits for a server to come up, at most as long as it may take. Otherwise it
            fails with `Unavailable` after its retries.
        max_retries: Retries (0 to 4) of a call that failed before a server accepted it; they end after about a
            second.
        max_retry_s: For how long a call is sent again that a server refuses for now, since its queue is full or it
            is restarting: each time after the wait that the server asks for, within the time for the call. 0 leaves
            that to the caller.
        token: Sent with every call, to servers that require one. None takes the environment variable
            KESTREL_GRPC_TOKEN; "" sends none.
        tls_ca: A file in PEM with the CA certificates that the server's must be signed by; encrypts the connection.
            None takes the environment variable KESTREL_GRPC_TLS_CA; "" names none. The CAs of the system need no
            file: an address that begins with https:// uses them.
        tls_client_certificate: A file in PEM with the certificate of this client, for servers that ask for one.
            None takes KESTREL_GRPC_TLS_CLIENT_CERTIFICATE.
        tls_client_key: A file with the key of that certificate. None takes KESTREL_GRPC_TLS_CLIENT_KEY.
        credentials: Encrypts the connection in another way; no file is read then.
        store_from_bytes: An image file of at least this size that is sent again is stored on the server, and
            named from then on. None switches that off.

    Raises:
        ValueError: For what is no address, no certificate, or no number of retries or token that gRPC can take.
        OSError: For a file of a certificate that cannot be read.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        wait_for_ready: bool = False,
        max_retries: int = DEFAULT_MAX_RETRIES,
        max_retry_s: float = DEFAULT_MAX_RETRY_S,
        token: str | None = None,
        tls_ca: FileName | None = None,
        tls_client_certificate: FileName | None = None,
        tls_client_key: FileName | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        store_from_bytes: int | None = DEFAULT_STORE_FROM_BYTES,
    ) -> None:
        files = tls_ca, tls_client_certificate, tls_client_key
        connection = Connection.to(
            address, token=token, tls=files, credentials=credentials, max_retries=max_retries
        )
        self._calls = BlockingCalls(connection, timeout_s, wait_for_ready, max_retry_s, store_from_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def query(
        self,
        image: ImageInput | None,
        question: str,
        *,
        reasoning: bool | None = None,
        spatial_refs: Sequence[SpatialRef] = (),
        **options: Unpack[CallOptions],
    ) -> TextStream[QueryResult]:
        """Answers a question, with or without an image, as a stream of text.

        Args:
            image: What the question is about, in any form of `ImageInput`; None for a question without an image.
            question: The question, in any language that the model knows.
            reasoning: Whether the model reasons before it answers; the stream's `deltas()` have the reasoning.
            spatial_refs: Points and boxes of the image that the question speaks about, in order.
            **options: `temperature`, `top_p`, `max_tokens`, `seed`, `stop`, `model`, `priority`, `cache`,
                `max_queue_s`, `timeout_s`, `request_id` and others; see `CallOptions`.

        Returns:
            The stream: iterate over its pieces of text, or take its `result()`.
        """
        return self._calls.stream(
            self._calls.vision.Query,
            lambda: requests.query(vision_pb2.QueryRequest, question, reasoning, spatial_refs, options),
            options,
            results.query_result,
            image,
        )

    def complete_query(
        self,
        image: ImageInput | None,
        question: str,
        *,
        reasoning: bool | None = None,
        spatial_refs: Sequence[SpatialRef] = (),
        **options: Unpack[CallOptions],
    ) -> QueryResult:
        """Answers a question in one response. Takes what `query` takes.

        Args:
            image: What the question is about, in any form of `ImageInput`; None for a question without an image.
            question: The question, in any language that the model knows.
            reasoning: Whether the model reasons before it answers; the result has the reasoning.
            spatial_refs: Points and boxes of the image that the question speaks about, in order.
            **options: `temperature`, `top_p`, `max_tokens`, `seed`, `stop`, `model`, `priority`, `cache`,
                `max_queue_s`, `timeout_s`, `request_id` and others; see `CallOptions`.
        """
        response = self._calls.call(
            self._calls.vision.CompleteQuery,
            lambda: requests.query(vision_pb2.CompleteQueryRequest, question, reasoning, spatial_refs, options),
            options,
            image,
        )
        return results.complete_query(response)

    def chat(
        self, messages: Sequence[ChatMessage], *, reasoning: bool | None = None, **options: Unpack[CallOptions]
    ) -> TextStream[QueryResult]:
        """Answers the last message of a conversation, as a stream of text.

        Args:
            messages: The conversation, whose last message is the user's. Its images may be in several messages.
            reasoning: Whether the model reasons before it answers; the stream's `deltas()` have the reasoning.
            **options: `temperature`, `top_p`, `max_tokens`, `seed`, `stop`, `model`, `priority`, `cache`,
                `max_queue_s`, `timeout_s`, `request_id` and others; see `CallOptions`.

        Returns:
            The stream: iterate over its pieces of text, or take its `result()`. The next turn has the same
            messages, the answer as a message of the assistant, and the next question.
        """
        return self._calls.stream(
            self._calls.vision.Chat,
            lambda: requests.chat(vision_pb2.ChatRequest, messages, reasoning, options),
            options,
            results.query_result,
            *requests.chat_images(messages),
        )

    def complete_chat(
        self, messages: Sequence[ChatMessage], *, reasoning: bool | None = None, **options: Unpack[CallOptions]
    ) -> QueryResult:
        """Answers the last message of a conversation in one response. Takes what `chat` takes.

        Args:
            messages: The conversation, whose last message is the user's. Its images may be in several messages.
            reasoning: Whether the model reasons before it answers; the result has the reasoning.
            **options: `temperature`, `top_p`, `max_tokens`, `seed`, `stop`, `model`, `priority`, `cache`,
                `max_queue_s`, `timeout_s`, `request_id` and others; see `CallOptions`.
        """
        response = self._calls.call(
            self._calls.vision.CompleteChat,
            lambda: requests.chat(vision_pb2.CompleteChatRequest, messages, reasoning, options),
            options,
            *requests.chat_images(messages),
        )
        return results.complete_query(response)

    def caption(
        self, image: ImageInput, *, length: Length | None = None, **options: Unpack[CallOptions]
    ) -> TextStream[CaptionResult]:
        """Describes an image, as a stream of text.

        Args:
            image: The image, in any form of `ImageInput`.
            length: "short", "normal" or "long"; None means normal.
            **options: `temperature`, `top_p`, `max_tokens`, `seed`, `stop`, `model`, `priority`, `cache`,
                `max_queue_s`, `timeout_s`, `request_id` and others; see `CallOptions`.

        Returns:
            The stream: iterate over its pieces of text, or take its `result()`.
        """
        return self._calls.stream(
            self._calls.vision.Caption,
            lambda: requests.caption(vision_pb2.CaptionRequest, length, options),
            options,
            results.caption_result,
            image,
        )

    def complete_caption(
        self, image: ImageInput, *, length: Length | None = None, **options: Unpack[CallOptions]
    ) -> CaptionResult:
        """Describes an image in one response.

        Args:
            image: The image, in any form of `ImageInput`.
            length: "short", "normal" or "long"; None means normal.
            **options: `temperature`, `top_p`, `max_tokens`, `seed`, `stop`, `model`, `priority`, `cache`,
                `max_queue_s`, `timeout_s`, `request_id` and others; see `CallOptions`.
        """
        response = self._calls.call(
            self._calls.vision.CompleteCaption,
            lambda: requests.caption(vision_pb2.CompleteCaptionRequest, length, options),
            options,
            image,
        )
        return results.complete_caption(response)

    def point(
        self,
        image: ImageInput,
        object: str | Sequence[str],
        *,
        max_objects: int | None = None,
        min_score: float | None = None,
        spatial_refs: Sequence[SpatialRef] = (),
        **options: Unpack[CallOptions],
    ) -> PointResult:
        """Finds the place of each object of a kind.

        Args:
            image: The image, in any form of `ImageInput`.
            object: What to look for, such as "dog" or "the red car"; or up to 64 such texts in a list: all are
                looked for at the same time, and the result has a group for each.
            max_objects: The most objects to find, 1 to 1000; None means 150.
            min_score: The least score of objects in the result, 0 to 1; others count towards `max_objects`.
            spatial_refs: Points and boxes of the image that `object` speaks about, in order.
            **options: `temperature`, `top_p`, `max_tokens`, `seed`, `stop`, `model`, `priority`, `cache`,
                `max_queue_s`, `timeout_s`, `request_id` and others; see `CallOptions`.

        Returns:
            The places, as fractions of the image's width and height from its top left corner, and in pixels as
            `points_px`; in `objects` with their scores.
        """
        response = self._calls.call(
            self._calls.vision.Point,
            lambda: requests.point(vision_pb2.PointRequest, object, max_objects, spatial_refs, options, min_score),
            options,
            image,
        )
        return results.point_result(response, object, min_score)

    def stream_point(
        self,
        image: ImageInput,
        object: str | Sequence[str],
        *,
        max_objects: int | None = None,
        min_score: float | None = None,
        spatial_refs: Sequence[SpatialRef] = (),
        **options: Unpack[CallOptions],
    ) -> PointStream:
        """Finds the place of each object of a kind, as a stream: each as soon as the model has read it.

        Args:
            image: The image, in any form of `ImageInput`.
            object: What to look for, as of `point`.
            max_objects: The most objects to find, 1 to 1000; None means 150.
            min_score: The least score of objects in the result, 0 to 1; others count towards `max_objects`.
            spatial_refs: Points and boxes of the image that `object` speaks about, in order.
            **options: As of `point`.

        Returns:
            The stream: iterate over pairs of the object that was looked for and what was found, or take its
            `result()`. Of several objects, pairs of one come between those of others.
        """
        return self._calls.points(
            self._calls.vision.StreamPoint,
            lambda: requests.point(
                vision_pb2.StreamPointRequest, object, max_objects, spatial_refs, options, min_score
            ),
            options,
            image,
            object,
            min_score,
        )

    def detect(
        self,
        image: ImageInput,
        object: str | Sequence[str],
        *,
        max_objects: int | None = None,
        min_score: float | None = None,
        spatial_refs: Sequence[SpatialRef] = (),
        **options: Unpack[CallOptions],
    ) -> DetectResult:
        """Finds a box around each object of a kind.

        Args:
            image: The image, in any form of `ImageInput`.
            object: What to look for, such as "dog" or "the red car"; or up to 64 such texts in a list: all are
                looked for at the same time, and the result has a group for each.
            max_objects: The most objects to find, 1 to 1000; None means 150.
            min_score: The least score of objects in the result, 0 to 1; others count towards `max_objects`.
            spatial_refs: Points and boxes of the image that `object` speaks about, in order.
            **options: `temperature`, `top_p`, `max_tokens`, `seed`, `stop`, `model`, `priority`, `cache`,
                `max_queue_s`, `timeout_s`, `request_id` and others; see `CallOptions`.

        Returns:
            The boxes with their scores, as fractions of the image's width and height from its top left corner; in
            pixels as `boxes_px`.
        """
        response = self._calls.call(
            self._calls.vision.Detect,
            lambda: requests.detect(
                vision_pb2.DetectRequest, object, max_objects, spatial_refs, options, min_score
            ),
            options,
            image,
        )
        return results.detect_result(response, object, min_score)

    def stream_detect(
        self,
        image: ImageInput,
        object: str | Sequence[str],
        *,
        max_objects: int | None = None,
        min_score: float | None = None,
        spatial_refs: Sequence[SpatialRef] = (),
        **options: Unpack[CallOptions],
    ) -> DetectStream:
        """Finds a box around each object of a kind, as a stream: each as soon as the model has read it.

        Args:
            image: The image, in any form of `ImageInput`.
            object: What to look for, as of `detect`.
            max_objects: The most objects to find, 1 to 1000; None means 150.
            min_score: The least score of objects in the result, 0 to 1; others count towards `max_objects`.
            spatial_refs: Points and boxes of the image that `object` speaks about, in order.
            **options: As of `detect`.

        Returns:
            The stream: iterate over pairs of the object that was looked for and what was found, or take its
            `result()`. Of several objects, pairs of one come between those of others.
        """
        return self._calls.boxes(
            self._calls.vision.StreamDetect,
            lambda: requests.detect(
                vision_pb2.StreamDetectRequest, object, max_objects, spatial_refs, options, min_score
            ),
            options,
            image,
            object,
            min_score,
        )

    def detect_frames(
        self,
        images: Iterable[ImageInput],
        object: str | Sequence[str],
        *,
        max_objects: int | None = None,
        spatial_refs: Sequence[SpatialRef] = (),
        min_score: float | None = None,
        every_frame: bool = False,
        track: bool = False,
        **options: Unpack[CallOptions],
    ) -> FrameStream[DetectResult]:
        """Finds a box around each object of a kind, in the frames of a camera, a video or a screen.

        Args:
            images: The frames, each in any form of `ImageInput`. A generator that yields what a camera shows now is
                best: it is asked for the next frame when the one before has been sent.
            object: What to look for, such as "dog" or "the red car"; or up to 64 such texts in a list, each with a
                group in the result.
            max_objects: The most objects to find in a frame, 1 to 1000; None means 150.
            spatial_refs: Points and boxes of the frames that `object` speaks about, in order.
            min_score: The least score of objects in the result, 0 to 1; others count towards `max_objects`.
            every_frame: Whether the server looks at every frame, and the stream waits for it. Otherwise it looks at
                the newest, and drops those before it.
            track: Whether objects get a `track_id`, which they keep while their boxes overlap those of the answered
                frames before.
            **options: As for `detect`; `timeout_s` is for the whole stream, which has no limit by default.

        Returns:
            The stream: iterate over its `FrameResult`s.
        """
        return FrameStream(
            self._calls,
            self._calls.vision.DetectFrames,
            images,
            lambda: requests.detect_frames(
                object, max_objects, spatial_refs, every_frame, track, options, min_score
            ),
            lambda message: results.detect_result(message, object, min_score),
            options,
        )

    def point_frames(
        self,
        images: Iterable[ImageInput],
        object: str | Sequence[str],
        *,
        max_objects: int | None = None,
        spatial_refs: Sequence[SpatialRef] = (),
        min_score: float | None = None,
        every_frame: bool = False,
        **options: Unpack[CallOptions],
    ) -> FrameStream[PointResult]:
        """Finds the place of each object of a kind, in the frames of a camera, a video or a screen.

        Args:
            images: The frames, as for `detect_frames`.
            object: What to look for, such as "dog" or "the red car"; or up to 64 such texts in a list, each with a
                group in the result.
            max_objects: The most objects to find in a frame, 1 to 1000; None means 150.
            spatial_refs: Points and boxes of the frames that `object` speaks about, in order.
            min_score: The least score of objects in the result, 0 to 1; others count towards `max_objects`.
            every_frame: Whether the server looks at every frame, and the stream waits for it. Otherwise it looks at
                the newest, and drops those before it.
            **options: As for `point`; `timeout_s` is for the whole stream, which has no limit by default.

        Returns:
            The stream: iterate over its `FrameResult`s.
        """
        return FrameStream(
            self._calls,
            self._calls.vision.PointFrames,
            images,
            lambda: requests.point_frames(object, max_objects, spatial_refs, every_frame, options, min_score),
            lambda message: results.point_result(message, object, min_score),
            options,
        )

    def segment(
        self,
        image: ImageInput,
        object: str,
        *,
        spatial_refs: Sequence[SpatialRef] = (),
        **options: Unpack[CallOptions],
    ) -> SegmentResult:
        """Finds the outline of an object.

        Args:
            image: The image, in any form of `ImageInput`.
            object: What to outline, such as "dog" or "the red car".
            spatial_refs: Points and boxes of the image that `object` speaks about, in order.
            **options: `temperature`, `top_p`, `max_tokens`, `seed`, `stop`, `model`, `priority`, `cache`,
                `max_queue_s`, `timeout_s`, `request_id` and others; see `CallOptions`.

        Returns:
            The outlines; `Segment.polygon` gives one in pixels, and `Segment.to_pil_mask` as an image.
        """
        response = self._calls.call(
            self._calls.vision.Segment,
            lambda: requests.segment(vision_pb2.SegmentRequest, object, spatial_refs, options),
            options,
            image,
        )
        return results.segment_result(response, object)

    def stream_segment(
        self,
        image: ImageInput,
        object: str,
        *,
        spatial_refs: Sequence[SpatialRef] = (),
        **options: Unpack[CallOptions],
    ) -> SegmentStream:
        """Finds the outline of an object, as a stream of outlines that grow. Takes what `segment` takes.

        Args:
            image: The image, in any form of `ImageInput`.
            object: What to outline, such as "dog" or "the red car".
            spatial_refs: Points and boxes of the image that `object` speaks about, in order.
            **options: As of `segment`.

        Returns:
            The stream: iterate over the outline as it grows, its box first, or take its `result()`.
        """
        return self._calls.outline(
            self._calls.vision.StreamSegment,
            lambda: requests.segment(vision_pb2.StreamSegmentRequest, object, spatial_refs, options),
            options,
            image,
            object,
        )

    def gaze(self, image: ImageInput, eye: Point, **options: Unpack[CallOptions]) -> GazeResult:
        """Finds the place that somebody in the image looks at.

        Args:
            image: The image, in any form of `ImageInput`.
            eye: An eye of the one who looks, or the middle of both eyes.
            **options: `temperature`, `top_p`, `max_tokens`, `seed`, `stop`, `model`, `priority`, `cache`,
                `max_queue_s`, `timeout_s`, `request_id` and others; see `CallOptions`.

        Returns:
            The place as `target`, which is None where none was found in the image.
        """
        response = self._calls.call(self._calls.vision.Gaze, lambda: requests.gaze(eye, options), options, image)
        return results.gaze_result(response)

    def embed(
        self,
        image: ImageInput,
        *,
        patches: bool = False,
        normalize: bool = False,
        dtype: EmbeddingType | None = None,
        **options: Unpack[CallOptions],
    ) -> EmbedResult:
        """Embeds an image: computes a vector that is close to those of images which look alike. Texts have none.

        Args:
            image: The image, in any form of `ImageInput`.
            patches: Whether to return the vectors of all patches, too, in addition to their mean.
            normalize: Whether each vector is scaled to the length 1, so that dot products are cosines.
            dtype: The format of the patches, "float16" or "float32"; None means float16.
            **options: `model`, `priority`, `cache`, `max_queue_s`, `timeout_s`, `max_retry_s` and `request_id`; see
                `CallOptions`.

        Returns:
            The vector of the image as `mean`, and those of its patches as `patches`.
        """
        if patches:
            return self._calls.patches(
                self._calls.vision.StreamEmbedImage,
                lambda: requests.embed_patches(normalize, dtype, options),
                options,
                image,
            )
        response = self._calls.call(
            self._calls.vision.EmbedImage,
            lambda: requests.embed_mean(normalize, dtype, options),
            options,
            image,
        )
        return results.embed_result(response)

    def map(
        self,
        jobs: Iterable[Job],
        *,
        concurrency: int = DEFAULT_CONCURRENCY,
        on_progress: Callable[[Progress], object] | None = None,
    ) -> Generator[Outcome, None, None]:
        """Runs many jobs, several at a time, and waits for places in the queue of the server.

        Args:
            jobs: Such as `Job("query", "bird.jpg", "What bird is this?")`. They may be a generator, which is read
                as far as needed.
            concurrency: How many jobs run at a time.
            on_progress: Is called after each job.

        Returns:
            The outcomes in the order of the jobs. A failed job does not stop the others: its outcome has the error.

        Raises:
            ValueError: For a concurrency below 1.
            TypeError: While iterating, for a job whose arguments no call takes.
        """
        return blocking_map(self, jobs, concurrency, on_progress)

    def upload_image(
        self, image: ImageInput, *, ttl_s: float | None = None, pin: bool = False, timeout_s: float | None = None
    ) -> StoredImage:
        """Stores an image on the server.

        Args:
            image: The image, in any form of `ImageInput` but an address or a stored image.
            ttl_s: How long the server keeps it, in seconds; None means as long as the server does by default.
            pin: Whether it is kept for that time even where its memory is needed for other images.
            timeout_s: The longest time for the call, in seconds.

        Returns:
            The stored image. It, or its `image_id`, stands for the image in every request.
        """
        data = self._calls.image_bytes(image)
        response = self._calls.call(
            self._calls.images.PutImage,
            lambda: requests.put_image(data, ttl_s, pin),
            CallOptions(timeout_s=timeout_s),
        )
        return results.stored_image(response.image)

    def get_image(self, image: str | StoredImage, *, timeout_s: float | None = None) -> StoredImage:
        """Describes a stored image.

        Args:
            image: The stored image, or its `image_id`.
            timeout_s: The longest time for the call, in seconds.

        Raises:
            ImageNotFound: If the server has no such image for this caller.
        """
        response = self._calls.call(
            self._calls.images.GetImage,
            lambda: image_pb2.GetImageRequest(image_id=requests.image_id(image)),
            CallOptions(timeout_s=timeout_s),
        )
        return results.stored_image(response.image)

    def read_image(self, image: str | StoredImage, *, timeout_s: float | None = None) -> bytes:
        """Returns the file of a stored image.

        Args:
            image: The stored image, or its `image_id`.
            timeout_s: The longest time for the call, in seconds.

        Raises:
            ImageNotFound: If the server has no such image for this caller.
        """
        response = self._calls.call(
            self._calls.images.GetImage,
            lambda: image_pb2.GetImageRequest(image_id=requests.image_id(image), include_data=True),
            CallOptions(timeout_s=timeout_s),
        )
        return response.data

    def delete_image(self, image: str | StoredImage, *, timeout_s: float | None = None) -> None:
        """Drops a stored image, and what the server has computed from it.

        Args:
            image: The stored image, or its `image_id`.
            timeout_s: The longest time for the call, in seconds.

        Raises:
            ImageNotFound: If the server has no such image for this caller.
        """
        self._calls.call(
            self._calls.images.DeleteImage,
            lambda: image_pb2.DeleteImageRequest(image_id=requests.image_id(image)),
            CallOptions(timeout_s=timeout_s),
        )

    def server_info(self, *, timeout_s: float | None = None) -> ServerInfo:
        """Returns the version, the instance, the model, the limits and the engines of the server.

        Args:
            timeout_s: The longest time for the call, in seconds.
        """
        response = self._calls.call(
            self._calls.engine.GetServerInfo, engine_pb2.GetServerInfoRequest, CallOptions(timeout_s=timeout_s)
        )
        return results.server_info(response)

    def list_models(self, *, timeout_s: float | None = None) -> tuple[Model, ...]:
        """Lists the models served.

        Args:
            timeout_s: The longest time for the call, in seconds.
        """
        response = self._calls.call(
            self._calls.engine.ListModels, engine_pb2.ListModelsRequest, CallOptions(timeout_s=timeout_s)
        )
        return results.models(response)

    def load(self, *, timeout_s: float | None = None) -> ServerLoad:
        """Returns how busy the server is, each of its engines, and its processes that take calls.

        Args:
            timeout_s: The longest time for the call, in seconds.
        """
        response = self._calls.call(
            self._calls.engine.GetLoad, engine_pb2.GetLoadRequest, CallOptions(timeout_s=timeout_s)
        )
        return results.load(response)

    def usage(self, *, timeout_s: float | None = None) -> tuple[CallerUsage, ...]:
        """Returns what each caller has asked of the model since the server was started. Needs the scope `admin`.

        Args:
            timeout_s: The longest time for the call, in seconds.
        """
        response = self._calls.call(
            self._calls.engine.GetUsage, engine_pb2.GetUsageRequest, CallOptions(timeout_s=timeout_s)
        )
        return results.usage(response)

    def clear_cache(
        self, *, token: str | None = None, namespace: str | None = None, timeout_s: float | None = None
    ) -> ClearedCache:
        """Removes what the server has cached. Needs the scope `admin`.

        Args:
            token: Only what is cached for the token of this name.
            namespace: Only what is cached for this namespace, which tokens share. Without either, everything.
            timeout_s: The longest time for the call, in seconds.
        """
        response = self._calls.call(
            self._calls.engine.ClearCache,
            lambda: engine_pb2.ClearCacheRequest(token=token, namespace=namespace),
            CallOptions(timeout_s=timeout_s),
        )
        return results.cleared_cache(response)

    def list_adapters(self, *, timeout_s: float | None = None) -> tuple[Adapter, ...]:
        """Lists the adapters (LoRA) that are loaded. Needs the scope `admin`.

        Args:
            timeout_s: The longest time for the call, in seconds.
        """
        response = self._calls.call(
            self._calls.engine.ListAdapters, engine_pb2.ListAdaptersRequest, CallOptions(timeout_s=timeout_s)
        )
        return tuple(map(results.adapter, response.adapters))

    def adapter_names(self, *, timeout_s: float | None = None) -> tuple[str, ...]:
        """Lists the names of adapters that requests may use, loaded or not. Needs the scope `admin`.

        Args:
            timeout_s: The longest time for the call, in seconds.
        """
        response = self._calls.call(
            self._calls.engine.ListAdapters, engine_pb2.ListAdaptersRequest, CallOptions(timeout_s=timeout_s)
        )
        return tuple(response.available_names)

    def load_adapter(self, name: str, *, timeout_s: float | None = None) -> Adapter:
        """Has the server read an adapter's files anew and load them. Needs the scope `admin`.

        Args:
            name: As requests give it, such as `colours` or `colours@200`.
            timeout_s: The longest time for the call, in seconds.
        """
        response = self._calls.call(
            self._calls.engine.LoadAdapter,
            lambda: engine_pb2.LoadAdapterRequest(name=name),
            CallOptions(timeout_s=timeout_s),
        )
        return results.adapter(response.adapter)

    def upload_adapter(
        self, name: str, path: FileName, *, replace: bool = False, timeout_s: float | None = None
    ) -> UploadedAdapter:
        """Adds an adapter to the server's folder of adapters, for requests from then on. Needs the scope `admin`.

        Args:
            name: As requests will give it, such as `colours` or `colours@200`.
            path: A folder with a .safetensors file and, from PEFT, `adapter_config.json`; or a .safetensors file.
            replace: Whether it replaces an adapter of this name; requests that run keep what they began with.
            timeout_s: The longest time for the call, in seconds; None means that of the client, and a second more
                for each 64 KiB.

        Raises:
            AdapterExists: If the name is taken.
            AdapterInvalid: If the files do not fit the model. The server keeps nothing of them.
            AdapterFolderUnwritable: If the server cannot write to a folder of adapters.
        """
        response = self._calls.upload_adapter(name, path, replace=replace, timeout_s=timeout_s)
        return results.uploaded_adapter(response)

    def delete_adapter(self, name: str, *, timeout_s: float | None = None) -> int:
        """Removes an adapter from the server's folder of adapters, so that no further request can name it, and
        returns how many requests still use it. Needs the scope `admin`.

        Args:
            name: As requests give it, such as `colours` or `colours@200`.
            timeout_s: The longest time for the call, in seconds.

        Raises:
            AdapterNotFound: If the folder has no adapter of this name.
            AdapterFolderUnwritable: If the server cannot write to the folder, or the adapter's folder holds
                anything else.
        """
        response = self._calls.call(
            self._calls.engine.DeleteAdapter,
            lambda: engine_pb2.DeleteAdapterRequest(name=name),
            CallOptions(timeout_s=timeout_s),
        )
        return response.request_count

    def unload_adapter(self, name: str, *, timeout_s: float | None = None) -> Adapter:
        """Frees an adapter's slot once no request uses it. Needs the scope `admin`.

        Args:
            name: As requests give it, such as `colours` or `colours@200`.
            timeout_s: The longest time for the call, in seconds.
        """
        response = self._calls.call(
            self._calls.engine.UnloadAdapter,
            lambda: engine_pb2.UnloadAdapterRequest(name=name),
            CallOptions(timeout_s=timeout_s),
        )
        return results.adapter(response.adapter)

    def cancel_requests(
        self, *, request_id: str | None = None, token: str | None = None, timeout_s: float | None = None
    ) -> int:
        """Cancels requests of any caller, and returns how many. Needs the scope `admin`.

        Args:
            request_id: Requests of this id.
            token: Requests of the token of this name.
            timeout_s: The longest time for the call, in seconds.
        """
        response = self._calls.call(
            self._calls.engine.CancelRequests,
            lambda: engine_pb2.CancelRequestsRequest(request_id=request_id, token=token),
            CallOptions(timeout_s=timeout_s),
        )
        return response.cancelled_request_count

    def close(self) -> None:
        """Closes the connection. Calls that are still open end with `Cancelled`, later ones with `ClientClosed`."""
        self._calls.close()
