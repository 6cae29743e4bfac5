import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_search_rl.config.rollout import RewardSection
from rollouts.reward import exact_match, normalize, reward_parts, token_f1, weigh, well_formed


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Eiffel Tower!", "eiffel tower"),
        ("A an the", ""),
        ("U.S.A.", "usa"),
        ("theatre", "theatre"),
        ("Beyoncé—2", "beyoncé—2"),
    ],
)
def test_normalisation(text, expected):
    assert normalize(text) == expected


@pytest.mark.parametrize(
    ("answer", "targets", "expected"),
    [
        ("the Paris.", ["London", "paris"], 1.0),
        ("Paris France", ["Paris"], 0.0),
        ("", ["the"], 0.0),
        ("the", ["a"], 0.0),
        ("Paris", [], 0.0),
    ],
)
def test_exact_match(answer, targets, expected):
    assert exact_match(answer, targets) == expected


@pytest.mark.parametrize(
    ("answer", "targets", "expected"),
    [
        ("Paris France", ["Paris"], 2 / 3),
        ("x", ["y"], 0.0),
        ("a b b", ["b b c", "z"], 0.8),
        ("", [""], 0.0),
        ("Paris", ["paris"], 1.0),
    ],
)
def test_token_f1(answer, targets, expected):
    assert token_f1(answer, targets) == pytest.approx(expected)


@given(st.text(max_size=30), st.lists(st.text(max_size=30), max_size=3))
def test_exact_match_implies_full_f1(answer, targets):
    f1 = token_f1(answer, targets)
    assert 0.0 <= f1 <= 1.0
    if exact_match(answer, targets):
        assert f1 == 1.0


@pytest.mark.parametrize(
    ("turns", "actions", "expected"),
    [
        (["<think>a</think><search>q</search>", "<answer>x</answer>"], ["search", "answer"], True),
        (["<answer>x</answer>"], ["answer"], True),
        (["<search>q</search>"], ["search"], False),
        (["hm", "<answer>x</answer>"], ["invalid", "answer"], False),
        (["<think><answer>x</answer>"], ["answer"], False),
        (["</think><answer>x</answer>"], ["answer"], False),
        (["<search><answer>x</answer>"], ["answer"], False),
        (["<information>x</information><answer>x</answer>"], ["answer"], False),
        ([], [], False),
    ],
)
def test_format(turns, actions, expected):
    assert well_formed(turns, actions) is expected


def test_parts_are_weighed():
    parts = reward_parts("Paris", ["paris"], ["so <answer>Paris</answer>"], ["answer"])
    assert parts == {"exact_match": 1.0, "f1": 1.0, "format": 1.0}
    assert weigh(parts, RewardSection(exact_match=1.0, f1=0.5, format=-0.25)) == 1.25
