"""The parser on the demo policy's own vocabulary, where each tag is one token."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer

from rollouts.protocol import SpecialActions, TextActions, read_action

FILE = Path(__file__).resolve().parents[3] / "assets" / "tiny_policy" / "tokenizer.json"
CLOSING = ("</search>", "</answer>")


class Tiny:
    special_tokens = ()

    def __init__(self):
        self.raw = RawTokenizer.from_file(str(FILE))
        self.size = self.raw.get_vocab_size()

    def encode(self, text):
        return self.raw.encode(text, add_special_tokens=False).ids

    def decode(self, ids):
        return self.raw.decode(list(ids), skip_special_tokens=False)

    def token_id(self, text):
        return self.raw.token_to_id(text)


TINY = Tiny()
TAG_IDS = [TINY.token_id(tag) for tag in ("<search>", "</search>", "<answer>", "</answer>", "<information>")]


def test_tags_are_single_tokens():
    assert all(tag is not None for tag in TAG_IDS)
    assert TINY.encode("</search>") == [TINY.token_id("</search>")]


@given(st.lists(st.sampled_from(TAG_IDS) | st.integers(0, TINY.size - 1), max_size=30))
def test_special_actions_end_at_the_first_closing_token(ids):
    turn = SpecialActions(TINY).parse(ids)
    closing = [TINY.token_id(tag) for tag in CLOSING]
    expected = next((n for n, token in enumerate(ids, start=1) if token in closing), None)
    assert (turn.length if turn.complete else None) == expected
    assert (turn.kind, turn.content) == read_action(TINY.decode(ids[: turn.length])) or "<" in turn.content


@given(st.lists(st.sampled_from(TAG_IDS) | st.integers(0, TINY.size - 1), max_size=30))
def test_text_actions_end_where_the_text_first_holds_a_closing_tag(ids):
    turn = TextActions(TINY).parse(ids)
    expected = next((n for n in range(1, len(ids) + 1) if any(tag in TINY.decode(ids[:n]) for tag in CLOSING)), None)
    assert (turn.length if turn.complete else None) == expected
