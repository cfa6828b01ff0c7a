"""I1 to I14 are the invariants in the docstring of `kestrel_runtime.scheduling.scheduler`."""

from dataclasses import replace

import pytest

from kestrel_runtime.api.requests import Priority
from kestrel_runtime.output.output_parser import Token
from kestrel_runtime.scheduling.cache_keys import EVERYBODY, Digest, ImageContent, PrefixKeyMaker
from kestrel_runtime.scheduling.crop_cache import CropCache
from kestrel_runtime.scheduling.scheduler import Scheduler, SharedPrefills
from kestrel_runtime.scheduling.sequence import SequenceState
from tests.runtime.sequences import new_sequence
from tests.runtime.world import World

WAITING, PARKED, PREFILLING, PREFILLED, RUNNING, FINISHED = SequenceState


# I1: pages


def test_i1_a_waiting_sequence_holds_no_page():
    world = World()
    sequence = world.add()
    assert (sequence.cache.pages, world.pages.num_held, world.scheduler.num_waiting) == ([], 0, 1)


@pytest.mark.parametrize("state", [WAITING, PREFILLING, RUNNING])
def test_i1_a_removed_sequence_gives_all_its_pages_back(state):
    world = World(num_pages=16, prefill=8)
    other = world.add(4)
    sequence = world.add(20)
    while sequence.state is not state:
        world.step()
    held = len(sequence.cache.pages)
    assert (held > 0) == (state is not WAITING)
    used = world.pages.num_held
    world.scheduler.remove(sequence)
    assert (sequence.state, sequence.cache.pages) == (FINISHED, [])
    assert world.pages.num_held == used - held
    assert list(world.scheduler.sequences()) == [other]
    world.scheduler.remove(other)
    assert world.scheduler.is_idle
    assert world.pages.num_held == 0


def test_i1_pages_that_a_step_under_way_still_writes_to_are_given_back_when_it_has_landed():
    world = World(prefill=8)
    sequence = world.add(20)
    steps = [world.begin(), world.begin()]
    world.scheduler.remove(sequence)
    assert (sequence.state, world.pages.num_held) == (FINISHED, 5)
    assert world.end(steps[0]) == []
    assert world.pages.num_held == 5
    assert world.end(steps[1]) == []
    assert (sequence.cache.pages, world.pages.num_held) == ([], 0)


def test_i1_a_failure_gives_back_the_pages_of_those_who_left_too():
    world = World()
    sequence = world.add(20)
    world.begin()
    world.scheduler.remove(sequence)
    world.scheduler.preempt_all()
    assert world.pages.num_held == 0


def test_i1_a_preempted_sequence_holds_no_page_and_can_be_removed():
    world = World(num_pages=4, page_size=2)
    oldest, youngest = world.add(2), world.add(2)
    while youngest.state is not WAITING or youngest.num_generated == 0:
        world.step()
    assert (youngest.cache.pages, youngest.cache.num_cached) == ([], 0)
    world.scheduler.remove(youngest)
    assert youngest.state is FINISHED
    assert world.pages.num_held == len(oldest.cache.pages)


# I2: decoding


def test_i2_each_running_sequence_samples_a_token_in_every_step():
    world = World(prefill=3)
    running = [world.add(1), world.add(1), world.add(1)]
    world.step()
    world.add(50, image=10, crops=3)
    for _ in range(20):
        before = [sequence.num_generated for sequence in running]
        assert world.step().decode[:3] == running
        assert [sequence.num_generated for sequence in running] == [count + 1 for count in before]


# I3: prefill while decoding


def test_i3_prefill_beside_decoding_is_cut_into_chunks():
    world = World(prefill=8)
    world.add(1)
    world.step()
    sequence = world.add(20)
    chunks = [world.step().prefill for _ in range(3)]
    assert [[(chunk.start, chunk.end) for chunk in step] for step in chunks] == [[(0, 8)], [(8, 16)], [(16, 20)]]
    assert sequence.num_generated == 1


