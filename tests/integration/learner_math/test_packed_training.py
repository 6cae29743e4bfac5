"""Packed training against one trajectory at a time, with real transformers models: log-probabilities, losses, gradients."""

import copy

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from async_search_rl.config.learner import AlgorithmSection, LearnerSection
from async_search_rl.errors import EngineError
from learner.attention import PackedLayout, use_packed_attention
from learner.flops import ModelShape
from learner.losses import TokenBatch, loss_weights, policy_loss
from learner.memory_plan import activation_bytes, plan_memory
from learner.packing import pack
from learner.policy import PackedPolicy

pytestmark = pytest.mark.integration

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
LENGTHS = [9, 14, 5, 22, 7, 11]
TEMPERATURE = 0.8


def tiny(kind: str):
    torch.manual_seed(0)
    models = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
        "llama_tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),
        "mistral_window": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=5)),
        "gemma2": lambda: Gemma2ForCausalLM(
            Gemma2Config(**SIZES, attn_logit_softcapping=None, final_logit_softcapping=5.0, sliding_window=5)
        ),
    }
    return models[kind]()


class Data:
    """Six trajectories with masks, advantages and behaviour log-probabilities."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.ids = [torch.tensor(rng.integers(0, 64, length)) for length in LENGTHS]
        self.masks = [np.arange(length) >= 2 for length in LENGTHS]
        for mask in self.masks:
            mask[3] = False
        self.tokens = np.array([mask.sum() for mask in self.masks])
        self.advantages = rng.standard_normal(len(LENGTHS))
        self.behaviour = [-4.0 + 0.3 * rng.standard_normal(n) for n in self.tokens]


def micro_batch_loss(policy: PackedPolicy, data: Data, members: list[int], a: AlgorithmSection) -> torch.Tensor:
    """The packed loss of some of the trajectories, divided by the denominator of all."""
    weights_S, denominator = loss_weights(data.tokens, np.ones(len(LENGTHS), bool), a)
    layout = PackedLayout.of([LENGTHS[i] for i in members])
    positions = torch.tensor(np.flatnonzero(np.concatenate([data.masks[i] for i in members])))
    logprobs, entropy = policy(torch.cat([data.ids[i] for i in members]), layout, positions)
    counts = data.tokens[members]

    def tensor(values: np.ndarray) -> torch.Tensor:
        return torch.tensor(values, dtype=logprobs.dtype)

    batch = TokenBatch(
        current_N=logprobs,
        behaviour_N=tensor(np.concatenate([data.behaviour[i] for i in members])),
        advantages_N=tensor(np.repeat(data.advantages[members], counts)),
        sequence_N=torch.repeat_interleave(torch.arange(len(members)), torch.tensor(counts)),
        sequences=len(members),
        weights_N=tensor(np.repeat(weights_S[members], counts)),
        entropy_N=entropy,
    )
    return policy_loss(batch, a).loss / denominator


def unpacked_loss(model, data: Data, a: AlgorithmSection) -> torch.Tensor:
    """The same with the model's own attention and whole logits, one trajectory at a time; TIS at sequence level, one mini-batch."""
    total = torch.zeros(())
    for i, ids in enumerate(data.ids):
        logits = model(ids[None], use_cache=False).logits[0, :-1] / TEMPERATURE
        logp = functional.log_softmax(logits, -1)
        mask = torch.tensor(data.masks[i][1:])
        current = logp.gather(-1, ids[1:, None])[:, 0][mask]
        entropy = -(logp.exp() * logp).sum(-1)[mask]
        weight = (current.detach() - torch.tensor(data.behaviour[i])).sum().exp().clamp(max=a.correction_high)
        objective = weight * data.advantages[i] * (current - current.detach()).exp() + a.entropy_coef * entropy
        total = total - objective.float().sum()
    return total / data.tokens.sum()


ALGORITHM = AlgorithmSection(loss="ppo", correction="tis", correction_level="sequence", entropy_coef=0.01)


