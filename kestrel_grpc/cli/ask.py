"""Implements the client commands, query, caption, point, detect, segment, gaze, embed and image, with
`kestrel_client` alone.

Answers are written to stdout, text as it arrives. Everything else, including the reasoning, is written to stderr.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kestrel_grpc.cli.common import (
    PICTURE_SUFFIXES,
    add_client_arguments,
    explain,
    run_with_client,
    show,
    show_json,
)
from kestrel_grpc.process.terminal import print_error

# The client imports gRPC, which no help needs: what uses it imports it when it runs.
if TYPE_CHECKING:
    from kestrel_client import (
        Box,
        CallOptions,
        CaptionAlternative,
        CaptionResult,
        Client,
        DetectGroup,
        DetectResult,
        GazeResult,
        Job,
        Point,
        PointGroup,
        PointResult,
        QueryAlternative,
        QueryResult,
        Result,
        Segment,
        SegmentResult,
        StoredImage,
        TextDelta,
    )

NO_IMAGE = "-"
"""The value of IMAGE for a question without an image."""
LENGTHS = ("short", "normal", "long")
EMBEDDING_TYPES = ("float16", "float32")
MASK_FORMATS = ("svg", "polygon", "rle", "png")
CACHE_POLICIES = ("use", "refresh", "bypass")
PRIORITIES = ("interactive", "normal", "batch")
"""The values of a length, a format of embeddings, a form of an outline, a cache policy and a priority."""
IMAGE_HELP = "an image file, its address (https://…), or the name of a stored one (sha256:…)"


def add_client_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the commands; each sets `run`, which takes the parsed arguments and returns the exit status."""
    query = _add(
        subparsers,
        _query,
        "answer a question",
        f"an image file, its address, the name of a stored one, or {NO_IMAGE} for none",
    )
    query.add_argument("question", metavar="QUESTION")
    constraint = query.add_mutually_exclusive_group()
    constraint.add_argument("--choices", metavar="TEXT", nargs="+", help="texts, one of which is the answer")
    constraint.add_argument("--regex", metavar="REGEX", help="a regular expression that the whole answer matches")
    constraint.add_argument(
        "--json-schema", metavar="SCHEMA", help="a JSON schema, or a file with one, under which the answer is valid"
    )
    query.add_argument(
        "--reasoning", action="store_true", help="let the model reason first, and print its reasoning on stderr"
    )
    caption = _add(subparsers, _caption, "describe an image")
    caption.add_argument("--length", choices=LENGTHS, help="length of the caption (normal)")
    for command in (query, caption):
        _add_sampling_of_text(command)
    point = _add(subparsers, _point, "find the place of each object of a kind")
    detect = _add(subparsers, _detect, "find a box around each object of a kind")
    segment = _add(subparsers, _segment, "find the outline of an object")
    segment.add_argument(
        "--mask-format",
        choices=MASK_FORMATS,
        help="print the outline as its path (svg), or as JSON in forms of COCO: polygons in pixels, or run-lengths "
        "(rle); png needs --mask",
    )
    segment.add_argument(
        "--mask", metavar="FILE", type=Path, help="write the mask to this file, a PNG; a folder for several images"
    )
    for command in (point, detect, segment):
        command.add_argument("object", metavar="OBJECT", help='what to look for, such as "dog"')
        _add_draw(command)
    for command in (point, detect):
        command.add_argument(
            "--object",
            metavar="OBJECT",
            action="append",
            default=[],
            dest="further_objects",
            help="a further object to look for in the same call; may be repeated. Lines then begin with the object",
        )
        command.add_argument("--max-objects", metavar="N", type=int, help="maximum number of objects to find (150)")
        command.add_argument(
            "--min-score",
            metavar="S",
            type=float,
            help="leave out objects with a lower score, from 0 to 1, and print the score of others behind them",
        )
    gaze = _add(subparsers, _gaze, "find the place that somebody in the image looks at")
    for name in ("x", "y"):
        gaze.add_argument(
            f"eye_{name}",
            metavar=name.upper(),
            type=float,
            help=f"{name} of an eye of the one who looks, from 0 to 1",
        )
    _add_draw(gaze)
    _add_embed_command(subparsers)
    _add_image_commands(subparsers)


