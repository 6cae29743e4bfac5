"""FLOPs counted one operation at a time, and the device table."""

from types import SimpleNamespace

import pytest

from learner.flops import ModelShape, forward_flops, peak_flops, training_flops


def config(**changes) -> SimpleNamespace:
    values = {
        "model_type": "llama",
        "hidden_size": 8,
        "intermediate_size": 20,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 50,
        "tie_word_embeddings": False,
    } | changes
    made = SimpleNamespace(**values)
    made.get_text_config = lambda: made
    return made


def slow_forward(c: SimpleNamespace, lengths: list[int], head_tokens: int, window: int | None = None) -> int:
    head_dim = c.hidden_size // c.num_attention_heads
    total = 0
    for length in lengths:
        for _ in range(c.num_hidden_layers):
            for query in range(length):
                matrices = [(c.hidden_size, c.num_attention_heads * head_dim)] * 2 + [
                    (c.hidden_size, c.num_key_value_heads * head_dim)
                ] * 2
                matrices += [(c.hidden_size, c.intermediate_size)] * 3
                total += sum(2 * rows * columns for rows, columns in matrices)
                seen = [key for key in range(query + 1) if window is None or query - key < window]
                total += len(seen) * c.num_attention_heads * 2 * (2 * head_dim)
    return total + head_tokens * 2 * c.hidden_size * c.vocab_size


def test_forward_and_training_operations_are_counted() -> None:
    c, lengths = config(), [5, 1, 9]
    shape = ModelShape.of(c)
    assert forward_flops(shape, lengths) == slow_forward(c, lengths, 15)
    assert forward_flops(shape, lengths, head_tokens=4) == slow_forward(c, lengths, 4)
    assert training_flops(shape, lengths, head_tokens=4) == 3 * slow_forward(c, lengths, 4)


def test_a_sliding_window_bounds_the_attention() -> None:
    c = config(sliding_window=3)
    assert forward_flops(ModelShape.of(c), [9]) == slow_forward(c, [9], 9, window=3)
    mixed = ModelShape.of(config(sliding_window=3, layer_types=["full_attention", "sliding_attention", "full_attention"]))
    assert mixed.windows == (None, 3, None)
    assert ModelShape.of(config(sliding_window=3, use_sliding_window=False)).windows == (None, None, None)


def test_a_mixture_of_experts_computes_less_than_it_stores() -> None:
    shape = ModelShape.of(
        config(
            model_type="qwen3_moe",
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=10,
            shared_expert_intermediate_size=5,
        )
    )
    attention, expert = 8 * 2 * 12, 3 * 8 * 10
    assert shape.active_per_layer == attention + 8 * 8 + 3 * 8 * 5 + 2 * expert
    assert shape.stored_per_layer - shape.active_per_layer == 6 * expert
    assert shape.mlp_width == 25
    assert shape.qk_norm


def test_older_models_have_two_matrices_and_as_many_key_value_heads() -> None:
    c = config(model_type="gpt2", intermediate_size=None)
    del c.num_key_value_heads
    shape = ModelShape.of(c)
    assert (shape.kv_heads, shape.mlp_width) == (4, 32)
    assert shape.active_per_layer == 4 * 8 * 8 + 2 * 8 * 32


def test_tied_embeddings_are_stored_once() -> None:
    assert ModelShape.of(config()).parameters - ModelShape.of(config(tie_word_embeddings=True)).parameters == 8 * 50


def test_attention_costs_as_much_as_the_projections_at_quadratic_tokens() -> None:
    shape = ModelShape.of(config(intermediate_size=4000))
    length = shape.quadratic_tokens
    projections = 2 * shape.layers * shape.active_per_layer * length
    attention = forward_flops(shape, [length], head_tokens=0) - projections
    assert attention == pytest.approx(projections, rel=0.01)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756.5e12),
        ("NVIDIA H100 NVL", 835.5e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362.1e12),
        ("NVIDIA L4", 121e12),
        ("Intel Xeon", None),
        ("NVIDIA Z9", None),
    ],
)
def test_known_devices_have_a_peak_and_others_none(name: str, peak: float | None) -> None:
    assert peak_flops(name) == peak
    assert peak_flops(name, "float32") is None
