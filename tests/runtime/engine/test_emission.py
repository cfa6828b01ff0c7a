"""What a caller is told after each token."""

from kestrel_runtime.api.events import Finished, FinishReason, Started
from kestrel_runtime.engine.emission import events_after
from kestrel_runtime.scheduling.output_parser import Token, TokenRule
from tests.runtime.sequences import RuleParser, new_sequence


def test_the_first_token_starts_the_answer_and_a_full_context_ends_it() -> None:
    sequence = new_sequence(3, num_image_tokens=4, max_context=9)
    sequence.parser = RuleParser(TokenRule())
    sequence.tokens.append(Token(7))
    (started,) = events_after(sequence, 1.0)
    assert isinstance(started, Started)
    assert (started.usage.num_input_tokens, started.usage.num_output_tokens) == (7, 1)
    sequence.tokens.append(Token(8))
    (finished,) = events_after(sequence, 3.0)
    assert isinstance(finished, Finished)
    assert finished.finish_reason is FinishReason.LENGTH
    assert (finished.usage.num_output_tokens, finished.timing.decode_s) == (2, 2.0)