def _add_embed_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    embed = _add(
        subparsers, _embed, "compute the embedding of an image: a vector to compare images by", samples=False
    )
    embed.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        help="write the embedding to this .npy file; of several images one a row, and print their names",
    )
    embed.add_argument(
        "--patches", action="store_true", help="the embeddings of all patches of one image; needs --out"
    )
    embed.add_argument("--normalize", action="store_true", help="scale each embedding to the length 1")
    embed.add_argument("--dtype", choices=EMBEDDING_TYPES, help="format of the patches (float16)")


def _add_image_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    image = subparsers.add_parser("image", help="store, describe or drop an image on the server")
    actions = image.add_subparsers(metavar="ACTION", required=True)
    upload = actions.add_parser(
        "upload", help="store an image, and print its name", description="Store an image, and print its name."
    )
    upload.add_argument("image", metavar="IMAGE", help="an image file")
    upload.add_argument(
        "--ttl", metavar="SECONDS", type=float, help="how long to keep it (as the server is set up)"
    )
    upload.add_argument("--pin", action="store_true", help="keep it even if its memory is needed for others")
    get = actions.add_parser("get", help="describe a stored image", description="Describe a stored image.")
    get.add_argument("--output", metavar="FILE", type=Path, help="write the image to this file as well")
    delete = actions.add_parser("delete", help="drop a stored image", description="Drop a stored image.")
    for parser in (get, delete):
        parser.add_argument("image", metavar="NAME", help="the name of the image, sha256:…")
    for parser, command in ((upload, _upload), (get, _get), (delete, _delete)):
        add_client_arguments(parser)
        parser.set_defaults(run=partial(run_with_client, command))
    for parser in (upload, get):
        parser.add_argument("--json", action="store_true", help="print all about the image as one line of JSON")


def _add_sampling_of_text(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stop", metavar="TEXT", nargs="+", help="texts, the first of which ends the answer")
    parser.add_argument(
        "--include-stop", action="store_true", default=None, help="end the answer behind that text, not before it"
    )
    parser.add_argument("--n", metavar="N", type=int, help="number of samples to draw, one a line (1)")
    parser.add_argument(
        "--logprobs",
        metavar="N",
        type=int,
        help="print the logprobs of tokens, and of the N likeliest, on stderr",
    )
    parser.add_argument("--top-k", metavar="N", type=int, help="sample from the N most likely tokens")
    parser.add_argument(
        "--min-p", metavar="P", type=float, help="sample from tokens with this share of the largest probability"
    )
    for name in ("repetition", "presence", "frequency"):
        parser.add_argument(f"--{name}-penalty", metavar="X", type=float, help=f"{name} penalty of tokens")


AskingCommand = Callable[["Client", argparse.Namespace, str], int | None]


def _add(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser],
    command: AskingCommand,
    summary: str,
    image_help: str = IMAGE_HELP,
    *,
    samples: bool = True,
) -> argparse.ArgumentParser:
    name = command.__name__.removeprefix("_")
    parser = subparsers.add_parser(
        name, help=summary, description=f"{summary.capitalize()}, asking a running server."
    )
    parser.add_argument("image", metavar="IMAGE", nargs="+", help=f"{image_help}; or a folder of image files")
    add_client_arguments(parser)
    if samples:
        add_request_flags(parser)
    else:
        add_handling_flags(parser)
    parser.set_defaults(run=partial(run_with_client, partial(_ask, command)), skill=name)
    return parser


