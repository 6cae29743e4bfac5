"""A causal language model as the learner uses it: packed trajectories in, log-probabilities of their trainable tokens out.

In: a transformers causal LM. Out: a module whose forward pass takes one packed micro-batch. It is what the training engine wraps;
the model inside keeps its own parameter names under ``model.``.

Legend: T packed tokens, N trainable tokens.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from learner.attention import PackedLayout, use_packed_attention
from learner.logprobs import LogitTransform, LogprobHead


class PackedPolicy(nn.Module):
    """Log-probabilities and entropy of the tokens at given positions of packed trajectories.

    Args:
        model: a transformers causal LM; its attention and its output projection are replaced.
        temperature: sampling temperature of the behaviour policy; log-probabilities are of the distribution sampled from.
        attention: a backend of :mod:`learner.attention`, or ``auto``.
        chunk_tokens: tokens whose logits exist at a time; 0: all.
    """

    def __init__(self, model: Any, *, temperature: float = 1.0, attention: str = "auto", chunk_tokens: int = 2048) -> None:
        super().__init__()
        self.model = model
        self.attention = use_packed_attention(model, attention)
        self.transform = LogitTransform.of(model.config.get_text_config(), temperature)
        self.chunk_tokens = chunk_tokens
        LogprobHead.install(model)

    def forward(self, input_ids_T: Tensor, layout: PackedLayout, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the tokens at ``positions_N``, each given the tokens before it in its trajectory; and entropies.

        Args:
            input_ids_T: int64, trajectories one after the other.
            layout: their lengths, on the same device.
            positions_N: int64, where the trainable tokens lie in ``input_ids_T``; never the first token of a trajectory.

        Returns:
            ``(logprobs_N, entropy_N)``, float32 (float64 for a float64 model), nats.
        """
        decoder = self.model.get_decoder()
        hidden_Td = decoder(input_ids=input_ids_T[None], **layout.model_kwargs()).last_hidden_state[0]
        logprobs: tuple[Tensor, Tensor] = self.model.get_output_embeddings()(
            hidden_Td[positions_N - 1], input_ids_T[positions_N], self.transform, self.chunk_tokens
        )
        return logprobs
