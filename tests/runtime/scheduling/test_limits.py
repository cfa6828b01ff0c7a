from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.scheduling.limits import StepBounds


def test_a_gpu_takes_more_in_a_step_than_a_cpu():
    cpu, gpu = (StepBounds.of(EngineConfig(), device) for device in ("cpu", "cuda"))
    assert cpu == StepBounds(16, 1024, 4, 64, shares_prefixes=True, cuts_at_share_points=True)
    assert gpu == StepBounds(64, 8192, 72, shares_prefixes=True)


def test_prompts_are_cut_where_answers_with_and_without_the_cache_are_compared_exactly():
    assert StepBounds.of(EngineConfig(dtype="float32"), "cuda").cuts_at_share_points
    assert not StepBounds.of(EngineConfig(dtype="bfloat16"), "cuda").cuts_at_share_points
    assert StepBounds.of(EngineConfig(dtype="bfloat16"), "cpu").cuts_at_share_points
    assert not StepBounds.of(EngineConfig(prefix_cache=False), "cpu").cuts_at_share_points


def test_what_is_configured_holds_on_every_device():
    config = EngineConfig(max_batch_size=3, max_prefill_tokens=100, max_crops_per_step=2, prefix_cache=False)
    assert StepBounds.of(config, "cpu") == StepBounds(3, 100, 2, 6)
    assert StepBounds.of(config, "cuda") == StepBounds(3, 100, 2)


def test_a_gpu_with_little_memory_beside_the_weights_takes_less_in_a_step():
    def defaults(gib):
        bounds = StepBounds.of(EngineConfig(), "cuda", gib * 2**30)
        return bounds.max_batch_size, bounds.max_prefill_tokens, bounds.max_crops

    assert defaults(12) == (64, 8192, 72)
    assert defaults(11.9) == defaults(6) == (32, 4096, 36)
    assert defaults(5.9) == (16, 2048, 18)
    assert StepBounds.of(EngineConfig(max_batch_size=40), "cuda", 2**30).max_batch_size == 40
    assert StepBounds.of(EngineConfig(), "cpu", 2**30) == StepBounds.of(EngineConfig(), "cpu")
