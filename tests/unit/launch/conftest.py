"""A run's folder as a run would leave it, made up: for the page, the viewer and the summary."""

import json
import math

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from async_search_rl.codec import encode, encode_group
from async_search_rl.config import Config, to_toml
from async_search_rl.config.run import DataSection, ModelSection, RunSection
from async_search_rl.json_lines import JsonLines
from async_search_rl.launch.summary import summarise, write_summary
from async_search_rl.launch.timeline import sample
from async_search_rl.questions import Question, write_questions
from async_search_rl.replay.schema import ActorStatus, EvaluationResult, Status
from async_search_rl.trajectory import NO_VERSION, Group, PassageRecord, Trajectory, Turn
from async_search_rl.version import PolicyVersion

STEPS, SECONDS = 45, 240
NASTY = "<script>alert('passage')</script>"


def evaluation(number, step, em, searches):
    means = {"exact_match": em, "reward": em, "searches": searches, "length": 90.0, "valid": 1.0}
    return EvaluationResult(
        round=number,
        version=PolicyVersion(1, step).pack(),
        asked=340,
        questions=340,
        means=means,
        by_source={
            "facts_1hop": {**means, "searches": 1.0, "questions": 136.0},
            "facts_2hop": {**means, "exact_match": em * 0.95, "questions": 204.0},
        },
        seconds=3.4,
    )


def status_at(second):
    share = second / SECONDS
    step = int(share * STEPS)
    gauges = {
        "busy_s": second * 0.97,
        "idle_s": second * 0.03,
        "stall_s": step * 0.09,
        "tokens_generated": second * 1500.0 + 900 * math.sin(second / 9),
        "weight_updates": float(step),
        "in_flight_updates": step * 31.0,
    }
    evaluations = [evaluation(0, 0, 0.29, 1.22)]
    if second >= SECONDS:
        evaluations.append(evaluation(1, STEPS, 0.89, 1.98))
    return Status(
        run="synthetic",
        state="finished" if second >= SECONDS else "running",
        stop=None,
        incarnation=1,
        step=step,
        buffered=step % 7,
        running=14 + step % 3,
        training=16,
        filtered_in_row=0,
        waiting_for="",
        counters={
            "groups_accepted": 16.0 * step,
            "groups_trained": 16.0 * step,
            "groups_filtered": 5.0 * step,
            "groups_dropped": 0.0,
            "max_lag": 2.0,
        },
        recent={"reward_mean": 0.3 + 0.6 * share},
        learner={"reward_mean": 0.3 + 0.6 * share, "lag_mean": 1.1, "step_s": 4.0, "wait_s": 0.4} if step else {},
        actors=[ActorStatus(actor="actor/0", version=PolicyVersion(1, step).pack(), running=14, seen_s_ago=0.2, gauges=gauges)],
        evaluations=evaluations,
        staleness={"0": 10 * step, "1": 5 * step, "2": step},
        parked_questions=[],
    )


def learner_row(step):
    share = step / STEPS
    wave = math.sin(step * 1.7) * 0.03
    reward = 0.3 + 0.6 / (1 + math.exp(-9 * (share - 0.4))) + wave
    return {
        "step": step,
        "reward_mean": reward,
        "exact_match": reward,
        "searches_mean": 1.2 + 0.8 * share + wave,
        "loss": -0.02 + wave,
        "ess": 0.97 + wave / 3,
        "kl_behaviour": 0.002 + abs(wave) / 20,
        "entropy": 0.6 * (1 - share) + 0.1,
        "wait_s": 0.4,
        "step_s": 5.2,
    }


