import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_search_rl.config.rollout import RewardSection, RolloutSection
from async_search_rl.errors import EngineError, SearchFailedError
from async_search_rl.version import PolicyVersion
from rollouts.agent import Agent
from rollouts.engine import Sample
from rollouts.episode import Episode
from rollouts.observation import Observations
from rollouts.protocol import make_actions

SEARCH = "<search> query</search>"
ANSWER = "<answer> Paris</answer>"


def play(tokenizer, engine, search=None, answers=("paris",), prompt="who", timeout_s=5.0, compact=True, kind="text", **rollout):
    calls = []

    async def find(query, topk):
        calls.append((query, topk))
        return [] if search is None else await search(query)

    section = RolloutSection(**{"max_turns": 2, "max_turn_tokens": 40, "max_context_tokens": 400, "topk": 3, **rollout})
    agent = Agent(
        engine,
        find,
        make_actions(kind, tokenizer),
        Observations(tokenizer, section.max_observation_tokens, compact),
        section,
        RewardSection(),
        timeout_s,
    )
    episode = Episode(tokenizer.encode(prompt))
    trajectory = asyncio.run(agent.play(episode, answers, 0.7))
    return trajectory, calls, episode


async def one_passage(passage):
    return [passage]


def test_search_then_answer(tokenizer, scripted, make_passage):
    engine = scripted([tokenizer.encode(SEARCH), tokenizer.encode(ANSWER)])
    made, calls, episode = play(tokenizer, engine, lambda _: one_passage(make_passage(1, "x", "T")))
    assert (made.outcome, made.reward, made.answer) == ("answered", 1.0, "Paris")
    assert calls == [("query", 3)]
    assert tokenizer.decode(made.token_ids) == "who" + SEARCH + "<information> T: x</information>" + ANSWER
    sampled = made.token_ids[made.loss_mask]
    assert tokenizer.decode(sampled) == SEARCH + ANSWER
    assert made.searches == 1
    assert made.turns[0].passages[0].id == "d1"
    assert (made.versions[made.loss_mask] == 7).all()
    assert engine.calls[1][0] == list(made.token_ids[: made.turns[1].start])
    assert episode.oldest_step == PolicyVersion.unpack(7).step
    assert made.reward_parts == {"exact_match": 1.0, "f1": 1.0, "format": 1.0}


def test_what_the_engine_sampled_past_the_tag_is_dropped(tokenizer, scripted):
    made, _, _ = play(tokenizer, scripted([tokenizer.encode(ANSWER + "<search> who</search>")]))
    assert tokenizer.decode(made.token_ids) == "who" + ANSWER
    assert made.behaviour_logprobs[made.loss_mask][0] == pytest.approx(-0.5)


def test_at_most_max_turns_searches_then_one_generation_without(tokenizer, scripted):
    made, calls, _ = play(tokenizer, scripted([tokenizer.encode(SEARCH)] * 3))
    assert (made.outcome, made.reward, made.valid) == ("no_answer", 0.0, True)
    assert len(calls) == 2
    assert made.searches == 2
    assert [turn.action for turn in made.turns] == ["search", "search", "invalid"]
    assert made.turns[-1].end == made.length


def test_a_turn_without_action_gets_a_masked_message_and_is_used_up(tokenizer, scripted):
    words = [*tokenizer.encode("who"), tokenizer.eos_id]
    made, calls, _ = play(tokenizer, scripted([words, words, words]), compact=False)
    assert made.outcome == "no_answer"
    assert calls == []
    assert [turn.action for turn in made.turns] == ["invalid"] * 3
    between = made.token_ids[made.turns[0].end : made.turns[1].start]
    assert "no action" in tokenizer.decode(between)
    assert not made.loss_mask[made.turns[0].end : made.turns[1].start].any()
    assert made.token_ids[made.turns[0].end - 1] == tokenizer.eos_id
    assert made.loss_mask[made.turns[0].end - 1]


def test_max_turns_zero_is_one_generation(tokenizer, scripted):
    made, calls, _ = play(tokenizer, scripted([tokenizer.encode(SEARCH)]), max_turns=0)
    assert (made.outcome, calls) == ("no_answer", [])


