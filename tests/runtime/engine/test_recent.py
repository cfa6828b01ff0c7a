"""Prompts are made once for each namespace, and depend on every field of a request that may change them."""

from dataclasses import dataclass, field
from typing import Any

from kestrel_runtime.api.requests import PointRef, Query, RequestOptions, SamplingParams
from kestrel_runtime.engine.recent import LruCache, Prompts
from kestrel_runtime.models.family import Prompt, config_of
from kestrel_runtime.models.loaded_model import LoadedModel

QUESTION = Query("Who?", b"an image")


@dataclass
class CountingSkill:
    """A skill of another one, which notes what is asked of it."""

    skill: Any
    asked: list[Query] = field(default_factory=list)

    def prompt(self, request: Query, tokenizer: Any, config: Any) -> Prompt:
        self.asked.append(request)
        return self.skill.prompt(request, tokenizer, config)


def new_prompts(loaded: LoadedModel) -> tuple[Prompts, CountingSkill]:
    config = config_of(loaded.model)
    skill: Any = CountingSkill(loaded.family.skills(config)["query"])
    return Prompts(config, {"query": skill}, loaded.tokenizer), skill


def test_a_prompt_that_came_before_is_not_made_again(loaded: LoadedModel):
    prompts, skill = new_prompts(loaded)
    first = prompts.of(QUESTION, "")
    again = prompts.of(Query("Who?", b"another image", sampling=SamplingParams(seed=1)), "")
    assert len(skill.asked) == 1
    assert again == first


def test_each_field_that_may_change_a_prompt_makes_another(loaded: LoadedModel):
    prompts, skill = new_prompts(loaded)
    others = [
        QUESTION,
        Query("Who", b"an image"),
        Query("Who?", b"an image", reasoning=True),
        Query("Who?", b"an image", spatial_refs=(PointRef(0.5, 0.5),)),
        Query("Who?", b"an image", spatial_refs=(PointRef(0.5, 0.25),)),
    ]
    made = [prompts.of(request, "") for request in (*others, *others)]
    assert skill.asked == others
    assert made[:5] == made[5:]
    fresh = [new_prompts(loaded)[0].of(request, "") for request in others]
    assert made[:5] == fresh


def test_another_namespace_does_not_see_what_was_asked(loaded: LoadedModel):
    prompts, skill = new_prompts(loaded)
    for namespace in ("", "a", "b", "a"):
        prompts.of(QUESTION, namespace)
    assert len(skill.asked) == 3


def test_long_prompts_are_not_kept(loaded: LoadedModel):
    prompts, skill = new_prompts(loaded)
    long = Query("word " * 500, options=RequestOptions())
    assert prompts.of(long, "") == prompts.of(long, "")
    assert len(skill.asked) == 2


def test_the_value_that_was_not_used_for_the_longest_time_leaves_first():
    values: LruCache[str, int] = LruCache(2)
    values.put("a", 1)
    values.put("b", 2)
    assert values.get("a") == 1
    values.put("c", 3)
    assert [values.get(key) for key in "abc"] == [1, None, 3]


def test_a_value_that_is_put_again_replaces_the_first_and_takes_no_other_place():
    values: LruCache[str, int] = LruCache(2)
    for value in (1, 2, 3):
        values.put("a", value)
    values.put("b", 4)
    assert (values.get("a"), values.get("b")) == (3, 4)