def episode(tokenizer, stretches, reward, answer, step):
    """``stretches``: (text, sampled); the first is the prompt. A sampled stretch is one turn."""
    ids, mask, turns = [], [], []
    for text, sampled in stretches:
        tokens = tokenizer.encode(text).ids
        if sampled:
            query = text.split("<search>")[1].split("</search>")[0].strip() if "<search>" in text else None
            passages = (PassageRecord(id="d1", title="T", text=NASTY, score=1.0),) if query else ()
            action = "search" if query is not None else "answer"
            turns.append(Turn(start=len(ids), end=len(ids) + len(tokens), action=action, query=query, passages=passages))
        ids += tokens
        mask += [sampled] * len(tokens)
    mask_T = np.array(mask)
    versions_T = np.where(mask_T, PolicyVersion(1, step).pack(), NO_VERSION).astype(np.int64)
    if step:
        versions_T[np.flatnonzero(mask_T)[:3]] = PolicyVersion(1, step - 1).pack()
    return Trajectory(
        token_ids=np.array(ids, dtype=np.int32),
        loss_mask=mask_T,
        behaviour_logprobs=np.where(mask_T, -0.3, 0.0).astype(np.float32),
        versions=versions_T,
        prompt_length=len(tokenizer.encode(stretches[0][0]).ids),
        turns=tuple(turns),
        reward=reward,
        reward_parts={"exact_match": reward},
        outcome="answered",
        answer=answer,
        seconds=0.8,
    )


def stretches_of(question, answer, good):
    first = (f"<think> I need the director first </think> <search> {question} </search>", True)
    passage = (
        f"<information> Doc 1(Title: Film) The film {NASTY} was made by Ada Moreau . </search> is not a tag here </information>"
    )
    if not good:
        return [(question, False), (f"<think> I know it </think> <answer> {answer} </answer>", True)]
    second = ("<search> Ada Moreau birthplace </search>", True)
    found = ("<information> Doc 1(Title: Ada Moreau) Ada Moreau was born in Lyon in 1931 . </information>", False)
    return [(question, False), first, (passage, False), second, found, (f"<think> done </think> <answer> {answer} </answer>", True)]


def make_tokenizer(texts):
    words = sorted({word for text in texts for word in text.split()})
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["?", *words])}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def make_run(folder):
    """Fill ``folder`` / runs / synthetic; returns that folder."""
    questions = [
        Question(id=f"q{i}", question=f"Where was the director of film {i} born ?", answers=("Lyon",), data_source="facts_2hop")
        for i in range(3)
    ]
    eval_file, model = folder / "eval.jsonl", folder / "model"
    write_questions(eval_file, questions)
    config = Config(
        run=RunSection(name="synthetic", dir=str(folder / "runs"), max_steps=STEPS),
        model=ModelSection(path=str(model)),
        data=DataSection(eval=str(eval_file)),
    )
    run = config.run.folder
    run.mkdir(parents=True)
    (run / "config.toml").write_text(to_toml(config))
    both = {
        when: [stretches_of(q.question, answer, good) for q in questions]
        for when, answer, good in (("before", "Paris", False), ("after", "Lyon", True))
    }
    tokenizer = make_tokenizer([text for episodes in both.values() for stretches in episodes for text, _ in stretches])
    model.mkdir()
    tokenizer.save(str(model / "tokenizer.json"))
    for when, episodes in both.items():
        groups = []
        for i, stretches in enumerate(episodes):
            trajectory = episode(tokenizer, stretches, float(when == "after"), None, STEPS if when == "after" else 0)
            groups.append(
                Group(ticket=i, attempt=1, question_id=f"q{i}", actor="actor/0", trajectories=(trajectory,), evaluation=0)
            )
        (run / f"trajectories_{when}.msgpack").write_bytes(encode([encode_group(group) for group in groups]))
    timeline = [
        sample(t + 1.0, status_at(t), {"busy_s": t * 0.08}, {"learner": t * 0.9, "actor": t * 0.95, "search": t * 0.1})
        for t in range(SECONDS + 1)
    ]
    learner = [learner_row(step) for step in range(1, STEPS + 1)]
    with JsonLines(run / "metrics" / "timeline.jsonl") as lines:
        for row in timeline:
            lines.write({**row, "time": 1.7e9 + row["t"]})
    with (run / "metrics" / "learner.jsonl").open("w") as lines:
        for row in learner:
            lines.write(json.dumps({**row, "time": 1.7e9 + row["step"] * SECONDS / STEPS}) + "\n")
    status = status_at(SECONDS)
    (run / "status.json").write_bytes(msgspec.json.encode(status))
    write_summary(run, summarise(config, status, timeline, learner, outcome="finished", wall_s=251.3, restarts={"learner": 1}))
    return run


@pytest.fixture
def synthetic_run(tmp_path):
    return make_run(tmp_path)