def test_i3_several_prompts_share_the_bound_oldest_first():
    world = World(prefill=8)
    world.add(1)
    world.step()
    first, second, third = world.add(5), world.add(5), world.add(5)
    assert world.step().prefill == [(first, 0, 5), (second, 0, 3)]
    assert world.step().prefill == [(second, 3, 5), (third, 0, 5)]


def test_i3_an_image_prefix_goes_in_whole_and_alone_where_it_exceeds_the_bound():
    world = World(prefill=8)
    world.add(1)
    world.step()
    pictured = world.add(6, image=20)
    beside = world.add(3)
    assert world.step().prefill == [(pictured, 0, 21)]
    assert world.step().prefill == [(pictured, 21, 26), (beside, 0, 3)]


def test_i3_an_image_prefix_that_others_leave_no_room_for_waits_a_step():
    world = World(prefill=8)
    world.add(1)
    world.step()
    first, pictured, last = world.add(4), world.add(2, image=6), world.add(2)
    assert world.step().prefill == [(first, 0, 4), (last, 0, 2)]
    assert world.step().prefill == [(pictured, 0, 8)]


def test_i3_crops_beside_decoding_are_bounded_and_prefill_waits_for_the_last():
    world = World(crops=4)
    world.add(1)
    world.step()
    first, second = world.add(2, image=5, crops=6), world.add(2, image=5, crops=3)
    batch = world.step()
    assert (batch.encode, batch.prefill) == ([(first, 0, 4)], [])
    batch = world.step()
    assert batch.encode == [(first, 4, 6), (second, 0, 2)]
    assert batch.prefill == [(first, 0, 7)]
    batch = world.step()
    assert (batch.encode, batch.prefill) == ([(second, 2, 3)], [(second, 0, 7)])


def test_without_decoding_an_image_is_encoded_and_prefilled_in_one_step():
    world = World(crops=4)
    sequence = world.add(2, image=5, crops=13)
    batch = world.step()
    assert (batch.encode, batch.prefill) == ([(sequence, 0, 13)], [(sequence, 0, 7)])
    assert sequence.num_generated == 1


# I4: pages under pressure


def test_i4_pages_are_taken_one_by_one_as_tokens_need_them():
    world = World(num_pages=8, page_size=4)
    sequence = world.add(4)
    held = []
    for _ in range(9):
        world.step()
        held.append(len(sequence.cache.pages))
    assert held == [1, 2, 2, 2, 2, 3, 3, 3, 3]


def test_i4_the_youngest_makes_room_and_the_oldest_never_stops():
    world = World(num_pages=8, page_size=2)
    oldest, middle, youngest = world.add(2), world.add(2), world.add(2)
    gave_way = []
    for _ in range(14):
        states = {sequence: sequence.state for sequence in (oldest, middle, youngest)}
        before = oldest.num_generated
        world.step()
        assert oldest.num_generated == before + 1
        gave_way += [s for s in states if states[s] is RUNNING and s.state is WAITING]
    assert gave_way[:2] == [youngest, middle]
    assert oldest not in gave_way


def test_i4_a_preempted_sequence_keeps_its_tokens_and_is_prefilled_with_them():
    world = World(num_pages=6, page_size=2)
    oldest, youngest = world.add(2), world.add(2)
    while youngest.state is not WAITING or not youngest.num_generated:
        world.step()
    tokens = list(youngest.tokens)
    assert len(tokens) > 3
    world.scheduler.remove(oldest)
    batch = world.step()
    assert batch.prefill == [(youngest, 0, len(tokens))]
    assert youngest.tokens[:-1] == tokens


def test_i4_a_preempted_image_is_not_encoded_again():
    world = World(num_pages=8, page_size=2)
    oldest, pictured = world.add(4), world.add(1, image=3, crops=2)
    while pictured.state is not WAITING or not pictured.num_generated:
        world.step()
    assert not pictured.images[0].needs_encoding
    world.scheduler.remove(oldest)
    batch = world.step()
    assert (batch.encode, batch.prefill[0].start) == ([], 0)


