"""How much faster is one call about ten objects than ten calls, one after the other on one channel?

Both ask about pictures that the server has never seen, with its default caches: each picture has 36 shapes of
eight kinds, and ten objects of up to four boxes each are asked for. Pictures for one call and for ten calls come in
turns. Afterwards ten calls about each picture that one call has asked about must give the same boxes. Prints the
median times, their ratio, the boxes, and how many crops were encoded for each picture. Starts `kestrel-grpc serve`,
or asks the server at `--target`; options after `--` go to the server. Needs the extra `training`.

    python -m bench.many_objects
    python -m bench.many_objects --target localhost:50051 --pictures 20
"""

import random
import statistics
import time
from pathlib import Path
from typing import Any

from bench.harness.output import parser_of, write_json
from bench.harness.serving import RunningServer, machine_facts, started_server
from kestrel_client import Client, DetectResult
from training.drawing import encode_scene
from training.palette import COLORS, sample_color
from training.scenes import Background, Scene, Thing
from training.shapes import SHAPES, outline

NAMES = (*SHAPES, "shape", "red shape")
MAX_BOXES = 4
_SIDE_PX, _PER_SIDE = 756, 6
_FIRST_SEED = 2_000_000_000


def picture(seed: int) -> bytes:
    """Returns a file with a grid of shapes on white, four or five of each kind."""
    rng = random.Random(seed)
    names = [SHAPES[place % len(SHAPES)] for place in range(_PER_SIDE**2)]
    rng.shuffle(names)
    colors = [color for color in COLORS if color not in ("white", "yellow")]
    things: list[Thing] = []
    for place, name in enumerate(names):
        shape, color = outline(name, rng), rng.choice(("red", *colors))
        row, column = divmod(place, _PER_SIDE)
        width, height = min(1.0, shape.aspect), min(1.0, 1 / shape.aspect)
        left, top = (column + 0.5 - 0.38 * width) / _PER_SIDE, (row + 0.5 - 0.38 * height) / _PER_SIDE
        box = (left, top, left + 0.76 * width / _PER_SIDE, top + 0.76 * height / _PER_SIDE)
        things.append(Thing(name, color, sample_color(color, rng), "small", box, shape))
    background = Background("plain", ((255, 255, 255),), "white", 1.0, 0.0)
    return encode_scene(Scene(seed, _SIDE_PX, _SIDE_PX, background, tuple(things)))


def boxes_of(result: DetectResult) -> list[list[Any]]:
    """Returns the boxes of each object of one call."""
    return [[found.box for found in group.objects] for group in result.groups]


def one_by_one(client: Client, image: bytes) -> list[list[Any]]:
    """Returns the same by as many calls."""
    results = [client.detect(image, name, max_objects=MAX_BOXES) for name in NAMES]
    return [[found.box for found in result.objects] for result in results]


def compare(client: Client, server: RunningServer, num_pictures: int) -> dict[str, Any]:
    """Measures both ways in turns, and compares their answers."""
    seed = (
        time.time_ns() % 1_000_000_000 + _FIRST_SEED
    )  # a server that runs already may know pictures of another run
    pictures = [picture(seed + number) for number in range(2 * num_pictures + 2)]
    client.detect(pictures[-1], list(NAMES), max_objects=MAX_BOXES)
    one_by_one(client, pictures[-2])
    before = server.encoded_crops()
    times: dict[str, list[float]] = {"one call": [], "ten calls": []}
    answers: list[list[list[Any]]] = []
    for number in range(num_pictures):
        started = time.perf_counter()
        answers.append(boxes_of(client.detect(pictures[2 * number], list(NAMES), max_objects=MAX_BOXES)))
        between = time.perf_counter()
        one_by_one(client, pictures[2 * number + 1])
        times["one call"].append(between - started)
        times["ten calls"].append(time.perf_counter() - between)
    after = server.encoded_crops()
    num_equal = sum(one_by_one(client, pictures[2 * number]) == answers[number] for number in range(num_pictures))
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    crops = None if before is None or after is None else (after.num_crops - before.num_crops) / (2 * num_pictures)
    return {
        "seconds": medians,
        "ratio": medians["ten calls"] / medians["one call"],
        "boxes_of_a_call": statistics.mean(sum(map(len, answer)) for answer in answers),
        "pictures": num_pictures,
        "equal_answers": num_equal,
        "crops_encoded_of_a_picture": crops,
    }


def main() -> None:
    """Run what the command line asks for."""
    parser = parser_of(__doc__)
    parser.add_argument("--pictures", type=int, default=15, help="for each way (%(default)s)")
    parser.add_argument("--target", help="a server that runs already")
    parser.add_argument("--json", type=Path, default=Path("bench/out/many_objects.json"))
    parser.add_argument("server_options", nargs="*", metavar="-- OPTION")
    arguments = parser.parse_args()
    if arguments.target is not None:
        row = _row(RunningServer(arguments.target), arguments.pictures)
    else:
        with started_server(arguments.server_options, has_metrics=True) as server:
            row = _row(server, arguments.pictures)
    write_json(arguments.json, {"row": row, "machine": machine_facts()})


def _row(server: RunningServer, num_pictures: int) -> dict[str, Any]:
    with Client(server.address, timeout_s=600) as client:
        row = compare(client, server, num_pictures)
    for name, seconds in row["seconds"].items():
        print(f"{name}: {1000 * seconds:.0f} ms")
    print(f"ratio: {row['ratio']:.2f}; boxes of a call: {row['boxes_of_a_call']:.1f}")
    print(f"equal answers: {row['equal_answers']} of {row['pictures']}")
    print(f"crops encoded of a picture: {row['crops_encoded_of_a_picture']}")
    return row | {"server": server.facts()}


if __name__ == "__main__":
    main()
