"""Images go where they are cached, unless their core is much busier than the others."""

import hashlib
from collections import Counter
from dataclasses import dataclass

from kestrel_grpc.multiprocess.engine_channel.routing import choose, home_order


@dataclass
class Core:
    index: int
    load: int = 0
    num_waiting: int = 0
    max_batch_size: int = 8


DIGESTS = [hashlib.sha256(b"%d" % number).digest() for number in range(3_000)]


def test_an_image_goes_to_one_core_whatever_the_order_of_cores() -> None:
    cores = [Core(index) for index in range(5)]
    for digest in DIGESTS[:100]:
        assert choose(cores, digest).index == choose(cores[::-1], digest).index


def test_images_spread_evenly() -> None:
    homes = Counter(home_order(digest, range(5))[0] for digest in DIGESTS)
    assert all(abs(count - 600) < 90 for count in homes.values())


def test_a_core_that_leaves_moves_its_own_images_only() -> None:
    for digest in DIGESTS[:500]:
        first, second, *_ = home_order(digest, range(5))
        assert home_order(digest, [index for index in range(5) if index != first])[0] == second
        assert home_order(digest, [index for index in range(5) if index != second])[0] == first


def test_an_image_stays_at_a_busy_core_that_keeps_up() -> None:
    digest = DIGESTS[0]
    home, *_ = home_order(digest, range(3))
    cores = [Core(index, load=100 if index == home else 0) for index in range(3)]
    assert choose(cores, digest).index == home


def test_an_image_moves_to_its_next_core_where_the_first_is_far_busier_and_requests_wait() -> None:
    digest = DIGESTS[0]
    home, following, _ = home_order(digest, range(3))
    cores = [Core(index, load=30 if index == home else 3, num_waiting=20 * (index == home)) for index in range(3)]
    assert choose(cores, digest).index == following
    level = [Core(index, load=30, num_waiting=20) for index in range(3)]
    assert choose(level, digest).index == home
    within_a_batch = [Core(index, load=8 if index == home else 0, num_waiting=1) for index in range(3)]
    assert choose(within_a_batch, digest).index == home


def test_a_request_without_an_image_goes_to_the_core_with_the_least_load() -> None:
    assert choose([Core(0, load=3), Core(1, load=2), Core(2, load=2)], None).index == 1
