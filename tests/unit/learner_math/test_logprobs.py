"""Chunked log-probabilities against the whole softmax: values, gradients, memory."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from async_search_rl.errors import EngineError
from learner.logprobs import LogitTransform, LogprobHead, chunked_logprobs

TRANSFORMS = [LogitTransform(), LogitTransform(temperature=0.7), LogitTransform(scale=0.5, softcap=3.0, temperature=1.3)]


def case(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(7, 5, dtype=dtype), torch.randn(11, 5, dtype=dtype), torch.randint(0, 11, (7,)), torch.randn(11, dtype=dtype)


def whole(hidden, weight, targets, bias, transform: LogitTransform) -> tuple[torch.Tensor, torch.Tensor]:
    logits = (hidden @ weight.T + bias) * transform.scale
    if transform.softcap:
        logits = transform.softcap * torch.tanh(logits / transform.softcap)
    distribution = torch.distributions.Categorical(logits=logits / transform.temperature)
    return distribution.log_prob(targets), distribution.entropy()


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("chunk", [0, 1, 3, 100])
def test_values_equal_the_whole_softmax(transform: LogitTransform, chunk: int) -> None:
    hidden, weight, targets, bias = case()
    got = chunked_logprobs(hidden, weight, targets, bias_V=bias, transform=transform, chunk_tokens=chunk)
    torch.testing.assert_close(got, whole(hidden, weight, targets, bias, transform))


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("outputs", [(0,), (1,), (0, 1)])
def test_gradients_equal_finite_differences(transform: LogitTransform, outputs: tuple[int, ...]) -> None:
    hidden, weight, targets, bias = case()

    def compute(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        both = chunked_logprobs(inputs[0], inputs[1], targets, bias_V=inputs[2], transform=transform, chunk_tokens=3)
        return tuple(both[i] for i in outputs)

    assert torch.autograd.gradcheck(compute, tuple(x.requires_grad_(True) for x in (hidden, weight, bias)))


def test_bfloat16_operands_give_float32_log_probabilities_and_bfloat16_gradients() -> None:
    hidden, weight, targets, bias = case(torch.float32)
    half = [x.to(torch.bfloat16).requires_grad_(True) for x in (hidden, weight)]
    logprobs, entropy = chunked_logprobs(*half, targets, chunk_tokens=2)
    reference = whole(half[0].float(), half[1].float(), targets, 0 * bias, LogitTransform())
    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close((logprobs, entropy), reference, atol=0.05, rtol=0.02)
    (logprobs.sum() + entropy.sum()).backward()
    assert [x.grad.dtype for x in half] == [torch.bfloat16, torch.bfloat16]


def test_frozen_hidden_states_still_train_the_projection() -> None:
    hidden, weight, targets, bias = case()
    chunked_logprobs(hidden, weight.requires_grad_(True), targets, chunk_tokens=2)[0].sum().backward()
    again = weight.detach().clone().requires_grad_(True)
    whole(hidden, again, targets, 0 * bias, LogitTransform())[0].sum().backward()
    torch.testing.assert_close(weight.grad, again.grad)


def test_the_transform_is_read_from_the_models_configuration() -> None:
    gemma, granite = SimpleNamespace(final_logit_softcapping=30.0), SimpleNamespace(logits_scaling=8.0)
    assert LogitTransform.of(gemma, 0.5) == LogitTransform(softcap=30.0, temperature=0.5)
    assert LogitTransform.of(granite) == LogitTransform(scale=0.125)
    assert LogitTransform.of(SimpleNamespace(logit_scale=0.0625)) == LogitTransform(scale=0.0625)
    assert LogitTransform.of(SimpleNamespace()) == LogitTransform()


def test_no_tokens_give_gradients_of_zero() -> None:
    hidden, weight, _, _ = case()
    weight.requires_grad_(True)
    logprobs, entropy = chunked_logprobs(hidden[:0].requires_grad_(True), weight, torch.zeros(0, dtype=torch.int64))
    (logprobs.sum() + entropy.sum()).backward()
    assert logprobs.shape == (0,)
    assert not weight.grad.any()


def test_logits_are_never_whole_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    linear = nn.functional.linear

    def watched(*args: torch.Tensor) -> torch.Tensor:
        logits = linear(*args)
        seen.append(logits.shape[0])
        return logits

    monkeypatch.setattr(nn.functional, "linear", watched)
    hidden, weight, targets, _ = case()
    logprobs, _ = chunked_logprobs(hidden.requires_grad_(True), weight, targets, chunk_tokens=3)
    logprobs.sum().backward()
    assert seen == [3, 3, 1, 3, 3, 1]


class Model(nn.Module):
    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.lm_head = head

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, head: nn.Module) -> None:
        self.lm_head = head


def test_the_head_takes_the_projections_place_with_its_parameters() -> None:
    model = Model(nn.Linear(5, 11))
    weight, names = model.lm_head.weight, list(model.state_dict())
    head = LogprobHead.install(model)
    assert model.lm_head is head
    assert LogprobHead.install(model) is head
    assert head.weight is weight
    assert list(model.state_dict()) == names
    hidden = torch.randn(3, 5)
    torch.testing.assert_close(head(hidden), hidden @ weight.T + head.bias)
    targets = torch.tensor([1, 2, 3])
    expected = whole(hidden, weight, targets, head.bias, LogitTransform())
    torch.testing.assert_close(head(hidden, targets, LogitTransform(), 2), expected)


def test_a_head_that_is_not_linear_is_refused() -> None:
    with pytest.raises(EngineError, match="linear output projection, got Identity"):
        LogprobHead.install(Model(nn.Identity()))
