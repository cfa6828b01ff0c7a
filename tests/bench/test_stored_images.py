"""The comparison of sent and stored images runs, and what it sends differs in nothing but its size."""

from __future__ import annotations

import io

from PIL import Image, ImageChops

from bench.harness.serving import started_server
from bench.stored_images import measure, padded_image
from kestrel_client import Client


def test_images_have_their_size_in_bytes_and_the_same_pixels() -> None:
    small, large = (padded_image(size) for size in (16_384, 2**20))
    assert (len(small), len(large)) == (16_384, 2**20)
    first, second = (Image.open(io.BytesIO(data)) for data in (small, large))
    assert ImageChops.difference(first, second).getbbox() is None


def test_each_kind_of_call_is_measured_so_often() -> None:
    with started_server(("--device", "cpu")) as server, Client(server.address, store_from_bytes=None) as client:
        row = measure(client, 16, 2)
    assert len(row.sent_s) == len(row.named_s) == 2
    assert min(*row.sent_s, *row.named_s, row.storing_s, row.digest_s) > 0
    assert row.as_text().startswith("| 16 KiB | ")