def test_i4_a_lone_sequence_may_fill_the_whole_cache():
    world = World(num_pages=3, page_size=2)
    sequence = world.add(5)
    world.step()
    assert world.finished == [sequence]
    assert sequence.length == world.capacity


# I5: order


def test_i5_urgent_sequences_start_first_but_after_preempted_ones():
    world = World(num_pages=6, page_size=2, batch=2)
    oldest, preempted = world.add(2), world.add(2)
    world.step()
    normal, urgent = world.add(1), world.add(1, priority=Priority.INTERACTIVE)
    while preempted.state is not WAITING or not preempted.num_generated:
        world.step()
    world.scheduler.remove(oldest)
    assert [chunk.sequence for chunk in world.step().prefill] == [preempted, urgent]
    assert normal.state is WAITING


def test_i5_tokens_generated_count_for_their_tenant():
    world = World(batch=1)
    world.add(5, generates=20, tenant="talks")
    world.add(5, generates=1, tenant="listens")
    world.steps(21)
    assert world.scheduler.is_idle
    world.add(1, tenant="talks")
    listener = world.add(1, tenant="listens")
    world.step()
    assert listener.state is RUNNING


def test_i5_equal_sequences_start_in_the_order_they_came():
    world = World(num_pages=4, page_size=4, batch=2)
    large, small = world.add(13), world.add(1)
    world.step()
    assert (large.state, small.state) == (RUNNING, WAITING)  # `small` alone would fit, but not both
    third = world.add(1)
    world.scheduler.remove(large)
    assert world.step().prefill == [(small, 0, 1), (third, 0, 1)]


def test_i5_a_small_sequence_does_not_pass_a_large_one():
    world = World(num_pages=8, page_size=4)
    world.add(8)
    world.step()
    large, small = world.add(24), world.add(1)
    world.step()
    assert (large.state, small.state) == (WAITING, WAITING)


def test_i5_a_preempted_sequence_restarts_before_later_ones():
    world = World(num_pages=6, page_size=2, batch=2)
    oldest, preempted, later = world.add(2), world.add(2), world.add(1)
    while preempted.state is not WAITING or not preempted.num_generated:
        world.step()
    assert list(world.scheduler.sequences()) == [oldest, preempted, later]


# I6: after a failure


def test_i6_after_a_failure_each_does_the_same_again_alone_oldest_first():
    world = World()
    decoding, other = world.add(3), world.add(2)
    world.steps(3)
    tokens = list(decoding.tokens)
    pictured, late = world.add(2, image=5, crops=3), world.add(1)
    failed = world.fail()
    assert failed.members == [pictured, late, decoding, other]
    assert (world.pages.num_held, world.scheduler.num_waiting, decoding.tokens) == (0, 4, tokens)
    untouched = world.add(1, priority=Priority.INTERACTIVE)
    trials = [world.step() for _ in range(6)]
    # Who was decoding has everything but its last token put into the cache, and then decodes that.
    assert (trials[0].prefill, trials[0].decode) == ([(decoding, 0, 5)], [])
    assert (trials[1].prefill, trials[1].decode) == ([], [decoding])
    assert (trials[2].members, trials[3].decode) == ([other], [other])
    assert (trials[4].encode, trials[4].prefill) == ([(pictured, 0, 3)], [(pictured, 0, 7)])
    assert trials[5].prefill == [(late, 0, 1)]
    assert not world.scheduler.is_isolating
    assert world.step().members == [untouched, decoding, other, pictured, late]


def test_i6_who_fails_its_trial_is_tried_again_unless_it_is_removed():
    world = World()
    first, second = world.add(2), world.add(2)
    world.fail()
    assert world.fail().members == [first]
    assert world.fail().members == [first]
    world.scheduler.remove(first)
    assert world.step().members == [second]
    assert not world.scheduler.is_isolating
    assert world.step().decode == [second]