def add_request_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of all skills, which `options_of` reads."""
    parser.add_argument("--temperature", metavar="T", type=float, help="temperature; 0 takes the most likely token")
    parser.add_argument(
        "--top-p",
        metavar="P",
        type=float,
        help="sample from the most likely tokens with a total probability of P",
    )
    parser.add_argument("--max-tokens", metavar="N", type=int, help="maximum number of tokens to generate")
    parser.add_argument(
        "--seed", metavar="N", type=int, help="seed of the sampling, for the same tokens every time"
    )
    parser.add_argument("--adapter", metavar="NAME", help="adapter (LoRA) to use, such as name or name@step")
    add_handling_flags(parser)


def add_handling_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say how a request is handled, also one that generates nothing."""
    parser.add_argument("--model", metavar="NAME", help="the model (the one that is served)")
    parser.add_argument(
        "--priority", choices=PRIORITIES, help="start before or after other requests that wait (normal)"
    )
    parser.add_argument("--cache", choices=CACHE_POLICIES, help="what to do with the server's caches (use)")
    parser.add_argument(
        "--max-queue", metavar="SECONDS", type=float, dest="max_queue_s", help="the longest wait for a start"
    )
    parser.add_argument("--json", action="store_true", help="print the whole result as one line of JSON")


def _add_draw(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--draw",
        metavar="FILE",
        type=Path,
        help="write the image with the result drawn on it, as PNG or JPEG by its name; a folder for several images",
    )


def _query(client: Client, arguments: argparse.Namespace, image: str) -> None:
    given = None if image == NO_IMAGE else image
    reasoning = arguments.reasoning or None
    options = options_of(arguments)
    if _is_whole(arguments):
        _print_answer(arguments, client.complete_query(given, arguments.question, reasoning=reasoning, **options))
        return
    with client.query(given, arguments.question, reasoning=reasoning, **options) as stream:
        print_text(stream.deltas())


def _caption(client: Client, arguments: argparse.Namespace, image: str) -> None:
    options = options_of(arguments)
    if _is_whole(arguments):
        _print_answer(arguments, client.complete_caption(image, length=arguments.length, **options))
        return
    with client.caption(image, length=arguments.length, **options) as stream:
        print_text(stream.deltas())


def _point(client: Client, arguments: argparse.Namespace, image: str) -> int:
    options, wanted, limits = options_of(arguments), _wanted(arguments), _limits(arguments)
    if arguments.json:
        return _show(arguments, image, client.point(image, wanted, **limits, **options))
    with client.stream_point(image, wanted, **limits, **options) as stream:
        _print_found(arguments, ((name, found.point, found.score) for name, found in stream))
        return _show(arguments, image, stream.result(), are_shown=True)


def _detect(client: Client, arguments: argparse.Namespace, image: str) -> int:
    options, wanted, limits = options_of(arguments), _wanted(arguments), _limits(arguments)
    if arguments.json:
        return _show(arguments, image, client.detect(image, wanted, **limits, **options))
    with client.stream_detect(image, wanted, **limits, **options) as stream:
        _print_found(arguments, ((name, found.box, found.score) for name, found in stream))
        return _show(arguments, image, stream.result(), are_shown=True)


def _print_found(arguments: argparse.Namespace, found: Iterator[tuple[str, Point | Box, float | None]]) -> None:
    """Prints a line for each object as soon as it is found; of several, the line begins with its name."""
    has_scores, has_names = arguments.min_score is not None, bool(arguments.further_objects)
    for name, place, score in found:
        line = _numbers(place, score if has_scores else None)
        show(f"{name}: {line}" if has_names else line)


