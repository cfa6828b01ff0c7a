"""A vision server of canned answers: real gRPC and real messages, with no model behind them."""
# ruff: noqa: N802 -- the contract names the methods

import hashlib
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from google.protobuf import duration_pb2, timestamp_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from kestrel_client import Client, Point
from kestrel_client.images import names_in
from kestrel_client.v1 import (
    engine_service_pb2,
    engine_service_pb2_grpc,
    generation_pb2,
    image_service_pb2,
    image_service_pb2_grpc,
    media_pb2,
    vision_service_pb2,
    vision_service_pb2_grpc,
)

MAX_WAIT_S = 60.0
"""Longer than any machine needs: a longer wait is a failure."""

INFO = generation_pb2.ResponseInfo(
    request_id="r-1",
    model="tiny",
    finish_reason=generation_pb2.FINISH_REASON_LENGTH,
    usage=generation_pb2.Usage(
        input_token_count=740, output_token_count=3, image_token_count=729, cached_token_count=730
    ),
    timing=generation_pb2.Timing(
        queue_duration=duration_pb2.Duration(nanos=1_000_000),
        preprocess_duration=duration_pb2.Duration(nanos=2_000_000),
        prefill_duration=duration_pb2.Duration(nanos=30_000_000),
        time_to_first_token=duration_pb2.Duration(nanos=33_000_000),
        decode_duration=duration_pb2.Duration(seconds=1, nanos=500_000_000),
    ),
    image_width_px=200,
    image_height_px=100,
)
STARTED = generation_pb2.StreamStarted(request_id="r-1", model="tiny", usage=INFO.usage)
ANSWER_PIECES = ("A red ", "kite – ", "höher.")
CAPTION_PIECES = ("Two", " boxes.")
THOUGHT = "look there"
BOX = media_pb2.NormalizedBox(x_min=0.25, y_min=0.125, x_max=0.75, y_max=0.5)
SVG_PIECES = ("M 0 0", " L 1 0", " L 1 1 Z")
SVG_PATH = "".join(SVG_PIECES)


def answer(pieces: tuple[str, ...], thought: str) -> Iterator[Any]:
    """The events of an answer."""
    response = vision_service_pb2.QueryResponse
    yield response(started=STARTED)
    if thought:
        yield response(delta=_delta(thought, generation_pb2.TEXT_CHANNEL_REASONING, 0))
    for index, piece in enumerate(pieces):
        yield response(delta=_delta(piece, generation_pb2.TEXT_CHANNEL_ANSWER, index))
    yield response(completed=query_result(pieces, thought))


def query_result(pieces: tuple[str, ...] = ANSWER_PIECES, thought: str = "") -> Any:
    """A whole answer."""
    grounding = generation_pb2.Grounding(
        start_char=5, end_char=10, points=[media_pb2.NormalizedPoint(x=0.5, y=0.25)]
    )
    reasoning = generation_pb2.Reasoning(text=thought, groundings=[grounding]) if thought else None
    return vision_service_pb2.QueryResult(answer="".join(pieces), reasoning=reasoning, info=INFO)


def caption_result() -> Any:
    """A whole caption."""
    return vision_service_pb2.CaptionResult(caption="".join(CAPTION_PIECES), info=INFO)


def group(object: str) -> dict[str, Any]:
    """The fields of a group of one object; a unicorn has an error."""
    if object == "unicorn":
        return {
            "object": object,
            "error": vision_service_pb2.ObjectError(code=9, reason="REQUEST_REFUSED", message="no"),
        }
    return {"object": object, "finish_reason": generation_pb2.FINISH_REASON_STOP}


def found(response: Any, whole: Any, items: list[Any], score: float | None) -> Iterator[Any]:
    """The events of objects being found, one object of the request after the other."""
    yield response(started=STARTED)
    for index, of_object in enumerate(items):
        for item in of_object:
            is_point = isinstance(item, media_pb2.NormalizedPoint)
            one = vision_service_pb2.PointedObject(point=item, score=score) if is_point else item
            yield response(found=one, object_index=index)
    yield response(completed=whole)


def outline(object: str) -> Iterator[Any]:
    """The events of an outline."""
    response = vision_service_pb2.StreamSegmentResponse
    yield response(started=STARTED)
    whole = segment_response(object)
    for segment in whole.segments:
        yield response(box=segment.box)
        for index, piece in enumerate(SVG_PIECES):
            yield response(path_delta=vision_service_pb2.PathDelta(text=piece, token_index=index, token_count=1))
    yield response(completed=whole)


