"""Log-probabilities and entropy of chosen tokens without ever holding a [tokens, vocabulary] matrix whole.

In: hidden states of the positions that predict trainable tokens, and the vocabulary projection. Out: the log-probability of
each target and the entropy of each distribution. Logits exist for one chunk of tokens at a time, in the forward and in
the backward pass (which computes them again); what is kept between the two is two floats a token.

:class:`LogprobHead` takes the place of a model's output projection, keeps its name and its parameter, and so is gathered by
ZeRO-3's hooks like any other module. Called without targets it is the plain projection.

Legend: N tokens, C tokens of a chunk, V vocabulary, d hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from async_search_rl.errors import EngineError


@dataclass(frozen=True)
class LogitTransform:
    """Logits of the sampling distribution from the projection: ``softcap * tanh(x * scale / softcap) / temperature``."""

    scale: float = 1.0
    """Factor some models apply to their logits (Granite, Cohere)."""
    softcap: float = 0.0
    """Bound of the logits (Gemma); 0: none."""
    temperature: float = 1.0
    """Sampling temperature, > 0."""

    @classmethod
    def of(cls, config: Any, temperature: float = 1.0) -> LogitTransform:
        """What the model of this transformers configuration does to its logits."""
        scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
        return cls(scale, float(getattr(config, "final_logit_softcapping", None) or 0.0), temperature)

    def apply(self, logits: Tensor) -> Tensor:
        """Logits of the sampling distribution; overwrites its argument."""
        if self.softcap:
            logits.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap / self.temperature)
        elif self.scale != self.temperature:
            logits.mul_(self.scale / self.temperature)
        return logits

    def chain(self, gradient: Tensor, transformed: Tensor) -> Tensor:
        """Gradient with respect to the projection's output, from the one at ``transformed``; overwrites ``gradient``."""
        if self.softcap:
            gradient.mul_(1 - (transformed * (self.temperature / self.softcap)).square_())
        return gradient.mul_(self.scale / self.temperature) if self.scale != self.temperature else gradient


