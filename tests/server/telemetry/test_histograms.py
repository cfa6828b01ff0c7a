"""Histograms beside those of Prometheus' own client."""

import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, disable_created_metrics, generate_latest

from kestrel_grpc.telemetry.histograms import Histogram

BOUNDS = (0.25, 1.0, 1024.0, 4194304.0)
VALUES = st.floats(0.0, 1e9) | st.sampled_from(BOUNDS)


@given(st.lists(st.tuples(st.sampled_from(("query", "point")), VALUES)))
def test_the_text_is_that_of_prometheus_own(observations: list[tuple[str, float]]):
    disable_created_metrics()
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    arguments = ("kestrel_size_bytes", "Sizes.", ("skill",))
    histogram = Histogram(*arguments, BOUNDS, ours)
    reference = prometheus_client.Histogram(*arguments, buckets=BOUNDS, registry=theirs)
    for skill, value in observations:
        histogram.series(skill).observe(value)
        reference.labels(skill).observe(value)
    assert generate_latest(ours) == generate_latest(theirs)


def test_one_without_labels_is_there_from_the_start():
    disable_created_metrics()
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    Histogram("kestrel_wait_seconds", "Waits.", (), BOUNDS, ours)
    prometheus_client.Histogram("kestrel_wait_seconds", "Waits.", buckets=BOUNDS, registry=theirs)
    assert generate_latest(ours) == generate_latest(theirs)


def test_two_of_one_name_are_refused():
    registry = CollectorRegistry()
    Histogram("kestrel_wait_seconds", "Waits.", (), BOUNDS, registry)
    with pytest.raises(ValueError, match="Duplicated"):
        Histogram("kestrel_wait_seconds", "Waits.", (), BOUNDS, registry)