def test_i6_who_was_active_without_work_is_tried_too_and_keeps_its_place():
    world = World(prefill=4)
    decoding = world.add(1)
    world.step()
    first, second = world.add(4), world.add(4)
    assert world.fail().members == [first, decoding]
    assert [world.step().members for _ in range(4)] == [[decoding], [decoding], [first], [second]]
    assert not world.scheduler.is_isolating
    assert list(world.scheduler.sequences()) == [decoding, first, second]


def test_i6_who_has_passed_is_tried_anew_when_a_later_trial_fails():
    world = World()
    first, second, third = world.add(2), world.add(2), world.add(2)
    world.fail()
    assert world.step().members == [first]
    assert world.fail().members == [second]
    world.scheduler.remove(second)
    assert [world.step().members for _ in range(3)] == [[first], [first], [third]]
    assert world.step().decode == [first, third]


def test_i5_a_failed_isolation_run_keeps_the_order_of_arrival():
    world = World()
    first, second = world.add(2), world.add(2)
    world.fail()
    assert world.step().members == [first]
    assert world.fail().members == [second]
    assert list(world.scheduler.sequences()) == [first, second]
    while world.scheduler.is_isolating:
        world.step()
    assert world.active() == [first, second]


def test_i6_a_sequence_that_shall_run_alone_does_so_to_its_end():
    world = World()
    first, second = world.add(2), world.add(2)
    world.steps(2)
    isolated, other = world.add(2), world.add(2)
    world.scheduler.run_alone(isolated)
    assert [world.step().members for _ in range(4)] == [[isolated]] * 4
    assert isolated.num_generated == 4
    world.scheduler.remove(isolated)
    assert world.step().members == [other, first, second]


def test_i6_trials_fit_where_the_failed_batch_filled_the_cache():
    world = World(num_pages=8, page_size=2)
    first, second = world.add(5), world.add(5)
    world.steps(2)
    world.fail()
    while world.scheduler.is_isolating:
        assert len(world.step().members) == 1
    assert first.num_generated == second.num_generated == 3
    assert world.pages.num_available == 0


# I8: prompts on their way


def test_i8_who_decodes_does_not_wait_for_the_prompts_of_others():
    world = World()
    decoding = world.add(3)
    world.step()
    newest = world.add(5)
    prompts = world.begin()
    assert newest.state is PREFILLED
    for _ in range(3):
        turn = world.begin(may_prefill=False)
        assert turn.decode == [decoding]
        world.end(turn)
    assert (decoding.num_generated, newest.num_generated) == (4, 0)
    assert newest in world.end(prompts)
    assert newest.state is RUNNING
    assert world.step().decode == [decoding, newest]


def test_i8_who_follows_its_prompt_decodes_before_that_has_landed():
    world = World()
    sequence = world.add(5)
    prompts = world.begin()
    assert not world.scheduler.is_decoding
    world.scheduler.promote(prompts.steps[0].batch)
    assert world.scheduler.is_decoding
    second = world.begin()
    assert second.decode == [sequence]
    world.end(prompts)
    world.end(second)
    assert sequence.num_generated == 2


def test_i8_the_first_part_of_a_prompt_starts_no_decoding():
    world = World(prefill=8)
    other, sequence = world.add(3), world.add(10)
    first = world.begin()
    second = world.begin()
    assert [(chunk.sequence, chunk.end) for chunk in first.prefill] == [(other, 3), (sequence, 5)]
    assert [(chunk.sequence, chunk.end) for chunk in second.prefill] == [(sequence, 10)]
    world.scheduler.promote(first.steps[0].batch)
    assert world.begin(may_prefill=False).decode == [other]
    world.end(first)
    assert sequence.state is PREFILLED
    world.end(second)
    assert world.begin(may_prefill=False).decode == [other, sequence]


