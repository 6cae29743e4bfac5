import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.token_versions import TokenVersions


def test_versions_change_exactly_where_the_weights_changed():
    book = TokenVersions(5)
    book.open("a")
    book.open("b")
    book.count("a", 2)
    book.advance(6)
    book.count("a", 1)
    book.count("b", 2)
    assert book.close("a", 3) == [5, 5, 6]
    assert book.close("b", 1) == [6]
    assert book.running == 0
    assert book.requests_across_updates == 2


def test_only_requests_with_tokens_of_newer_weights_went_on_across_an_update():
    book = TokenVersions(5)
    for name in ("done before", "went on", "aborted"):
        book.open(name)
        book.count(name, 1)
    book.advance(6)
    book.open("later")
    for name in ("went on", "aborted", "later"):
        book.count(name, 1)
    closed = {name: book.close(name, tokens) for name, tokens in [("done before", 1), ("went on", 2), ("aborted", 0), ("later", 1)]}
    assert closed["went on"] == [5, 6]
    assert book.requests_across_updates == 1


def test_outputs_of_an_aborted_request_are_passed_over():
    book = TokenVersions(5)
    book.open("a")
    book.close("a")
    book.count("a", 3)
    assert book.tokens == 0


def test_a_token_that_was_never_counted_is_an_error():
    book = TokenVersions(5)
    book.open("a")
    book.count("a", 1)
    with pytest.raises(ValueError, match="at least 2 counted tokens, got 1"):
        book.close("a", 2)


@given(st.lists(st.one_of(st.tuples(st.integers(0, 2), st.integers(0, 3)), st.none()), max_size=40))
def test_any_interleaving_labels_every_token_with_the_weights_of_its_time(events):
    book, version = TokenVersions(0), 0
    expected = {str(i): [] for i in range(3)}
    for name in expected:
        book.open(name)
    for event in events:
        if event is None:
            version += 1
            book.advance(version)
        else:
            book.count(str(event[0]), event[1])
            expected[str(event[0])] += [version] * event[1]
    assert {name: book.close(name, len(labels)) for name, labels in expected.items()} == expected
