import pytest

from kestrel_runtime.api.errors import InvalidRequest
from kestrel_runtime.api.events import FinishReason, Location, PointOutput
from kestrel_runtime.api.requests import Gaze, Point, PointRef, SamplingParams
from kestrel_runtime.models.moondream.skills.gaze import GazeSkill
from kestrel_runtime.models.moondream.skills.point import PointSkill
from kestrel_runtime.output.output_parser import Token
from tests.runtime.models.moondream.skills.parsing import (
    EOS,
    IMAGE,
    MOONDREAM_2,
    MOONDREAM_3,
    PUBLISHED_2,
    PUBLISHED_3,
    TOKENIZER,
    consume,
    coordinate,
)

SKILL = GazeSkill()
EYE = PointRef(0.25, 0.75)
END = Token(EOS)
BOTH = pytest.mark.parametrize("config", [MOONDREAM_2, MOONDREAM_3], ids=["moondream2", "moondream3"])


def parser(config, max_tokens=None):
    return SKILL.new_parser(Gaze(IMAGE, EYE, SamplingParams(max_tokens=max_tokens)), TOKENIZER, config)


@pytest.mark.parametrize("config", [PUBLISHED_2, PUBLISHED_3], ids=["moondream2", "moondream3"])
def test_the_prompt_is_that_of_a_point_of_gaze_with_the_eye_as_reference(config):
    point = Point("gaze", IMAGE, spatial_refs=(EYE,))
    assert (
        SKILL.prompt(Gaze(IMAGE, EYE), TOKENIZER, config).tokens
        == PointSkill().prompt(point, TOKENIZER, config).tokens
    )


@BOTH
def test_the_first_point_ends_the_answer(config):
    gaze = parser(config)
    consume(gaze, [coordinate(0.5), coordinate(0.125)])
    assert gaze.finish_reason is FinishReason.STOP
    assert gaze.output() == PointOutput((Location(0.5, 0.125),))


@BOTH
def test_a_look_out_of_the_image_has_no_target(config):
    gaze = parser(config)
    consume(gaze, [END])
    assert gaze.finish_reason is FinishReason.STOP
    assert gaze.output() == PointOutput(())


def test_half_a_point_is_no_target():
    gaze = parser(MOONDREAM_3, max_tokens=1)
    consume(gaze, [coordinate(0.5)])
    assert gaze.finish_reason is FinishReason.LENGTH
    assert gaze.output() == PointOutput(())


def test_violations_name_the_eye():
    with pytest.raises(InvalidRequest) as caught:
        Gaze(b"", PointRef(1.5, float("nan")))
    assert [violation.field for violation in caught.value.violations] == ["image", "eye.x", "eye.y"]