def _limits(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments of a call about objects that limit what is found."""
    return {"max_objects": arguments.max_objects, "min_score": arguments.min_score}


def _wanted(arguments: argparse.Namespace) -> str | list[str]:
    """Returns the object to look for, or all of several."""
    further: list[str] = getattr(arguments, "further_objects", [])
    return [arguments.object, *further] if further else arguments.object


def _segment(client: Client, arguments: argparse.Namespace, image: str) -> None:
    options = options_of(arguments)
    if arguments.json or arguments.mask_format is not None:
        result = client.segment(image, arguments.object, **options)
        if arguments.json:
            show_json({**_plain(result), **_masks(arguments, result)})
        else:
            show(*_lines_of_outlines(arguments, result))
            _warn_of_outline(arguments, result)
    else:
        with client.stream_segment(image, arguments.object, **options) as stream:
            _print_outline(stream)
            result = stream.result()
        _warn_of_outline(arguments, result)
    _write_mask(arguments.mask, result)
    _draw(arguments.draw, image, result)


def _masks(arguments: argparse.Namespace, result: SegmentResult) -> dict[str, Any]:
    """Returns the outlines in the form of COCO that the arguments ask for, as a field of the JSON of a result."""
    form, size = arguments.mask_format, (result.width_px or 0, result.height_px or 0)
    if form == "rle":
        return {"masks": [segment.to_rle(*size) for segment in result.segments]}
    if form != "polygon":
        return {}
    flat = [
        [[side for corner in line for side in corner] for line in segment.polygons(*size)]
        for segment in result.segments
    ]
    return {"masks": flat}


def _lines_of_outlines(arguments: argparse.Namespace, result: SegmentResult) -> list[str]:
    masks = _masks(arguments, result)
    return [json.dumps(mask) for mask in masks["masks"]] if masks else _lines(result, arguments)


def _write_mask(target: Path | None, result: SegmentResult) -> None:
    """Writes the mask of the outline, which is empty if nothing was found."""
    if target is None:
        return
    if result.width_px is None or result.height_px is None:
        raise ValueError("the server did not report the size of the image, which --mask needs")
    from kestrel_client import Box, Segment

    segment = next(iter(result.segments), Segment("", Box(0, 0, 1, 1)))
    target.write_bytes(segment.to_png(result.width_px, result.height_px))
    print_error(f"mask written to {target}")


def _gaze(client: Client, arguments: argparse.Namespace, image: str) -> None:
    from kestrel_client import Point

    _show(arguments, image, client.gaze(image, Point(arguments.eye_x, arguments.eye_y), **options_of(arguments)))


def _embed(client: Client, arguments: argparse.Namespace, image: str) -> None:
    result = client.embed(
        image,
        patches=arguments.patches,
        normalize=arguments.normalize,
        dtype=arguments.dtype,
        **options_of(arguments),
    )
    if arguments.out is not None:
        import numpy as np

        patches = np.frombuffer(result.patches, "<f4" if arguments.dtype == "float32" else "<f2")
        whole = patches.reshape(result.patch_count, -1) if arguments.patches else np.array(result.mean, np.float32)
        _write_array(arguments.out, whole)
    if arguments.json:
        _print_json(result)
    elif arguments.out is None:
        show(*_lines(result, arguments))


def _write_array(target: Path, values: Any) -> None:
    """Writes a file for NumPy."""
    import numpy as np

    with target.open("wb") as file:  # to a name NumPy adds a suffix
        np.save(file, values)
    print_error(f"written to {target}")


def _ask(command: AskingCommand, client: Client, arguments: argparse.Namespace) -> int:
    """Asks about one picture, or about several at a time; returns the exit status."""
    from kestrel_client import DetectResult, EmbedResult, GazeResult, PointResult, SegmentResult
    from kestrel_client.images import is_on_server

    images = list(image_names(arguments.image))
    out: Path | None = getattr(arguments, "out", None)
    if getattr(arguments, "patches", False) and (out is None or len(images) > 1):
        raise ValueError("--patches needs --out, and one image")
    rows: list[Sequence[float]] = []
    folder: Path | None = getattr(arguments, "mask", None)
    if getattr(arguments, "mask_format", None) == "png" and folder is None:
        raise ValueError("--mask-format png needs --mask")
    draws = getattr(arguments, "draw", None) is not None
    if draws and any(map(is_on_server, images)):
        raise ValueError("--draw needs an image file")
    if images == arguments.image and len(images) == 1:
        return command(client, arguments, images[0]) or 0
    targets = _targets(arguments.draw, images) if draws else [None] * len(images)
    masks = [None] * len(images) if folder is None else _targets(folder, images, ".png")
    status = 0
    outcomes = client.map([_job(arguments, image) for image in images])
    for image, target, mask, outcome in zip(images, targets, masks, outcomes, strict=True):
        if outcome.result is None:
            assert outcome.error is not None, "a job has a result or an error"
            print_error(f"{image}: {explain(outcome.error)}")
            status = 1
            continue
        outline = outcome.result if isinstance(outcome.result, SegmentResult) else None
        if arguments.json:
            further = {} if outline is None else _masks(arguments, outline)
            show_json({"image": image, **_plain(outcome.result), **further})
        elif outline is not None:
            show(*(f"{image}: {line}" for line in _lines_of_outlines(arguments, outline)))
        elif out is not None:
            show(image)
        else:
            for line in _lines(outcome.result, arguments):
                show(f"{image}: {line}")
        if isinstance(outcome.result, EmbedResult):
            rows.append(outcome.result.mean)
        if outline is not None:
            _write_mask(mask, outline)
        status |= _report_groups(outcome.result, f"{image}: ")
        if isinstance(outcome.result, PointResult | DetectResult | SegmentResult | GazeResult):
            _draw(target, image, outcome.result)
    if out is not None and rows:
        import numpy as np

        _write_array(out, np.array(rows, np.float32))
    return status


def _job(arguments: argparse.Namespace, image: str) -> Job:
    """Returns the question of the arguments about one picture."""
    from kestrel_client import Job, Point

    given = None if image == NO_IMAGE else image
    options: dict[str, Any] = {**options_of(arguments)}
    for name in ("max_objects", "min_score", "length", "reasoning", "normalize", "dtype", "patches"):
        if getattr(arguments, name, None) not in (None, False):
            options[name] = getattr(arguments, name)
    skill = arguments.skill
    if skill == "gaze":
        return Job("gaze", image, Point(arguments.eye_x, arguments.eye_y), **options)
    asked = [arguments.question] if hasattr(arguments, "question") else []
    if hasattr(arguments, "object"):
        asked.append(_wanted(arguments))
    return Job(skill, given, *asked, **options)


def image_names(names: Sequence[str]) -> Iterator[str]:
    """Yields the pictures of the names: for a folder the pictures in it, otherwise the name itself. Raises
    ValueError."""
    from kestrel_client.images import is_on_server

    for name in names:
        if is_on_server(name) or name == NO_IMAGE or not Path(name).is_dir():
            yield name
            continue
        found = [str(path) for path in sorted(Path(name).iterdir()) if path.suffix.lower() in PICTURE_SUFFIXES]
        if not found:
            raise ValueError(f"{name}: the folder holds no pictures ({', '.join(sorted(PICTURE_SUFFIXES))})")
        yield from found


def _targets(folder: Path, images: Sequence[str], suffix: str | None = None) -> list[Path]:
    """Returns a file for each picture, with its suffix or another. Raises ValueError or OSError."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder}: must be a folder for several pictures")
    folder.mkdir(parents=True, exist_ok=True)
    targets = [folder / (Path(image).name if suffix is None else Path(image).stem + suffix) for image in images]
    twice = next((path for path in targets if targets.count(path) > 1), None)
    if twice is not None:
        raise ValueError(f"two pictures are named {twice.name}; draw them in two calls")
    return targets


