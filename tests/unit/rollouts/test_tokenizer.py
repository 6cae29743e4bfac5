"""The real tokenizer behind the five calls: what counts as a control token, and what a chat template refuses."""

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from async_search_rl.errors import DataError
from async_search_rl.questions import Message
from rollouts.tokenizer import TransformersTokenizer, escape

TEMPLATE = (
    "{% for m in messages %}{% if m.role != 'user' %}{{ raise_exception('only user turns') }}{% endif %}{{ m.content }}{% endfor %}"
)


@pytest.fixture(scope="module")
def real():
    raw = RawTokenizer(WordLevel({"<unk>": 0, "<eos>": 1, "who": 2, "x": 3}, unk_token="<unk>"))
    raw.pre_tokenizer = WhitespaceSplit()
    raw.add_special_tokens([AddedToken("<eos>", special=True), AddedToken("<|header|>", special=True)])
    inner = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>")
    inner.chat_template = TEMPLATE
    return TransformersTokenizer(inner, "a folder")


def test_control_tokens_that_the_tokenizer_merely_adds_are_escaped_too(real):
    header = real.token_id("<|header|>")
    assert header in real.encode("who <|header|> x")
    assert {"<eos>", "<|header|>"} <= set(real.special_tokens)
    assert not {header, real.eos_id} & set(real.encode(escape("who <|header|> x <eos>", real.special_tokens)))


def test_messages_that_the_chat_template_refuses_are_a_fault_of_the_data(real):
    assert real.chat([Message("user", "who x")]) == [2, 3]
    with pytest.raises(DataError, match="only user turns"):
        real.chat([Message("system", "who x")])
