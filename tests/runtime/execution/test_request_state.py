import torch

from kestrel_runtime.execution.request_state import Slots
from kestrel_runtime.execution.token_rules import RuleTable
from kestrel_runtime.interfaces.tokens import Token, TokenRule
from tests.runtime.sequences import new_sequence

CPU = torch.device("cpu")
ONLY_3 = TokenRule(allowed=(3,))


def new_slots(count=4):
    return Slots(count, 6, RuleTable(30, 5, 6, CPU), CPU)


def holder(pages, *tokens, rule=ONLY_3):
    sequence = new_sequence([Token(0), *tokens], rule=rule)
    sequence.pages = pages
    return sequence


def test_a_slot_begins_with_the_last_token_and_its_value():
    slots, sequence = new_slots(), holder([1], Token(6, (0.5, 0.25)))
    slots.open(sequence)
    (slot,) = slots.of([sequence])
    assert slots.numbers[slot, :2].tolist() == [6, 2]
    assert slots.values[slot].tolist() == [0.5, 0.25]


def test_sequences_have_slots_of_their_own_until_they_close():
    slots = new_slots(2)
    first, second, third = (holder([1]) for _ in range(3))
    slots.open(first)
    slots.open(second)
    assert len(set(slots.of([first, second]))) == 2
    slots.close(first)
    slots.close(first)  # a sequence that has none is left alone
    slots.open(third)
    assert slots.nobody not in slots.of([second, third])
    assert len(set(slots.of([second, third]))) == 2


def test_drawing_moves_a_slot_on():
    slots, sequence = new_slots(), holder([1])
    sequence.parser.budget = 5
    slots.open(sequence)
    rows = torch.tensor(slots.of([sequence]))
    slots.advance(rows, torch.tensor([3]), torch.tensor([1]), torch.tensor([[0.5, 0.0]]))
    assert slots.numbers[rows[0]].tolist()[:2] == [3, 1]
    assert slots.numbers[rows[0]].tolist()[3:] == [1, 5]
    assert slots.values[rows[0]].tolist() == [0.5, 0.0]


def test_pages_are_padded_with_the_sequences_own():
    slots = new_slots()
    short, long = holder([4]), holder([7, 2, 9])
    for sequence in (short, long):
        slots.open(sequence)
    assert slots.page_table([short, long]).tolist() == [[4, 4, 4], [7, 2, 9]]
    assert slots.page_table([short]).tolist() == [[4]]
    short.pages = [4, 8]
    assert slots.page_table([short], width=6).tolist() == [[4, 8, 4, 4, 4, 4]]


def test_a_slot_opened_anew_forgets_its_pages():
    slots, sequence = new_slots(), holder([4, 5, 6])
    slots.open(sequence)
    slots.page_table([sequence])
    sequence.pages = [1, 2]
    slots.open(sequence)
    assert slots.page_table([sequence], width=3).tolist() == [[1, 2, 1]]
