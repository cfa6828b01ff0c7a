"""What does an image cost before the encoder sees it, decoded by so many threads, resized by Pillow or the device?

Workers' rates are of 800 by 557 pixels as JPEG: decoded, resized and cut by Pillow, and decoded alone. On the
device each size is timed as the device sees it (`cut`, `upload`) and as the host does, for lengths whose weights
are there and for new ones. `--check` compares every pixel with Pillow's; `--tune` times the kernel over blocks.
"""

import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch
from PIL import Image

from bench.harness.output import parser_of, write_json
from bench.harness.timing import attempted, time_us
from bench.harness.workload import chart
from kestrel_ops import Kernels, resample
from kestrel_ops.images.triton_resample import Blocks
from kestrel_ops.images.triton_resample import resample as triton_resample
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.imaging.crops import DecodedImage, keep_decoded
from kestrel_runtime.imaging.decoding import decode_image
from kestrel_runtime.models.moondream.vision.cropping import MoondreamCropping
from kestrel_runtime.models.moondream.vision.device_cropping import Cropper
from kestrel_runtime.models.moondream.weights.published import MOONDREAM_2

CROPPING = MoondreamCropping(MOONDREAM_2.vision)
SIZES = ((800, 557), (378, 378), (640, 480), (1920, 1080), (1080, 2340), (3840, 2160))
"""Width and height in pixels."""
HARD_SIZES = (
    *((1, 1), (1, 700), (700, 1), (2, 3), (64, 64), (377, 379), (378, 378), (379, 378), (500, 390), (390, 500)),
    *((800, 557), (768, 1024), (400, 16_000), (16_000, 400), (379, 8000), (8000, 379), (1080, 2340), (2048, 2048)),
)
NUM_DRAWN = 16


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one image."""

    width: int
    height: int
    crops: int
    pillow_ms: float  # resizing and dividing into crops on one core
    uncut_ms: float  # handing the decoded pixels over, on one core
    device_us: float
    upload_us: float
    host_us: float
    host_first_us: float  # where the weights of all lengths are new


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    """A picture of nothing, in which every pixel matters."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def median_ms(call: Callable[[], object], repeats: int = 9) -> float:
    """Median time on the host's clock, the device idle before each call."""
    times = []
    for _ in range(repeats):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times)


def images_per_s(
    prepare: Callable[[bytes], object], files: list[bytes], num_threads: int, duration_s: float
) -> float:
    """How many files so many threads prepare in a second."""
    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(prepare, files))
        count, started = 0, time.perf_counter()
        while (elapsed_s := time.perf_counter() - started) < duration_s:
            count += len(list(pool.map(prepare, files * num_threads)))
    return count / elapsed_s


def worker_rates(threads: list[int], duration_s: float) -> list[dict[str, float]]:
    """Images per second by number of threads, with Pillow's resizing and without."""
    files = [chart(seed) for seed in range(NUM_DRAWN)]
    decode = partial(decode_image, max_image_pixels=EngineConfig().max_image_pixels)
    rows = []
    print(f"\n{'threads':>7} {'Pillow crops /s':>15} {'decoded alone /s':>17}")
    for count in threads:
        pillow = images_per_s(lambda file: CROPPING.make_crops(decode(file)), files, count, duration_s)
        decoded = images_per_s(lambda file: keep_decoded(decode(file), CROPPING), files, count, duration_s)
        rows.append({"threads": count, "pillow_per_s": pillow, "decode_per_s": decoded})
        print(f"{count:>7} {pillow:>15.0f} {decoded:>17.0f}", flush=True)
    return rows


def cost_of(width: int, height: int, new_cropper: Callable[[], Cropper]) -> Cost:
    """Time one size."""
    image = noise(width, height)
    decoded = keep_decoded(image, CROPPING)
    assert isinstance(decoded, DecodedImage)
    cropper = new_cropper()
    pixels = cropper.upload(decoded.pixels)
    device_us = time_us([lambda: cropper.crop(pixels, decoded.rows, decoded.columns)])
    staged = torch.empty(decoded.pixels.shape, dtype=torch.uint8, pin_memory=pixels.is_cuda)
    uploaded = staged.to(pixels.device)
    return Cost(
        width,
        height,
        decoded.num_crops,
        pillow_ms=median_ms(lambda: CROPPING.make_crops(image)),
        uncut_ms=median_ms(lambda: keep_decoded(image, CROPPING)),
        device_us=device_us,
        upload_us=time_us([lambda: uploaded.copy_(staged, non_blocking=True)]),
        host_us=median_ms(lambda: cropper.make_crops(decoded)) * 1e3,
        host_first_us=median_ms(lambda: new_cropper().make_crops(decoded)) * 1e3,
    )