def _upload(client: Client, arguments: argparse.Namespace) -> None:
    image = client.upload_image(arguments.image, ttl_s=arguments.ttl, pin=arguments.pin)
    _print_image(image, arguments, image.image_id)


def _get(client: Client, arguments: argparse.Namespace) -> None:
    image = client.get_image(arguments.image)
    if arguments.output is not None:
        arguments.output.write_bytes(client.read_image(arguments.image))
    pinned = ", pinned" if image.pinned else ""
    size = f"{image.width_px}x{image.height_px}, {image.size_bytes} bytes"
    _print_image(image, arguments, f"{image.media_type}, {size}, until {image.expires:%Y-%m-%dT%H:%M:%SZ}{pinned}")


def _delete(client: Client, arguments: argparse.Namespace) -> None:
    client.delete_image(arguments.image)


def _print_image(image: StoredImage, arguments: argparse.Namespace, line: str) -> None:
    if arguments.json:
        show_json(dataclasses.asdict(image))
    else:
        show(line)


def options_of(arguments: argparse.Namespace) -> CallOptions:
    """Returns the options of the call that the flags name. Raises ValueError or OSError for an invalid schema."""
    from kestrel_client import CallOptions

    given: dict[str, Any] = {
        name: getattr(arguments, name)
        for name in CallOptions.__annotations__
        if getattr(arguments, name, None) is not None and name != "json_schema"
    }
    schema = getattr(arguments, "json_schema", None)
    if schema is not None:
        given["json_schema"] = schema if schema.lstrip().startswith("{") else Path(schema).read_text("utf-8")
    return cast("CallOptions", given)