@pytest.mark.parametrize("kind", ["llama", "llama_tied", "qwen3", "mistral_window", "gemma2"])
@pytest.mark.parametrize("backend", ["auto", "sdpa"])
def test_packed_and_unpacked_training_give_equal_losses_and_gradients(kind: str, backend: str) -> None:
    data, model = Data(), tiny(kind)
    reference = copy.deepcopy(model)
    loss = unpacked_loss(reference, data, ALGORITHM)
    loss.backward()
    policy = PackedPolicy(model, temperature=TEMPERATURE, attention=backend, chunk_tokens=16)
    packed = micro_batch_loss(policy, data, list(range(len(LENGTHS))), ALGORITHM)
    packed.backward()
    torch.testing.assert_close(packed, loss, atol=1e-5, rtol=0)
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, atol=1e-5, rtol=0, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_and_micro_batches_add_up_to_the_gradient_of_all(aggregation: str, ranks: int) -> None:
    a = AlgorithmSection(loss="ppo", correction="mis", correction_level="geometric", aggregation=aggregation)
    data, policy = Data(), PackedPolicy(tiny("llama"), temperature=TEMPERATURE)
    micro_batch_loss(policy, data, list(range(len(LENGTHS))), a).backward()
    whole = [parameter.grad.clone() for parameter in policy.parameters()]
    policy.zero_grad()
    plan = pack(LENGTHS, 30, ranks)
    for rank in plan.ranks:
        for members in rank:
            micro_batch_loss(policy, data, members, a).backward()
    assert plan.micro_batches * ranks > 1
    for parameter, expected in zip(policy.parameters(), whole, strict=True):
        torch.testing.assert_close(parameter.grad, expected, atol=1e-6, rtol=0)


def test_gradient_checkpointing_changes_nothing() -> None:
    data, policy = Data(), PackedPolicy(tiny("llama"))
    micro_batch_loss(policy, data, [0, 1, 2], ALGORITHM).backward()
    plain = [parameter.grad.clone() for parameter in policy.parameters()]
    policy.zero_grad()
    policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy.train()
    micro_batch_loss(policy, data, [0, 1, 2], ALGORITHM).backward()
    for parameter, expected in zip(policy.parameters(), plain, strict=True):
        torch.testing.assert_close(parameter.grad, expected, atol=1e-7, rtol=0)


def test_a_model_called_without_its_layout_is_refused() -> None:
    policy = PackedPolicy(tiny("llama"))
    with pytest.raises(EngineError, match="model_kwargs"):
        policy.model(torch.zeros(1, 4, dtype=torch.int64))


def test_models_that_pass_state_along_the_tokens_are_refused() -> None:
    model = tiny("llama")
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(EngineError, match=r"full or sliding attention only, got \['linear_attention'\]"):
        use_packed_attention(model)


@pytest.mark.parametrize("kind", ["llama", "llama_tied", "qwen3", "mistral_window"])
def test_the_shape_counts_the_models_matrices(kind: str) -> None:
    model = tiny(kind)
    shape = ModelShape.of(model.config)
    assert shape.parameters == sum(p.numel() for p in model.parameters() if p.ndim == 2)
    assert shape.windows == ((5, 5) if kind == "mistral_window" else (None, None))


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_planned_activations_are_those_the_backward_pass_keeps(kind: str, dtype: torch.dtype) -> None:
    model = tiny(kind).to(dtype)
    use_packed_attention(model)
    layout, weights = PackedLayout.of([40, 60]), {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, tuple[int, torch.Tensor]] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = (tensor.untyped_storage().nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.model(input_ids=torch.zeros(1, 100, dtype=torch.int64), **layout.model_kwargs())
    measured = sum(size for size, _ in kept.values())
    planned = activation_bytes(ModelShape.of(model.config), 100, dtype.itemsize, checkpointing=False)
    assert 0.85 * measured <= planned <= 1.35 * measured


def test_a_plan_of_a_real_model_fits_and_names_its_parts() -> None:
    plan = plan_memory(
        ModelShape.of(tiny("llama").config), LearnerSection(micro_batch_tokens=64), dtype_bytes=4, ranks=2, longest_tokens=128
    )
    plan.check(device_limit=1 << 30, host_limit=1 << 30)
    assert {item.name for item in plan.items} >= {"policy weights", "policy optimizer", "activations", "logits"}
