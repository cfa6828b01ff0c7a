import torch

import bench.images as images
from kestrel_ops import resample
from kestrel_runtime.models.moondream.vision.device_cropping import Cropper

CPU = torch.device("cpu")


def slightly_off(*arguments):
    """One pixel of every pass lies two steps beside."""
    resampled = resample(*arguments)
    resampled[0, 0] ^= 2
    return resampled


def test_the_check_counts_what_differs_from_pillow(monkeypatch, capsys):
    monkeypatch.setattr(images, "HARD_SIZES", ((30, 20),))
    croppers = {
        "exact": Cropper(images.CROPPING, CPU, resample),
        "off": Cropper(images.CROPPING, CPU, slightly_off),
    }
    totals = images.check(croppers, num_random=0)
    side = images.CROPPING.crop_px
    assert totals["exact"] == {"images": 1, "pixels": 2 * side * side, "differing": 0, "largest": 0}
    assert totals["off"]["largest"] > 1
    assert 0 < totals["off"]["differing"] < totals["off"]["pixels"]
    assert "exact: 1 images, 285,768 pixels, 0 differ" in capsys.readouterr().out


def test_workers_are_timed_with_pillow_and_without(monkeypatch):
    monkeypatch.setattr(images, "NUM_DRAWN", 1)
    (row,) = images.worker_rates([1], duration_s=0.01)
    assert row["threads"] == 1
    assert row["pillow_per_s"] > 0
    assert row["decode_per_s"] > 0


def test_a_size_is_timed_on_the_host_and_on_the_device():
    cost = images.cost_of(40, 30, lambda: Cropper(images.CROPPING, CPU, resample))
    assert (cost.width, cost.height, cost.crops) == (40, 30, 2)
    assert min(cost.pillow_ms, cost.device_us, cost.upload_us, cost.host_us, cost.host_first_us) > 0