def test_a_batch_of_decoding_alone_starts_no_sequence():
    world = World()
    waiting = world.add(3)
    assert world.begin(may_prefill=False).is_empty
    assert waiting.state is WAITING


# Admission


def test_no_more_sequences_are_active_than_a_batch_holds():
    world = World(batch=3)
    for _ in range(5):
        world.add(1)
    assert len(world.step().prefill) == 3
    assert (world.scheduler.num_active, world.scheduler.num_waiting) == (3, 2)


def test_a_newcomer_waits_until_each_active_sequence_has_a_page_in_reserve():
    world = World(num_pages=8, page_size=4)
    world.add(4)
    world.add(4)
    world.step()
    newest = world.add(11)  # needs three pages; four are free, two of them in reserve
    world.step()
    assert newest.state is WAITING
    world.scheduler.remove(newest)
    smaller = world.add(7)
    world.step()
    assert smaller.state is RUNNING


@pytest.mark.parametrize("num_pages", range(6, 14))
@pytest.mark.parametrize("num_steps", range(1, 6))
@pytest.mark.parametrize("num_tokens", [3, 4, 5])
def test_a_newcomer_is_not_sent_back_at_once(num_pages, num_steps, num_tokens):
    world = World(num_pages=num_pages, page_size=4)
    world.add(4)
    world.add(8)
    world.steps(num_steps)
    newest = world.add(num_tokens)
    if world.step().prefill:
        world.step()
        assert newest.state is RUNNING


def test_a_prompt_that_leaves_no_room_for_a_token_is_a_bug():
    world = World()
    with pytest.raises(AssertionError, match="checked when the request was prepared"):
        world.scheduler.add(new_sequence(10, max_context=10))


def test_an_idle_scheduler_has_nothing_to_do():
    world = World()
    assert world.scheduler.is_idle
    assert world.step().is_empty


# I11: images that several sequences need

KEY, OTHER_KEY = Digest(b"key"), Digest(b"other key")


def test_who_waits_comes_back_in_order_when_the_filler_ends():
    prefills, (filler, first, second) = SharedPrefills(), [new_sequence() for _ in range(3)]
    prefills.begin(KEY, filler)
    assert prefills.is_filled(KEY)
    assert not prefills.is_filled(OTHER_KEY)
    prefills.park(KEY, first)
    prefills.park(KEY, second)
    assert list(prefills) == [first, second]
    assert len(prefills) == 2
    assert prefills.end(filler) == [first, second]
    assert not prefills.is_filled(KEY)
    assert prefills.end(filler) == []


def test_a_second_filler_of_one_key_ends_nothing():
    prefills, (filler, second) = SharedPrefills(), [new_sequence() for _ in range(2)]
    prefills.begin(KEY, filler)
    prefills.begin(KEY, second)
    assert prefills.end(second) == []
    assert prefills.is_filled(KEY)


def test_who_leaves_while_parked_does_not_come_back():
    prefills, (filler, parked) = SharedPrefills(), [new_sequence() for _ in range(2)]
    prefills.begin(KEY, filler)
    prefills.park(KEY, parked)
    prefills.remove(parked)
    assert prefills.end(filler) == []


def conversation(world, prompt=12, places=(1, 4, 9), image=3, crops=2, **how):
    """Positions: spans of [0, 4), [7, 10) and [15, 18) among 12 tokens, 21 in all."""
    return world.add(prompt, image, crops, image_places=places, **how)


def test_i3_a_chunk_ends_outside_of_every_span():
    world = World(page_size=2, prefill=4)
    sequence = conversation(world)
    assert sequence.spans == ((0, 4), (7, 10), (15, 18))
    chunks = [world.step().prefill[0][1:] for _ in range(6)]
    assert chunks == [(0, 4), (4, 7), (7, 11), (11, 15), (15, 19), (19, 21)]


