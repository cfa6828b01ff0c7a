"""Contains the skills of Moondream: one module for the prompt and the output parser of each."""

from collections.abc import Mapping
from types import MappingProxyType

from kestrel_runtime.models.moondream.skills.base import Skill
from kestrel_runtime.models.moondream.skills.caption import CaptionSkill
from kestrel_runtime.models.moondream.skills.chat import ChatSkill
from kestrel_runtime.models.moondream.skills.detect import DetectSkill
from kestrel_runtime.models.moondream.skills.embed import EmbedSkill
from kestrel_runtime.models.moondream.skills.gaze import GazeSkill
from kestrel_runtime.models.moondream.skills.point import PointSkill
from kestrel_runtime.models.moondream.skills.query import QuerySkill
from kestrel_runtime.models.moondream.skills.segment import SegmentSkill

_SKILLS = (
    QuerySkill(),
    CaptionSkill(),
    PointSkill(),
    DetectSkill(),
    SegmentSkill(),
    GazeSkill(),
    ChatSkill(),
    EmbedSkill(),
)
SKILLS: Mapping[str, Skill] = MappingProxyType({skill.name: skill for skill in _SKILLS})