def device_costs(new_cropper: Callable[[], Cropper]) -> list[Cost]:
    """Time every size."""
    heads = ("crops", "Pillow ms", "whole ms", "device µs", "upload µs", "host µs", "new lengths µs")
    print(f"\n{'size':>11}" + "".join(f"{head:>15}" for head in heads))
    costs = []
    for width, height in SIZES:
        with attempted(f"{width} by {height}"):
            cost = cost_of(width, height, new_cropper)
            costs.append(cost)
            print(
                f"{width:>6}x{height:<4}{cost.crops:>15}{cost.pillow_ms:>15.2f}{cost.uncut_ms:>15.2f}"
                f"{cost.device_us:>15.1f}{cost.upload_us:>15.1f}{cost.host_us:>15.0f}{cost.host_first_us:>15.0f}",
                flush=True,
            )
    return costs


def check(croppers: dict[str, Cropper], num_random: int) -> dict[str, dict[str, int]]:
    """Compare all crops of hard and of random sizes with Pillow's, pixel by pixel."""
    chance = random.Random(0)
    sizes = [*HARD_SIZES, *((_log_uniform(chance), _log_uniform(chance)) for _ in range(num_random))]
    totals = {name: {"images": 0, "pixels": 0, "differing": 0, "largest": 0} for name in croppers}
    for seed, (width, height) in enumerate(sizes):
        image = noise(width, height, seed)
        decoded, wanted = keep_decoded(image, CROPPING), CROPPING.make_crops(image).pixels.astype(np.int16)
        if not isinstance(decoded, DecodedImage):
            continue
        for name, cropper in croppers.items():
            difference = np.abs(cropper.make_crops(decoded).cpu().numpy() - wanted)
            total = totals[name]
            total["images"] += 1
            total["pixels"] += wanted.size // 3
            total["differing"] += int((difference.max(axis=-1) > 0).sum())
            total["largest"] = max(total["largest"], int(difference.max()))
            if difference.any():
                print(f"{width}x{height}, {decoded.num_crops} crops, {name}: up to {difference.max()} steps of 255")
    for name, total in totals.items():
        print(
            f"{name}: {total['images']} images, {total['pixels']:,} pixels, {total['differing']:,} differ from "
            f"Pillow's, by at most {total['largest']} of 255"
        )
    return totals


def tune(device: torch.device) -> list[dict[str, Any]]:
    """Time 800 by 557 over candidate blocks, fastest first."""
    decoded = keep_decoded(noise(*SIZES[0]), CROPPING)
    assert isinstance(decoded, DecodedImage)
    rows = []
    for blocks in _candidates():
        with attempted(str(blocks)):
            cropper = Cropper(CROPPING, device, partial(triton_resample, blocks=blocks))
            pixels = cropper.upload(decoded.pixels)
            crop = partial(cropper.crop, pixels, decoded.rows, decoded.columns)
            rows.append({"blocks": str(blocks), "us": time_us([crop])})
    rows.sort(key=lambda row: row["us"])
    for row in rows:
        print(f"{row['us']:>8.1f} µs  {row['blocks']}")
    return rows


def main() -> int:
    """Measure, print and write; exit 1 where a pixel differs from Pillow's by more than one step."""
    parser = parser_of(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2, 4, 8, 12])
    parser.add_argument("--seconds", type=float, default=1.0, help="per number of threads and way (default: 1)")
    parser.add_argument("--check", action="store_true", help="compare with Pillow")
    parser.add_argument("--sizes", type=int, default=40, help="random sizes that --check adds (default: 40)")
    parser.add_argument("--tune", action="store_true", help="time the kernel over block sizes")
    parser.add_argument("--json", type=Path, default=Path("bench/out/images.json"), help="default: %(default)s")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    result: dict[str, Any] = {
        "machine": {"device": name, "cores": os.cpu_count(), "torch": torch.__version__, "pillow": PIL.__version__}
    }
    print(", ".join(f"{key} {value}" for key, value in result["machine"].items()))
    chosen = Kernels.select(device.type, {}).resample
    # Threads inside an operation would fight with those that decode.
    torch.set_num_threads(1)
    largest = 0
    if arguments.check:
        croppers = {"fast": Cropper(CROPPING, device, chosen), "definition": Cropper(CROPPING, device, resample)}
        result["check"] = check(croppers, arguments.sizes)
        largest = max(total["largest"] for total in result["check"].values())
    result["device"] = [asdict(cost) for cost in device_costs(lambda: Cropper(CROPPING, device, chosen))]
    result["workers"] = worker_rates(arguments.threads, arguments.seconds)
    if arguments.tune and device.type == "cuda":
        print()
        result["tuning"] = tune(device)
    write_json(arguments.json, result)
    return 0 if largest <= 1 else 1


def _candidates() -> Iterator[Blocks]:
    for num_bytes in (256, 512, 1024):
        for num_rows in (1, 4, 8):
            for num_warps in (4, 8):
                yield Blocks(num_bytes, num_rows, num_warps)


def _log_uniform(chance: random.Random) -> int:
    return int(2 ** chance.uniform(0, 11.5))


if __name__ == "__main__":
    sys.exit(main())