def test_i3_only_a_chunk_that_begins_with_a_span_exceeds_the_limit_and_then_alone():
    world = World(page_size=2, prefill=2)
    conversation(world)
    other = world.add(2, generates=1)
    turns = [world.step() for _ in range(9)]
    chunks = [turn.prefill[0][1:] for turn in turns if turn.prefill]
    assert chunks == [(0, 4), (4, 6), (6, 7), (7, 10), (10, 12), (12, 14), (14, 15), (15, 18), (18, 20)]
    for turn in turns:
        num_tokens = sum(end - start for _, start, end in turn.prefill)
        assert num_tokens <= 2 or len(turn.prefill) == 1
    assert other in world.finished


def test_i3_a_step_takes_no_more_chunks_than_one_image_for_each_sequence_makes():
    world = World(page_size=2, batch=1)
    world.scheduler = Scheduler(
        world.pages, max_batch_size=1, max_prefill_tokens=100, max_crops_per_step=100, cuts_at_share_points=True
    )
    sequence = conversation(world)
    sequence.share_points = (4, 7, 10, 15, 18)
    chunks = []
    while sequence.state is PREFILLING or not chunks:
        turn = world.step()
        assert len(turn.prefill) <= 2
        chunks += [part[1:] for part in turn.prefill]
    assert chunks == [(0, 4), (4, 7), (7, 10), (10, 15), (15, 18), (18, 21)]


def test_i10_images_are_encoded_one_after_the_other_into_one_entry():
    world = World(page_size=2)
    sequence = conversation(world)
    turns = [world.step() for _ in range(3)]
    assert [turn.images for turn in turns] == [[image] for image in sequence.images]
    assert [turn.prefill[0][1:] for turn in turns] == [(0, 7), (7, 15), (15, 21)]
    assert sequence.state is RUNNING
    assert [image.entry for image in sequence.images] == [None] * 3, "others may use them"


def test_i6_an_isolation_run_takes_a_conversation_span_by_span():
    world = World(page_size=2)
    sequence = conversation(world, generates=5)
    world.steps(4)
    world.fail()
    turns = [world.step() for _ in range(4)]
    assert [turn.prefill[0][1:] for turn in turns[:3]] == [(0, 7), (7, 15), (15, sequence.length - 2)]
    assert turns[3].decode == [sequence]
    assert not world.scheduler.is_isolating


def test_i12_a_sequence_that_lacks_the_pixels_of_one_image_waits_without_those_of_the_others():
    world = World(page_size=2)
    sequence, other = conversation(world), world.add(3, generates=2)
    pixels, sequence.images[1].pixels, sequence.decode_job = sequence.images[0].pixels, None, "decode"
    turn = world.step()
    assert turn.members == [other]
    assert (sequence.state, sequence.cache.pages) == (PARKED, [])
    assert [image.pixels for image in sequence.images] == [None] * 3
    assert world.scheduler.take_without_pixels() == [sequence]
    world.scheduler.add_pixels(sequence, [pixels] * 3)
    assert sequence in world.step().members


@pytest.mark.parametrize("is_turn", [True, False])
def test_the_end_of_a_finished_answer_is_found_by_the_next_turn_of_its_conversation(is_turn):
    world, maker = World(page_size=4), PrefixKeyMaker({}, 4)
    image = ImageContent(1, 3, b"c" * 32)
    first = world.add(4, image=3, crops=2, generates=4)
    first.cache.keys, first.request.is_turn = maker.keys([*first.tokens], (image,)), is_turn
    world.steps(3)
    world.scheduler.finish(first)
    answer = first.tokens[:-1]
    end = len(answer) + 3
    assert end % 4, "inside a page"
    second = world.add([*answer, Token(7), Token(8)], image=3, crops=2)
    second.cache.keys = maker.keys([*second.tokens], (image,), answer_ends=(end,))
    start = world.scheduler.schedule(0.0).prefill.prefill[0].start
    assert start == (end if is_turn else end - end % 4)  # of other answers the full pages


# I14: crops in the pool