def segment_response(object: str) -> Any:
    """A whole outline; that of a "cloud" is partial, and there is no "unicorn"."""
    segment = vision_service_pb2.Segment(svg_path=SVG_PATH, box=BOX, is_partial=object == "cloud")
    return vision_service_pb2.SegmentResponse(segments=[segment] * (object != "unicorn"), info=INFO)


def status(code: int, message: str, *details: Any) -> status_pb2.Status:
    """A rich status that holds `details`."""
    rich = status_pb2.Status(code=code, message=message)
    for detail in details:
        rich.details.add().Pack(detail)
    return rich


def error_info(reason: str, **metadata: str) -> error_details_pb2.ErrorInfo:
    """The detail that every status of the server has."""
    return error_details_pb2.ErrorInfo(reason=reason, domain="kestrel.test", metadata=metadata)


NOT_STORED = status(code_pb2.NOT_FOUND, "no such image", error_info("IMAGE_NOT_FOUND"))


class CannedVision(vision_service_pb2_grpc.VisionServiceServicer):
    """Answers from the can and remembers what it was asked.

    `failures` are used up before anything is answered, one per call. While `endless` is set, a stream stops
    after its first piece and goes on only to be cancelled, which `cancelled` tells. While `fails_midway` is set, it
    fails there.
    With `score` None it is a server that is older than scores.
    """

    def __init__(self) -> None:
        self.images = CannedImages()
        self.failures: list[status_pb2.Status] = []
        self.endless = self.fails_midway = False
        self.score: float | None = None
        self.answer_pieces: tuple[str, ...] = ANSWER_PIECES
        self.cancelled = threading.Event()
        self.requests: list[Any] = []
        self.metadata: list[dict[str, str | bytes]] = []
        self.time_left_s: list[float] = []

    def Query(self, request: Any, context: Any) -> Any:
        self._receive(request, context)
        events = answer(self.answer_pieces, THOUGHT if request.reasoning else "")
        yield from self._until_cancelled(events, context)

    def Caption(self, request: Any, context: Any) -> Any:
        self._receive(request, context)
        response = vision_service_pb2.CaptionResponse
        yield response(started=STARTED)
        for index, piece in enumerate(CAPTION_PIECES):
            yield response(delta=_delta(piece, generation_pb2.TEXT_CHANNEL_ANSWER, index))
        yield response(completed=caption_result())

    def CompleteQuery(self, request: Any, context: Any) -> Any:
        self._receive(request, context)
        result = query_result(self.answer_pieces, THOUGHT if request.reasoning else "")
        return vision_service_pb2.CompleteQueryResponse(result=result)

    def Chat(self, request: Any, context: Any) -> Any:
        self._receive(request, context)
        events = answer(self.answer_pieces, THOUGHT if request.reasoning else "")
        same = (vision_service_pb2.ChatResponse.FromString(event.SerializeToString()) for event in events)
        yield from self._until_cancelled(same, context)

    def CompleteChat(self, request: Any, context: Any) -> Any:
        self._receive(request, context)
        result = query_result(self.answer_pieces, THOUGHT if request.reasoning else "")
        return vision_service_pb2.CompleteChatResponse(result=result)

    def CompleteCaption(self, request: Any, context: Any) -> Any:
        self._receive(request, context)
        return vision_service_pb2.CompleteCaptionResponse(result=caption_result())

    def Point(self, request: Any, context: Any) -> Any:
        self._receive(request, context)
        return self._points(request)

    def StreamPoint(self, request: Any, context: Any) -> Any:
        self._receive(request, context)
        whole = self._points(request)
        places = [group.points for group in whole.groups] or [whole.points]
        yield from self._until_cancelled(
            found(vision_service_pb2.StreamPointResponse, whole, places, self.score), context
        )

    def _points(self, request: Any) -> Any:
        points = [media_pb2.NormalizedPoint(x=0.25, y=0.5), media_pb2.NormalizedPoint(x=0.75, y=1.0)]
        if request.objects:
            return vision_service_pb2.PointResponse(
                groups=[
                    vision_service_pb2.PointGroup(points=points if name != "unicorn" else (), **group(name))
                    for name in request.objects
                ],
                info=INFO,
            )
        scored = [vision_service_pb2.PointedObject(point=point, score=self.score) for point in points]
        return vision_service_pb2.PointResponse(
            points=points, objects=() if self.score is None else scored, info=INFO
        )

    def Detect(self, request: Any, context: Any) -> Any:
        self._receive(request, context)
        return self._boxes(request)

    def StreamDetect(self, request: Any, context: Any) -> Any:
        self._receive(request, context)
        whole = self._boxes(request)
        boxes = [group.objects for group in whole.groups] or [whole.objects]
        yield from self._until_cancelled(
            found(vision_service_pb2.StreamDetectResponse, whole, boxes, self.score), context
        )

    def _boxes(self, request: Any) -> Any:
        objects = [vision_service_pb2.DetectedObject(box=BOX, score=self.score)]
        if request.objects:
            groups = [
                vision_service_pb2.DetectGroup(objects=objects if name != "unicorn" else (), **group(name))
                for name in request.objects
            ]
            return vision_service_pb2.DetectResponse(groups=groups, info=INFO)
        return vision_service_pb2.DetectResponse(objects=objects, info=INFO)

    def DetectFrames(self, request_iterator: Any, context: Any) -> Any:
        self._receive(next(request_iterator), context)
        for index, _ in enumerate(request_iterator):
            found = vision_service_pb2.DetectedObject(box=BOX, track_id=1)
            result = vision_service_pb2.DetectResponse(objects=[found], info=INFO)
            yield vision_service_pb2.DetectFramesResponse(frame_index=index, result=result)

    def PointFrames(self, request_iterator: Any, context: Any) -> Any:
        self._receive(next(request_iterator), context)
        for index, _ in enumerate(request_iterator):
            points = [media_pb2.NormalizedPoint(x=0.25, y=0.5)]
            groups = [vision_service_pb2.PointGroup(object="car", points=points)]
            result = vision_service_pb2.PointResponse(groups=groups, info=INFO)
            yield vision_service_pb2.PointFramesResponse(frame_index=index, result=result)

    def Segment(self, request: Any, context: Any) -> Any:
        self._receive(request, context)
        return segment_response(request.object)

    def StreamSegment(self, request: Any, context: Any) -> Any:
        self._receive(request, context)
        yield from self._until_cancelled(outline(request.object), context)

    def Gaze(self, request: Any, context: Any) -> Any:
        self._receive(request, context)
        target = media_pb2.NormalizedPoint(x=0.25, y=0.5) if request.eye.x < 0.5 else None
        return vision_service_pb2.GazeResponse(target=target, info=INFO)

    def EmbedImage(self, request: Any, context: Any) -> Any:
        self._receive(request, context)
        return vision_service_pb2.EmbedImageResponse(mean=[0.5, -1.0, 0.25], patch_count=2, info=INFO)

    def StreamEmbedImage(self, request: Any, context: Any) -> Any:
        self._receive(request, context)
        response = vision_service_pb2.StreamEmbedImageResponse
        row = struct.pack("<3f" if request.type == vision_service_pb2.EMBEDDING_TYPE_FLOAT32 else "<3e", 1, -2, 0.5)
        pieces = [vision_service_pb2.PatchEmbeddings(first_patch=n, patch_count=1, data=row) for n in range(2)]
        mean = vision_service_pb2.EmbedImageResponse(mean=[1.0, -2.0, 0.5], patch_count=2, info=INFO)
        events = [
            response(started=STARTED),
            *(response(patches=piece) for piece in pieces),
            response(completed=mean),
        ]
        yield from self._until_cancelled(iter(events), context)

    def _receive(self, request: Any, context: Any) -> None:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        self.time_left_s.append(context.time_remaining())
        if self.names_unknown(request):
            context.abort_with_status(rpc_status.to_status(NOT_STORED))
        if self.failures:
            context.abort_with_status(rpc_status.to_status(self.failures.pop(0)))

    def names_unknown(self, request: Any) -> bool:
        """Whether a request names an image that is not stored."""
        return any(name and name not in self.images.stored for name in names_in(request))

    def _until_cancelled(self, events: Iterator[Any], context: Any) -> Iterator[Any]:
        if not self.endless and not self.fails_midway:
            yield from events
            return
        context.add_callback(self.cancelled.set)
        yield next(events)
        yield next(events)
        if self.fails_midway:
            context.abort_with_status(rpc_status.to_status(status(code_pb2.INTERNAL, "a failed step")))
        self.cancelled.wait(MAX_WAIT_S)


