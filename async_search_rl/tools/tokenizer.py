"""The demo's tokenizer: byte-level BPE of a few thousand tokens in which each tag is one token.

In: texts. Out: a folder that `transformers.AutoTokenizer` reads, with a chat template. Words carry their leading blank
(` Paris`), so a name has the same tokens in a question, a query, a passage and an answer, and can be copied token by token.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SPECIAL_TOKENS = (
    "<pad>",
    "<s>",
    "</s>",
    "<|user|>",
    "<|assistant|>",
    "<think>",
    "</think>",
    "<search>",
    "</search>",
    "<information>",
    "</information>",
    "<answer>",
    "</answer>",
)
"""Ids 0 to 12 in this order."""

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}<|user|> {{ m['content'] }}"
    "{% else %}<|assistant|>{{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""One question becomes `<s><|user|> question<|assistant|>`."""

_PIECES = r" ?\d{1,2}| ?[\p{L}\p{M}]+| ?[^\s\p{L}\p{N}]|\s+"
"""Pre-tokens: two digits, a word, or one other character, each with its blank."""


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Any:
    """A `tokenizers.Tokenizer` of ``vocabulary`` tokens trained on ``texts``; the same texts give the same tokenizer."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_PIECES), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write ``tokenizer`` with its configuration and chat template into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "additional_special_tokens": list(SPECIAL_TOKENS[3:]),
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
