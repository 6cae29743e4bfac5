import asyncio

import numpy as np
import pytest

from async_search_rl.config import parse_config
from async_search_rl.errors import ConfigError
from async_search_rl.questions import Question
from async_search_rl.trajectory import Trajectory, Turn
from rollouts.evaluate import evaluate, means, play_all, report, table
from rollouts.generator import make_agent
from rollouts.prompts import Prompts
from rollouts.protocol import make_actions


def episode(reward, searches=0, outcome="answered"):
    tokens = 2 + searches
    turns = [Turn(start=1 + i, end=2 + i, action="search", query="q") for i in range(searches)]
    turns.append(Turn(start=1 + searches, end=tokens, action="answer"))
    return Trajectory(
        token_ids=np.arange(tokens, dtype=np.int32),
        loss_mask=np.arange(tokens) > 0,
        behaviour_logprobs=np.zeros(tokens, np.float32),
        versions=np.array([-1] + [0] * (tokens - 1), np.int64),
        prompt_length=1,
        turns=tuple(turns),
        reward=None if outcome == "fault" else reward,
        reward_parts={} if outcome == "fault" else {"exact_match": reward, "f1": reward, "format": 1.0},
        outcome=outcome,
        fault="no replica answered" if outcome == "fault" else None,
    )


def question(i, source, hops):
    return Question(id=str(i), question="who", answers=("x",), data_source=source, extra={"hops": hops} if hops else {})


def test_means_are_over_valid_episodes():
    result = means([episode(1.0, searches=2), episode(0.0, outcome="no_answer"), episode(0.0, outcome="fault")])
    assert result["questions"] == 3.0
    assert result["valid"] == pytest.approx(2 / 3)
    assert (result["exact_match"], result["searches"], result["answered"]) == (0.5, 1.0, 0.5)


def test_report_tells_sources_and_hops_apart_and_shows_in_the_table():
    questions = [question(0, "nq", 1), question(1, "nq", 2), question(2, "trivia", 2)]
    made = report(questions, [episode(1.0), episode(0.0), episode(0.0, outcome="fault")])
    assert made["by_source"]["nq"]["exact_match"] == 0.5
    assert made["by_hops"]["1"]["exact_match"] == 1.0
    assert "exact_match" not in made["by_source"]["trivia"]
    assert made["fault"] == "no replica answered"
    lines = table([{"model": "m", **made}]).splitlines()
    assert len(lines) == 7
    assert "hops = 2" in lines[-2]
    assert lines[-1].endswith("first fault: no replica answered")


def test_every_question_is_played_once_at_the_evaluation_temperature(tokenizer, scripted):
    config = parse_config(
        {"rollout": {"running_evaluations": 2, "eval_temperature": 0.25}, "data": {"prompt": "raw", "template": "{question}"}}
    )
    engine = scripted([tokenizer.encode("<answer> Paris</answer>")] * 5)

    async def search(query, topk):
        return []

    agent = make_agent(config, engine, search, make_actions("text", tokenizer), tokenizer)
    prompts = Prompts(tokenizer, config.data, 100)
    questions = [Question(id=str(i), question=f"who {i}", answers=("Paris",)) for i in range(5)]
    episodes = asyncio.run(play_all(agent, prompts, questions, config))
    assert [e.reward for e in episodes] == [1.0] * 5
    assert [tokenizer.decode(e.token_ids[: e.prompt_length]) for e in episodes] == [q.question for q in questions]
    assert {call[2] for call in engine.calls} == {0.25}


def test_a_question_that_cannot_be_asked_is_a_fault_and_ends_nothing(tokenizer, scripted):
    config = parse_config({"data": {"prompt": "raw", "template": "{question}"}})
    agent = make_agent(config, scripted([tokenizer.encode("<answer>x</answer>")]), None, make_actions("text", tokenizer), tokenizer)
    questions = [Question(id="long", question="z" * 50, answers=("x",)), Question(id="short", question="who", answers=("x",))]
    episodes = asyncio.run(play_all(agent, Prompts(tokenizer, config.data, 10), questions, config))
    assert [e.valid for e in episodes] == [False, True]
    assert "the prompt of question 'long' must have 1 to 10 tokens" in episodes[0].fault


def test_a_report_that_cannot_be_written_is_refused_first(tmp_path):
    with pytest.raises(ConfigError, match="folder that can be written"):
        asyncio.run(evaluate(parse_config({"data": {"eval": "q"}}), ["model"], tmp_path / "absent" / "r.json"))


def test_questions_must_be_configured():
    with pytest.raises(ConfigError, match=r"data\.eval must name"):
        asyncio.run(evaluate(parse_config({}), ["model"]))