def _is_whole(arguments: argparse.Namespace) -> bool:
    """Returns True if the answer is requested as one response rather than as a stream."""
    return arguments.json or arguments.n is not None or arguments.logprobs is not None


def print_text(deltas: Iterator[TextDelta]) -> None:
    """Prints an answer as it arrives, and the reasoning on standard error.

    The part of an answer that came before a failure is a line, too.
    """
    from kestrel_client import KestrelClientError, TextChannel

    channel = None
    try:
        for delta in deltas:
            if channel is TextChannel.REASONING and delta.channel is not channel:
                print(file=sys.stderr)
            channel = delta.channel
            file = sys.stdout if channel is TextChannel.ANSWER else sys.stderr
            show(delta.text, end="", file=file)
    except KestrelClientError:
        if channel is not None:  # else there is no line to end
            print(file=sys.stdout if channel is TextChannel.ANSWER else sys.stderr, flush=True)
        raise
    print(flush=True)


def _print_outline(segments: Iterator[Segment]) -> None:
    """Prints one line: the box, and the path as it grows."""
    shown: str | None = None
    for segment in segments:
        new = f"{_numbers(segment.box)} " if shown is None else segment.svg_path[len(shown) :]
        shown = segment.svg_path
        show(new, end="")
    if shown is not None:
        print(flush=True)


def _print_answer(arguments: argparse.Namespace, result: QueryResult | CaptionResult) -> None:
    from kestrel_client import QueryResult

    if arguments.json:
        _print_json(result)
        return
    if isinstance(result, QueryResult) and result.reasoning is not None:
        show(result.reasoning.text, file=sys.stderr)
    for sample in (result, *result.alternatives):
        show(_text(sample))
        for token in sample.logprobs:
            others = "".join(f"  {other.text!r} {other.logprob:.3f}" for other in token.top)
            print(f"{token.logprob:8.3f}  {token.text!r}{others and f'  of{others}'}", file=sys.stderr)


def _text(sample: QueryResult | CaptionResult | QueryAlternative | CaptionAlternative) -> str:
    from kestrel_client import CaptionAlternative, CaptionResult

    return sample.caption if isinstance(sample, CaptionResult | CaptionAlternative) else sample.answer