def with_crops(world, shown, scope=EVERYBODY):
    """A sequence whose image shows these crops."""
    sequence = world.add(4, image=3, crops=len(shown))
    (image,) = sequence.images
    image.crop_scope, image.pixels = scope, replace(image.pixels, digests=tuple(shown))
    return sequence


def world_with_pool(num_places=8, **settings):
    world = World(**settings)
    vars(world.scheduler)["_crops"] = CropCache(num_places)
    return world


def encoded(turn):
    return [item.crops for step in turn.steps for item in step.batch.encode]


def test_i14_found_crops_are_not_encoded_and_leave_the_places_of_a_step_to_others():
    world = world_with_pool(crops=2)
    world.add(4)
    world.step()  # so that the crops of a step are bounded
    first = with_crops(world, [b"a", b"b", b"c", b"d"])
    assert [encoded(world.step()), encoded(world.step())] == [[(0, 1)], [(2, 3)]]
    assert first.state is RUNNING
    second, third = with_crops(world, [b"a", b"x", b"c", b"d"]), with_crops(world, [b"y", b"c", b"b", b"a"])
    assert encoded(world.step()) == [(1,), (0,)]
    assert (second.state, third.state) == (RUNNING, RUNNING)
    assert encoded(world.step()) == []


def test_i14_an_image_whose_crops_are_all_found_is_complete_in_one_step():
    world = world_with_pool()
    with_crops(world, [b"a", b"b"])
    world.step()
    again = with_crops(world, [b"b", b"a"])
    (item,) = (item for step in world.step().steps for item in step.batch.encode)
    assert (item.crops, [crop for crop, _ in item.found], item.is_last) == ((), [0, 1], True)
    assert again.state is RUNNING


def test_i14_equal_crops_of_one_step_are_encoded_once():
    world = world_with_pool()
    with_crops(world, [b"a", b"a", b"b"])
    with_crops(world, [b"b", b"c", b"a"])
    assert encoded(world.step()) == [(0, 2), (1,)]


def test_i14_without_places_or_scope_all_crops_are_encoded():
    world = world_with_pool(1)
    for _ in range(2):
        with_crops(world, [b"a", b"a", b"b"])
        assert encoded(world.step()) == [(0, 2)]
        with_crops(world, [b"a", b"a", b"b"], scope=None)
        assert encoded(world.step()) == [(0, 1, 2)]
        with_crops(world, [b"c"])  # takes the place
        world.step()


class SlowDigests:
    """Crops whose digests are there once they were waited for."""

    def __init__(self, *shown):
        self.shown, self.num_crops, self.num_waits, self.are_there = shown, len(shown), 0, False

    def crop_digests(self, *, waits):
        self.num_waits += waits
        self.are_there = self.are_there or waits
        return self.shown if self.are_there else None


def test_i14_only_the_first_image_of_a_step_waits_for_its_digests_and_others_are_left_to_the_next():
    world = world_with_pool()
    for _ in range(2):
        with_crops(world, [b"a", b"b"])
        world.step()  # the second finds the crops of the first
    images = [SlowDigests(b"a", b"x"), SlowDigests(b"y", b"b")]
    for pixels in images:
        with_crops(world, pixels.shown).images[0].pixels = pixels
    assert (encoded(world.step()), [pixels.num_waits for pixels in images]) == ([(1,)], [1, 0])
    assert (encoded(world.step()), [pixels.num_waits for pixels in images]) == ([(0,)], [1, 1])


def test_i14_where_no_crop_has_come_again_no_image_waits():
    world = world_with_pool()
    images = [SlowDigests(b"a", b"x"), SlowDigests(b"y", b"b")]
    for pixels in images:
        with_crops(world, pixels.shown).images[0].pixels = pixels
    turn = world.begin()
    assert (encoded(turn), [pixels.num_waits for pixels in images]) == ([(0, 1), (0, 1)], [0, 0])
    world.end(turn)
    with_crops(world, [b"a", b"b"])
    assert encoded(world.step()) == [()], "they got their keys when the step was complete"