def chunked_logprobs(
    hidden_Nd: Tensor,
    weight_Vd: Tensor,
    targets_N: Tensor,
    *,
    bias_V: Tensor | None = None,
    transform: LogitTransform | None = None,
    chunk_tokens: int = 2048,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each distribution, both [N], differentiable, in nats.

    The projection runs in the dtype of its operands, everything after it in float32 (float64 for float64 operands).

    Args:
        hidden_Nd: hidden states, of the weight's dtype.
        weight_Vd: projection.
        targets_N: int64 token ids.
        bias_V: bias of the projection.
        transform: scale, cap and temperature of the logits; None: none of them.
        chunk_tokens: tokens whose logits exist at a time; 0: all.

    Returns:
        ``(logprobs_N, entropy_N)``, float32 (float64).
    """
    chunk = chunk_tokens or max(len(targets_N), 1)
    return _ChunkedLogprobs.apply(hidden_Nd, weight_Vd, bias_V, targets_N, transform or LogitTransform(), chunk)  # type: ignore[no-any-return,no-untyped-call]


class LogprobHead(nn.Linear):
    """An output projection that can give log-probabilities of targets instead of logits."""

    @classmethod
    def install(cls, model: Any) -> LogprobHead:
        """Put one in the place of ``model``'s output projection, with the same parameters (and the same name for them).

        Raises:
            EngineError: when the model has no linear output projection.
        """
        old = model.get_output_embeddings()
        if isinstance(old, cls):
            return old
        if not isinstance(old, nn.Linear):
            raise EngineError(f"the model must have a linear output projection, got {type(old).__name__}")
        head = cls(old.in_features, old.out_features, bias=old.bias is not None, device="meta")
        head.weight, head.bias = old.weight, old.bias
        model.set_output_embeddings(head)
        return head

    def forward(
        self,
        hidden_Nd: Tensor,
        targets_N: Tensor | None = None,
        transform: LogitTransform | None = None,
        chunk_tokens: int = 2048,
    ) -> Any:
        """Logits without targets; with them what :func:`chunked_logprobs` gives."""
        if targets_N is None:
            return super().forward(hidden_Nd)
        return chunked_logprobs(hidden_Nd, self.weight, targets_N, bias_V=self.bias, transform=transform, chunk_tokens=chunk_tokens)


def _logprobs_of(
    hidden_Cd: Tensor, weight_Vd: Tensor, bias_V: Tensor | None, transform: LogitTransform
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities [C, V], and the logits they come from where the backward pass needs those."""
    logits_CV = functional.linear(hidden_Cd, weight_Vd, bias_V)
    logits_CV = transform.apply(logits_CV.to(_compute_dtype(logits_CV.dtype)))
    kept_CV = logits_CV.clone() if transform.softcap else None
    return logits_CV.sub_(torch.logsumexp(logits_CV, dim=-1, keepdim=True)), kept_CV


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class _ChunkedLogprobs(torch.autograd.Function):
    """See :func:`chunked_logprobs`.

    With z the logits, p = softmax(z) and H the entropy: d logp_y / dz_j = [j = y] - p_j and dH / dz_j = -p_j (log p_j + H).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_Nd: Tensor,
        weight_Vd: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        transform: LogitTransform,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        dtype = _compute_dtype(torch.promote_types(hidden_Nd.dtype, weight_Vd.dtype))
        chosen_N = hidden_Nd.new_empty(len(targets_N), dtype=dtype)
        entropy_N = torch.empty_like(chosen_N)
        for start in range(0, len(targets_N), chunk):
            part = slice(start, start + chunk)
            logp_CV, _ = _logprobs_of(hidden_Nd[part], weight_Vd, bias_V, transform)
            chosen_N[part] = logp_CV.gather(-1, targets_N[part, None]).squeeze(-1)
            entropy_N[part] = -logp_CV.exp().mul_(logp_CV).sum(-1)
        ctx.save_for_backward(hidden_Nd, weight_Vd, bias_V, targets_N, entropy_N)
        ctx.transform, ctx.chunk = transform, chunk
        ctx.set_materialize_grads(False)
        return chosen_N, entropy_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_chosen_N, grad_entropy_N = gradients
        hidden_Nd, weight_Vd, bias_V, targets_N, entropy_N = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden_Nd = torch.zeros_like(hidden_Nd) if needs_hidden else None
        # Summed in float32: adding many chunks in bfloat16 would lose what a single product keeps.
        grad_weight_Vd = torch.zeros_like(weight_Vd, dtype=entropy_N.dtype) if needs_weight else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=entropy_N.dtype) if needs_bias else None
        none_given = grad_chosen_N is None and grad_entropy_N is None
        for start in range(0, 0 if none_given else len(targets_N), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            logp_CV, logits_CV = _logprobs_of(hidden_Nd[part], weight_Vd, bias_V, ctx.transform)
            grad_CV = _logit_gradient(
                logp_CV,
                targets_N[part],
                None if grad_chosen_N is None else grad_chosen_N[part],
                None if grad_entropy_N is None else grad_entropy_N[part],
                entropy_N[part],
            )
            grad_CV = ctx.transform.chain(grad_CV, logits_CV if logits_CV is not None else grad_CV)
            if grad_bias_V is not None:
                grad_bias_V += grad_CV.sum(0)
            grad_CV = grad_CV.to(weight_Vd.dtype)
            if grad_hidden_Nd is not None:
                grad_hidden_Nd[part] = (grad_CV @ weight_Vd).to(hidden_Nd.dtype)
            if grad_weight_Vd is not None:
                grad_weight_Vd += grad_CV.T @ hidden_Nd[part].to(weight_Vd.dtype)
        return (
            grad_hidden_Nd,
            None if grad_weight_Vd is None else grad_weight_Vd.to(weight_Vd.dtype),
            None if grad_bias_V is None else grad_bias_V.to(bias_V.dtype),
            None,
            None,
            None,
        )


def _logit_gradient(
    logp_CV: Tensor, targets_C: Tensor, grad_chosen_C: Tensor | None, grad_entropy_C: Tensor | None, entropy_C: Tensor
) -> Tensor:
    """Gradient at the transformed logits [C, V]; overwrites ``logp_CV``."""
    factor_CV: Tensor | None = None
    if grad_entropy_C is not None:
        factor_CV = (logp_CV + entropy_C[:, None]).mul_(-grad_entropy_C[:, None])
    gradient_CV = logp_CV.exp_()
    if factor_CV is None:
        gradient_CV.mul_(-grad_chosen_C[:, None])  # type: ignore[index]
    else:
        gradient_CV.mul_(factor_CV if grad_chosen_C is None else factor_CV.sub_(grad_chosen_C[:, None]))
    if grad_chosen_C is not None:
        gradient_CV.scatter_add_(-1, targets_C[:, None], grad_chosen_C[:, None])
    return gradient_CV
