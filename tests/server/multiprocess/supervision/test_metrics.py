"""The metrics of several processes in one text."""

from prometheus_client.parser import text_string_to_metric_families

from kestrel_grpc.multiprocess.supervision.metrics import joined

FIRST = b"""# HELP calls_total Calls.
# TYPE calls_total counter
calls_total{method="a b{c",code="OK"} 3.0
# HELP up Up.
# TYPE up gauge
up 1.0
"""
SECOND = b"""# HELP up Up.
# TYPE up gauge
up 0.0
# HELP wait_seconds Waits.
# TYPE wait_seconds histogram
wait_seconds_bucket{le="1.0"} 4.0
wait_seconds_bucket{le="+Inf"} 5.0
wait_seconds_count 5.0
wait_seconds_sum 9.5
"""


def test_each_sample_gets_the_label_of_its_process_and_each_metric_stands_once() -> None:
    text = joined([("process", "frontend-0", FIRST), ("engine", "0", SECOND)]).decode()
    assert [line for line in text.splitlines() if "TYPE" in line] == [
        "# TYPE calls_total counter",
        "# TYPE up gauge",
        "# TYPE wait_seconds histogram",
    ]
    samples = [sample for item in text_string_to_metric_families(text) for sample in item.samples]
    assert [(sample.name, sample.labels, sample.value) for sample in samples] == [
        ("calls_total", {"process": "frontend-0", "method": "a b{c", "code": "OK"}, 3.0),
        ("up", {"process": "frontend-0"}, 1.0),
        ("up", {"engine": "0"}, 0.0),
        ("wait_seconds_bucket", {"engine": "0", "le": "1.0"}, 4.0),
        ("wait_seconds_bucket", {"engine": "0", "le": "+Inf"}, 5.0),
        ("wait_seconds_count", {"engine": "0"}, 5.0),
        ("wait_seconds_sum", {"engine": "0"}, 9.5),
    ]


def test_a_process_that_does_not_answer_is_left_out() -> None:
    assert joined([("process", "frontend-0", b""), ("engine", "0", b"")]) == b""
    assert joined([("process", "frontend-0", b""), ("engine", "0", b"up 1.0\n")]) in (b"", b'up{engine="0"} 1.0\n')
