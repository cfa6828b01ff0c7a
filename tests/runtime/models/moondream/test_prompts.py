"""A prompt as the engine prepares it for a Moondream."""

import time

from kestrel_runtime.api.requests import Caption
from kestrel_runtime.models.loaded_model import LoadedModel
from kestrel_runtime.scheduling.sequence import SequenceClock
from tests.reference_fixtures import MD3_SMALL
from tests.runtime.preprocessors import new_preprocessor

IMAGE = (MD3_SMALL / "image_0_500x400.png").read_bytes()


def test_a_prompt_is_bos_then_image_then_the_skills_tokens(moondream3: LoadedModel):
    preprocessor = new_preprocessor(moondream3)
    sequence = preprocessor.prepare(Caption(IMAGE, "short"), SequenceClock(submitted=time.monotonic()))
    assert [token.id for token in sequence.tokens] == [0, 1, 287, 80, 2, 550, 277, 3]
    assert sequence.num_image_positions == 729
    assert sequence.length == sequence.num_prompt_positions == 8 + 729
    assert sequence.spans == ((0, 730),)
    assert sequence.images[0].pixels is not None
    assert len(sequence.images[0].crops_left()) == 9
    preprocessor.close()