def _lines(result: Result, arguments: argparse.Namespace) -> list[str]:
    """Returns the lines that show a result, with scores if the least one was asked for."""
    has_scores = getattr(arguments, "min_score", None) is not None
    from kestrel_client import (
        CaptionResult,
        DetectResult,
        EmbedResult,
        GazeResult,
        PointResult,
        QueryResult,
        SegmentResult,
    )

    match result:
        case QueryResult() | CaptionResult():
            return [" ".join(_text(sample).splitlines()) for sample in (result, *result.alternatives)]
        case PointResult():
            found = [("", result.objects), *((f"{group.object}: ", group.objects) for group in result.groups)]
            return [
                name + _numbers(item.point, item.score if has_scores else None)
                for name, items in found
                for item in items
            ]
        case DetectResult():
            found = [("", result.objects), *((f"{group.object}: ", group.objects) for group in result.groups)]
            return [
                name + _numbers(item.box, item.score if has_scores else None)
                for name, items in found
                for item in items
            ]
        case SegmentResult():
            return [f"{_numbers(segment.box)} {segment.svg_path}" for segment in result.segments]
        case EmbedResult():
            return [" ".join(f"{number:.6g}" for number in result.mean)]
        case GazeResult():
            return [] if result.target is None else [_numbers(result.target)]
        case _:
            raise TypeError(f"no lines for {type(result).__name__}")


def _show(
    arguments: argparse.Namespace,
    image: str,
    result: PointResult | DetectResult | GazeResult,
    *,
    are_shown: bool = False,
) -> int:
    """Prints and draws a result; returns 1 if one of several objects has no answer, else 0.

    With `are_shown` its lines have been printed.
    """
    from kestrel_client import GazeResult

    lines, has_groups = _lines(result, arguments), not isinstance(result, GazeResult) and bool(result.groups)
    if arguments.json:
        _print_json(result)
    elif lines:
        if not are_shown:
            show(*lines)
    elif not has_groups:
        print_error(f"no {'target' if isinstance(result, GazeResult) else result.object} found")
    _draw(arguments.draw, image, result)
    return 0 if isinstance(result, GazeResult) else _report_groups(result, "")


def _report_groups(result: Result, prefix: str) -> int:
    """Reports the objects of several that were not found or have no answer; returns 1 if one has none, else 0."""
    from kestrel_client import DetectResult, PointResult

    status = 0
    for group in result.groups if isinstance(result, PointResult | DetectResult) else ():
        if group.error is not None:
            print_error(f"{prefix}{group.object}: {group.error}")
            status = 1
        elif not _found(group):
            print_error(f"{prefix}no {group.object} found")
    return status


def _found(group: PointGroup | DetectGroup) -> bool:
    from kestrel_client import PointGroup

    return bool(group.points if isinstance(group, PointGroup) else group.objects)


def _warn_of_outline(arguments: argparse.Namespace, result: SegmentResult) -> None:
    if not result.segments:
        print_error(f"no {arguments.object} found")
    elif result.segments[0].is_partial:
        print_error("the outline is not complete")


def _print_json(result: Result) -> None:
    show_json(_plain(result))


def _plain(result: Result) -> dict[str, Any]:
    """Returns the fields of a result; those with bytes are for files."""
    return {name: value for name, value in dataclasses.asdict(result).items() if not isinstance(value, bytes)}


def _numbers(place: Point | Box, score: float | None = None) -> str:
    """Returns one line for people and for `cut`: fractions of the width and height from the top left corner, then
    the score, if any."""
    numbers = dataclasses.astuple(place) if score is None else (*dataclasses.astuple(place), score)
    return " ".join(f"{number:.4f}" for number in numbers)


def _draw(target: Path | None, image: str, result: PointResult | DetectResult | SegmentResult | GazeResult) -> None:
    """Draws a result into a file, in the format of its name."""
    if target is None:
        return
    from kestrel_client import draw

    drawn = draw(image, result)
    try:
        drawn.save(target)
    except (KeyError, ValueError) as error:  # Pillow does not know the suffix, or cannot write the format
        raise ValueError(f"{target}: is no name of a picture, such as drawn.png or drawn.jpg") from error
    print_error(f"drawn in {target}")
