import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from async_search_rl.errors import ConfigError
from rollouts.protocol import SpecialActions, TextActions, make_actions, read_action

TAGS = ("</search>", "</answer>")
FRAGMENTS = [
    "<search>",
    "</search>",
    "<answer>",
    "</answer>",
    "</sea",
    "rch>",
    "</",
    "<",
    ">",
    "é",
    "🙂",
    "x",
    " ",
    "</information>",
    "\n",
]


class ByteLevel:
    """A real byte-level BPE vocabulary, small enough that every tag is split over several tokens in more than one way."""

    special_tokens: tuple[str, ...] = ()
    eos_id = None

    def __init__(self) -> None:
        self.raw = RawTokenizer(models.BPE())
        self.raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self.raw.decoder = decoders.ByteLevel()
        corpus = ["</sea", "arch> x", "</ans", "swer>", "<search> q </search>\n", "r>y"] * 4
        trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
        self.raw.train_from_iterator(corpus, trainer)
        self.size = self.raw.get_vocab_size()

    def encode(self, text):
        return self.raw.encode(text).ids

    def decode(self, ids):
        return self.raw.decode(list(ids), skip_special_tokens=False)

    def token_id(self, text):
        return self.raw.token_to_id(text)


BYTE_LEVEL = ByteLevel()


def first_complete(decode, ids):
    """Slow definition: the fewest tokens whose text holds a complete closing tag."""
    return next((n for n in range(1, len(ids) + 1) if any(tag in decode(ids[:n]) for tag in TAGS)), None)


@given(st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join))
def test_encoded_text_is_cut_at_the_first_complete_tag(text):
    ids = BYTE_LEVEL.encode(text)
    turn = TextActions(BYTE_LEVEL).parse(ids)
    expected = first_complete(BYTE_LEVEL.decode, ids)
    assert turn.complete == (expected is not None)
    assert turn.length == (expected or len(ids))


@given(
    st.lists(st.integers(0, BYTE_LEVEL.size - 1), max_size=40), st.sampled_from(TAGS), st.lists(st.integers(0, BYTE_LEVEL.size - 1))
)
def test_any_ids_are_cut_at_the_first_complete_tag(before, tag, after):
    ids = before + BYTE_LEVEL.encode(tag) + after
    turn = TextActions(BYTE_LEVEL).parse(ids)
    assert turn.length == first_complete(BYTE_LEVEL.decode, ids)
    assert any(tag in turn.text for tag in TAGS)
    assert BYTE_LEVEL.decode(ids[: turn.length]) == turn.text


@given(st.data())
def test_pieces_and_bytes_in_any_order(tokenizer_data):
    decode = BYTE_LEVEL.decode
    ids = tokenizer_data.draw(
        st.lists(st.sampled_from([BYTE_LEVEL.encode(f)[0] for f in FRAGMENTS] + list(range(20))), max_size=60)
    )
    turn = TextActions(BYTE_LEVEL).parse(ids)
    assert (turn.length if turn.complete else None) == first_complete(decode, ids)


def test_the_last_token_stays_whole_where_it_runs_past_the_tag(tokenizer):
    ids = [
        *tokenizer.encode("<search> query"),
        tokenizer.token_id("</"),
        tokenizer.token_id("sea"),
        *tokenizer.encode("rch"),
        tokenizer.token_id("> x"),
    ]
    turn = TextActions(tokenizer).parse([*ids, *tokenizer.encode("more")])
    assert turn.length == len(ids)
    assert turn.text.endswith("</search> x")
    assert (turn.kind, turn.content) == ("search", "query")


def test_a_broken_character_before_the_tag_does_not_hide_it(tokenizer):
    ids = [0xE2, 0x82, *tokenizer.encode("<answer> Paris</answer>"), 0xAC]
    turn = TextActions(tokenizer).parse(ids)
    assert turn.length == len(ids) - 1
    assert (turn.kind, turn.content) == ("answer", "Paris")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<search> who </search>", ("search", "who")),
        ("<think>a</think><answer>42</answer>", ("answer", "42")),
        ("who </search>", (None, "")),
        ("<answer> who </search>", (None, "")),
        ("<search></search>", (None, "")),
        ("<search> \n </search>", (None, "")),
        ("I use <search> as told: <search> who </search>", ("search", "who")),
        ("<search> a </search> <answer> b </answer>", ("search", "a")),
        ("<search> é🙂 </search>", ("search", "é🙂")),
        ("</search><search> a </search>", (None, "")),
        ("nothing", (None, "")),
        ("", (None, "")),
    ],
)
def test_actions_of_text(text, expected):
    assert read_action(text) == expected


def test_special_tags_are_single_tokens(tokenizer):
    actions = SpecialActions(tokenizer)
    ids = [*tokenizer.encode("who<search> query</search>"), *tokenizer.encode("<answer> Paris</answer>")]
    turn = actions.parse(ids)
    assert turn.length == len(tokenizer.encode("who<search> query</search>"))
    assert (turn.kind, turn.content) == ("search", "query")
    assert set(actions.stop_token_ids) == {tokenizer.token_id("</search>"), tokenizer.token_id("</answer>")}


def test_special_tags_spelled_out_in_text_are_no_tags(tokenizer):
    spelled = [tokenizer.token_id("<"), tokenizer.token_id("/"), tokenizer.token_id("search"), tokenizer.token_id(">")]
    turn = SpecialActions(tokenizer).parse(spelled)
    assert (turn.complete, turn.kind, turn.length) == (False, None, 4)


@given(st.lists(st.sampled_from([256, 257, 258, 259, 40, 41]), max_size=20))
def test_special_actions_agree_with_their_text(ids):
    from itertools import takewhile

    tokenizer = _pieces()
    closing = {257, 259}
    turn = SpecialActions(tokenizer).parse(ids)
    before = list(takewhile(lambda token: token not in closing, ids))
    assert turn.complete == (len(before) < len(ids))
    assert turn.length == len(before) + turn.complete
    assert (turn.kind, turn.content) == read_action(tokenizer.decode(ids[: turn.length]))


def _pieces():
    class Four(ByteLevel):
        pieces = ("<search>", "</search>", "<answer>", "</answer>")

        def __init__(self):
            self.size = 260

        def decode(self, ids):
            return "".join(chr(i) if i < 256 else self.pieces[i - 256] for i in ids)

        def token_id(self, text):
            return 256 + self.pieces.index(text)

    return Four()


def test_a_vocabulary_without_the_tags_is_refused():
    with pytest.raises(ConfigError, match="must hold <search> as one token"):
        make_actions("special", BYTE_LEVEL)