class CannedEngine(engine_service_pb2_grpc.EngineServiceServicer):
    """Tells of a server that does not exist."""

    def GetServerInfo(self, request: Any, context: Any) -> Any:
        limits = engine_service_pb2.Limits(
            max_message_bytes=1,
            max_image_bytes=2,
            max_image_pixels=3,
            max_queued_requests=4,
            max_running_requests=5,
        )
        plan = engine_service_pb2.MemoryPlan(
            total_bytes=2**34, utilization=0.875, weight_bytes=2**31, cache_bytes=2**33, adapter_bytes=7
        )
        engines = [
            engine_service_pb2.EngineInfo(
                index=0,
                device="cuda",
                device_uuid="1a2b",
                max_running_requests=5,
                memory_plan=plan,
                device_name="A GPU",
            ),
            engine_service_pb2.EngineInfo(index=1),
        ]
        return engine_service_pb2.GetServerInfoResponse(
            server_version="9.9",
            instance_id="abc",
            capabilities=["fly"],
            limits=limits,
            model="tiny",
            engines=engines,
            frontend_count=4,
            settings=[engine_service_pb2.Setting(name="kv_dtype", value="float8")],
        )

    def ListModels(self, request: Any, context: Any) -> Any:
        query = engine_service_pb2.SkillDefaults(
            skill="query", temperature=0.5, top_p=0.25, max_tokens=768, reasoning=False
        )
        point = engine_service_pb2.SkillDefaults(skill="point", temperature=0, top_p=1, max_objects=150)
        model = engine_service_pb2.Model(
            name="tiny",
            revision="main",
            architecture="moondream2",
            skills=["query", "point"],
            device="cpu",
            dtype="float32",
            max_context_token_count=2048,
            parameter_count=3_000_000_000,
            defaults=[query, point],
        )
        return engine_service_pb2.ListModelsResponse(models=[model])

    def GetLoad(self, request: Any, context: Any) -> Any:
        load = engine_service_pb2.Load(
            running_request_count=1,
            waiting_request_count=2,
            preprocessing_request_count=3,
            used_page_count=4,
            page_count=5,
            output_tokens_per_second=6.5,
            requests_per_second=7.5,
        )
        statuses = (
            engine_service_pb2.ENGINE_STATUS_SERVING,
            engine_service_pb2.ENGINE_STATUS_DRAINING,
            engine_service_pb2.ENGINE_STATUS_RECOVERING,
            engine_service_pb2.ENGINE_STATUS_DEAD,
            engine_service_pb2.ENGINE_STATUS_UNSPECIFIED,
        )
        engines = [engine_service_pb2.EngineLoad(index=n, status=status) for n, status in enumerate(statuses)]
        engines[0].MergeFrom(engine_service_pb2.EngineLoad(device="cuda", process_id=4712, load=load))
        frontend = engine_service_pb2.FrontendLoad(name="frontend-0", process_id=4711, open_request_count=8)
        return engine_service_pb2.GetLoadResponse(load=load, engines=engines, frontends=[frontend])

    def GetUsage(self, request: Any, context: Any) -> Any:
        usage = engine_service_pb2.CallerUsage(
            token="alice",
            answered_request_count=1,
            failed_request_count=2,
            refused_request_count=3,
            input_token_count=4,
            cached_token_count=5,
            output_token_count=6,
        )
        return engine_service_pb2.GetUsageResponse(callers=[usage])

    def ClearCache(self, request: Any, context: Any) -> Any:
        pages = {"alice": 1, "yard": 2}.get(request.token or request.namespace, 3)
        return engine_service_pb2.ClearCacheResponse(page_count=pages, image_count=4, crop_count=5)

    def ListAdapters(self, request: Any, context: Any) -> Any:
        adapter = engine_service_pb2.Adapter(name="colours", digest="ab", request_count=3, is_current=True)
        return engine_service_pb2.ListAdaptersResponse(adapters=[adapter], slot_count=8)

    def LoadAdapter(self, request: Any, context: Any) -> Any:
        adapter = engine_service_pb2.Adapter(name=request.name, digest="cd", is_current=True)
        return engine_service_pb2.LoadAdapterResponse(adapter=adapter)

    def UnloadAdapter(self, request: Any, context: Any) -> Any:
        adapter = engine_service_pb2.Adapter(name=request.name, digest="cd", request_count=1)
        return engine_service_pb2.UnloadAdapterResponse(adapter=adapter)

    def DeleteAdapter(self, request: Any, context: Any) -> Any:
        if request.name == "absent":
            context.abort(grpc.StatusCode.NOT_FOUND, "there is none")
        return engine_service_pb2.DeleteAdapterResponse(request_count=2)

    def UploadAdapter(self, request_iterator: Any, context: Any) -> Any:
        parts = list(request_iterator)
        header, weights = parts[0].header, b"".join(part.chunk for part in parts[1:])
        if header.name == "taken" and not header.replace:
            context.abort(grpc.StatusCode.ALREADY_EXISTS, "it is taken")
        assert header.size_bytes == len(weights)
        assert header.sha256 == hashlib.sha256(weights).hexdigest()
        digest = hashlib.sha256(header.config + weights).hexdigest()
        return engine_service_pb2.UploadAdapterResponse(name=header.name, digest=digest, replaced=header.replace)

    def CancelRequests(self, request: Any, context: Any) -> Any:
        count = {"request_id": 1, "token": 2}[request.WhichOneof("selection")]
        return engine_service_pb2.CancelRequestsResponse(cancelled_request_count=count)


