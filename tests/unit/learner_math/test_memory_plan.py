"""The memory plan: what each setting moves, and what cannot fit."""

import pytest

from async_search_rl.config.learner import LearnerSection
from async_search_rl.config.load import parse_config
from async_search_rl.errors import EngineError
from learner.flops import ModelShape
from learner.memory_plan import GIB, MemoryPlan, plan_memory, plan_of_run

QWEN_1_5B = ModelShape(
    layers=28,
    hidden=1536,
    heads=12,
    kv_heads=2,
    head_dim=128,
    vocab=151936,
    tied=True,
    active_per_layer=1536 * 128 * 28 + 3 * 1536 * 8960,
    stored_per_layer=1536 * 128 * 28 + 3 * 1536 * 8960,
    mlp_width=8960,
    windows=(None,) * 28,
)


def plan(learner: LearnerSection | None = None, **changes) -> MemoryPlan:
    arguments = {"dtype_bytes": 2, "ranks": 8, "longest_tokens": 4096} | changes
    return plan_memory(QWEN_1_5B, learner or LearnerSection(), **arguments)


def item(plan: MemoryPlan, name: str):
    return next(i for i in plan.items if i.name == name)


def test_zero_stages_divide_state_then_gradients_then_weights() -> None:
    parameters = QWEN_1_5B.parameters
    shares = {0: (1, 1, 1), 1: (1, 1, 8), 2: (1, 8, 8), 3: (8, 8, 8)}
    for stage, (weights, gradients, state) in shares.items():
        made = plan(LearnerSection(zero_stage=stage))
        assert item(made, "policy weights").device_bytes == parameters * 2 // weights
        assert item(made, "policy gradients").device_bytes == parameters * 2 // gradients
        assert item(made, "policy optimizer").device_bytes == parameters * 12 // state


def test_float32_needs_no_master_weights() -> None:
    assert item(plan(dtype_bytes=4), "policy optimizer").device_bytes == QWEN_1_5B.parameters * 8 // 8


def test_off_load_moves_state_to_the_host_or_the_drive() -> None:
    cpu = plan(LearnerSection(offload_optimizer="cpu", offload_params="cpu"))
    assert item(cpu, "policy optimizer").device_bytes == item(cpu, "policy weights").device_bytes == 0
    assert item(cpu, "policy gradients").host_bytes > 0
    nvme = plan(LearnerSection(offload_optimizer="nvme"))
    assert item(nvme, "policy optimizer").nvme_bytes == QWEN_1_5B.parameters * 12 // 8
    assert item(nvme, "policy optimizer").host_bytes == 0


def test_checkpointing_and_chunks_save_what_they_are_for() -> None:
    plain, saving = plan(), plan(LearnerSection(gradient_checkpointing=True))
    assert item(saving, "activations").device_bytes < 0.1 * item(plain, "activations").device_bytes
    whole, chunked = plan(LearnerSection(logits_chunk_tokens=0)), plan()
    assert item(whole, "logits").device_bytes > 16384 * 151936 * 10
    assert item(chunked, "logits").device_bytes < 0.25 * item(whole, "logits").device_bytes


def test_a_trajectory_over_the_budget_counts_at_its_length() -> None:
    assert item(plan(longest_tokens=65536), "activations").device_bytes == 4 * item(plan(), "activations").device_bytes


def test_critic_reference_and_buffers_are_counted() -> None:
    made = plan(critic=QWEN_1_5B, reference=QWEN_1_5B, buffers={"weight publication": (0, 5 * GIB)})
    assert item(made, "critic optimizer").device_bytes == item(made, "policy optimizer").device_bytes
    assert item(made, "reference weights").device_bytes == QWEN_1_5B.parameters * 2 // 8
    assert made.host_bytes == 5 * GIB
    elsewhere = plan(LearnerSection(offload_params="cpu"), reference=QWEN_1_5B)
    assert item(elsewhere, "reference weights").device_bytes == QWEN_1_5B.parameters * 2 // 8
    offloaded = plan(LearnerSection(offload_reference="cpu"), reference=QWEN_1_5B)
    assert item(offloaded, "reference weights").host_bytes == QWEN_1_5B.parameters * 2 // 8


def test_what_no_device_can_hold_whole_is_refused_however_many_ranks_share_it() -> None:
    made = plan(ranks=64)
    assert made.start_bytes == QWEN_1_5B.parameters * 2
    with pytest.raises(EngineError, match="one whole copy of the weights must fit"):
        made.check(made.start_bytes, 1000 * GIB)


def test_a_configuration_decides_which_models_are_counted() -> None:
    def names(tree: dict) -> set[str]:
        return {i.name for i in plan_of_run(parse_config(tree), QWEN_1_5B, ranks=8).items}

    assert "critic weights" not in names({})
    assert "critic weights" in names({"algorithm": {"advantage": "gae"}})
    assert "reference weights" in names({"algorithm": {"kl_coef": 0.1}})
    long = plan_of_run(parse_config({"rollout": {"max_context_tokens": 65536}}), QWEN_1_5B, ranks=8)
    assert item(long, "activations") == item(plan(longest_tokens=65536), "activations")
    assert long.items[0] == item(plan(), "policy weights")


def test_a_model_gathered_whole_counts_its_weights_and_two_gradients() -> None:
    made = plan(LearnerSection(gather_whole_below=QWEN_1_5B.parameters + 1))
    assert item(made, "policy gathered whole").device_bytes == QWEN_1_5B.parameters * (2 + 4 + 4)
    assert "policy gathered whole" not in {i.name for i in plan().items}
    offloaded = plan(LearnerSection(gather_whole_below=QWEN_1_5B.parameters + 1, offload_params="cpu"))
    assert "policy gathered whole" not in {i.name for i in offloaded.items}


def test_one_rank_gathers_nothing() -> None:
    assert not [i for i in plan(ranks=1).items if "gathered" in i.name]


def test_on_a_cpu_all_is_host_memory() -> None:
    assert plan(on_cpu=True).device_bytes == 0
    assert plan(on_cpu=True).host_bytes == plan().device_bytes + plan().host_bytes


def test_what_cannot_fit_is_refused_with_the_keys_that_help() -> None:
    made = plan()
    made.check(device_limit=2 * made.device_bytes, host_limit=0)
    with pytest.raises(EngineError, match=r"GiB of device memory a rank, got .* \(activations .*learner\.gradient_checkpointing"):
        made.check(device_limit=made.device_bytes, host_limit=0)
    with pytest.raises(EngineError, match="GiB of host memory"):
        plan(on_cpu=True).check(device_limit=0, host_limit=GIB)


def test_the_table_names_every_item_and_the_total() -> None:
    made = plan(critic=QWEN_1_5B)
    lines = made.table().splitlines()
    assert len(lines) == len(made.items) + 2
    assert lines[-1].split()[:2] == ["total", f"{made.device_bytes / GIB:.3f}"]