def test_max_tokens_is_the_turn_limit_or_what_context_is_left(tokenizer, scripted):
    engine = scripted([tokenizer.encode(SEARCH), tokenizer.encode("who" * 50)])
    made, _, _ = play(tokenizer, engine, max_context_tokens=20, max_turn_tokens=15, prompt="who" * 3)
    assert [call[1] for call in engine.calls] == [15, 20 - 3 - 3 - 2]
    assert (made.outcome, made.reward) == ("length", 0.0)
    assert made.length == 20
    assert made.turns[-1].action == "length"
    assert all(call[2] == 0.7 for call in engine.calls)


def test_an_observation_that_does_not_fit_ends_the_episode(tokenizer, scripted):
    made, _, _ = play(tokenizer, scripted([tokenizer.encode(SEARCH)]), max_context_tokens=5)
    assert (made.outcome, made.reward, made.searches) == ("length", 0.0, 1)
    assert made.length == 4


def test_no_context_after_an_observation_ends_the_episode(tokenizer, scripted, make_passage):
    engine = scripted([tokenizer.encode(SEARCH)])
    made, _, _ = play(tokenizer, engine, lambda _: one_passage(make_passage(1, "z" * 99)), max_context_tokens=24)
    assert (made.outcome, made.length, len(engine.calls)) == ("length", 24, 1)


def test_a_failed_search_is_a_fault_with_the_tokens_so_far(tokenizer, scripted):
    async def fail(_):
        raise SearchFailedError("no replica answered")

    made, _, _ = play(tokenizer, scripted([tokenizer.encode(SEARCH)]), fail)
    assert (made.outcome, made.reward, made.valid) == ("fault", None, False)
    assert made.fault == "no replica answered"
    assert tokenizer.decode(made.token_ids) == "who" + SEARCH


def test_a_silent_search_is_a_fault_at_its_deadline(tokenizer, scripted):
    async def hang(_):
        await asyncio.Event().wait()

    made, _, _ = play(tokenizer, scripted([tokenizer.encode(SEARCH)]), hang, timeout_s=0.01)
    assert made.outcome == "fault"
    assert "must be answered within 0.01 s" in made.fault


def test_a_dead_engine_is_a_fault(tokenizer, scripted):
    made, _, _ = play(tokenizer, scripted([tokenizer.encode(SEARCH), EngineError("the engine is dead")]))
    assert (made.outcome, made.fault) == ("fault", "the engine is dead")
    assert made.trainable_tokens == len(tokenizer.encode(SEARCH))


def test_an_engine_that_samples_nothing_is_a_fault(tokenizer, scripted):
    made, _, _ = play(tokenizer, scripted([[]]))
    assert made.outcome == "fault"


def test_special_tokens_end_actions(tokenizer, scripted):
    made, calls, _ = play(tokenizer, scripted([tokenizer.encode(SEARCH), tokenizer.encode(ANSWER)]), kind="special")
    assert (made.outcome, calls) == ("answered", [("query", 3)])


class Words:
    """One id a byte."""

    special_tokens = ()

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(i % 256 for i in ids).decode("utf-8", "replace")


class RandomEngine:
    """Samples the drawn ids, a new version each turn."""

    def __init__(self, turns):
        self.turns, self.version, self.sampled = list(turns), 0, []

    async def generate(self, prompt_ids, max_tokens, temperature):
        ids = (self.turns.pop(0) if self.turns else [65])[:max_tokens] or [66]
        self.version += 1
        self.sampled.append((len(prompt_ids), ids, self.version))
        return Sample(ids, [-0.25] * len(ids), [self.version] * len(ids))


@given(
    st.lists(
        st.sampled_from([SEARCH, ANSWER, "</search>", "x", "<search>", "é"]).map(str.encode).map(list)
        | st.lists(st.integers(0, 255), max_size=30),
        max_size=5,
    ),
    st.integers(10, 120),
)
def test_token_in_token_out_whatever_is_sampled(turns, context):
    tokenizer, engine = Words(), RandomEngine(turns)
    made, _, _ = play(tokenizer, engine, prompt="who is", max_context_tokens=context, max_observation_tokens=30)
    assert made.length <= context
    assert made.valid
    for (start, ids, version), turn in zip(engine.sampled, made.turns, strict=True):
        kept = list(made.token_ids[turn.start : turn.end])
        assert turn.start == start
        assert kept == ids[: len(kept)]
        assert (made.versions[turn.start : turn.end] == version).all()
    assert np.flatnonzero(made.loss_mask).tolist() == [i for turn in made.turns for i in range(turn.start, turn.end)]