class CannedImages(image_service_pb2_grpc.ImageServiceServicer):
    """Keeps images, for all callers. `is_refusing` makes it store nothing."""

    def __init__(self) -> None:
        self.stored: dict[str, bytes] = {}
        self.requests: list[Any] = []
        self.metadata: list[dict[str, str | bytes]] = []
        self.refusal: grpc.StatusCode | None = None

    def PutImage(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        if self.refusal is not None:
            context.abort(self.refusal, "no")
        image_id = f"sha256:{hashlib.sha256(request.data).hexdigest()}"
        self.stored[image_id] = request.data
        return image_service_pb2.PutImageResponse(image=self._described(image_id, request.pin))

    def GetImage(self, request: Any, context: Any) -> Any:
        self._require(request.image_id, context)
        data = self.stored[request.image_id] if request.include_data else b""
        return image_service_pb2.GetImageResponse(image=self._described(request.image_id, False), data=data)

    def DeleteImage(self, request: Any, context: Any) -> Any:
        self._require(request.image_id, context)
        del self.stored[request.image_id]
        return image_service_pb2.DeleteImageResponse()

    def _described(self, image_id: str, is_pinned: bool) -> Any:
        return image_service_pb2.StoredImage(
            image_id=image_id,
            size_bytes=len(self.stored[image_id]),
            media_type="image/png",
            width_px=4,
            height_px=3,
            expire_time=timestamp_pb2.Timestamp(seconds=1_900_000_000),
            pinned=is_pinned,
        )

    def _require(self, image_id: str, context: Any) -> None:
        self.metadata.append(dict(context.invocation_metadata()))
        if image_id not in self.stored:
            context.abort_with_status(rpc_status.to_status(NOT_STORED))


@contextmanager
def serving(vision: CannedVision) -> Iterator[str]:
    """Serves on a free port; gives the address."""
    server = grpc.server(
        ThreadPoolExecutor(max_workers=4), options=(("grpc.max_receive_message_length", 8 * 1024 * 1024),)
    )
    vision_service_pb2_grpc.add_VisionServiceServicer_to_server(vision, server)
    image_service_pb2_grpc.add_ImageServiceServicer_to_server(vision.images, server)
    engine_service_pb2_grpc.add_EngineServiceServicer_to_server(CannedEngine(), server)
    service = health.HealthServicer()
    service.set("kestrel.v1.VisionService", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(grace=None).wait()


def queue_full(retry_after_s: int = 0) -> status_pb2.Status:
    """A server with a full queue."""
    retry_info = error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=retry_after_s))
    return status(code_pb2.RESOURCE_EXHAUSTED, "the queue is full", error_info("QUEUE_FULL"), retry_info)


def _delta(text: str, channel: generation_pb2.TextChannel, index: int) -> generation_pb2.TextDelta:
    return generation_pb2.TextDelta(text=text, channel=channel, token_index=index, token_count=1)


def ask_with_every_call(client: Client, picture: bytes) -> int:
    """Make each of the calls about an image once, and return how many these are."""
    client.query(picture, "q").result()
    client.complete_query(picture, "q")
    client.caption(picture).result()
    client.complete_caption(picture)
    client.point(picture, "kite")
    client.detect(picture, "kite")
    client.segment(picture, "kite")
    client.stream_segment(picture, "kite").result()
    client.gaze(picture, Point(0.25, 0.25))
    client.embed(picture)
    client.embed(picture, patches=True)
    return 11
