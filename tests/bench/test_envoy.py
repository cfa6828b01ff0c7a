"""What `bench.envoy` makes of answers; the servers are for people who run it."""

from bench.envoy import Answer, Calls, Failure, moved

HOMES = ["one", "two"]


def answer(picture: int, server: str, began_s: float) -> Answer:
    return Answer(picture, server, True, began_s, began_s + 0.5)


def test_a_picture_moves_to_the_server_that_answers_most_calls_about_it_while_its_own_is_away():
    answers = [
        *(answer(0, "three", began_s) for began_s in (0.0, 1.0, 2.0)),  # while its own server is there, or too full
        *(answer(0, "two", began_s) for began_s in (10.0, 11.0)),
        answer(0, "three", 12.0),
        answer(1, "three", 12.0),  # its server has not left
        *(answer(0, "three", began_s) for began_s in (19.6, 20.0)),  # after it has come back
    ]
    assert moved(answers, HOMES, "one", gone_s=10.0, back_s=20.0) == {0: "two"}


def test_failures_are_counted_by_kind_and_are_calls_too():
    failures = [Failure("unary", "UNAVAILABLE", 9.0), Failure("begun stream", "UNAVAILABLE SERVER_LOST", 0.1)]
    calls = Calls([answer(0, "one", 1.0)], failures)
    assert calls.failed("unary", "stream") == 1
    assert calls.longest_s() == 9.0
