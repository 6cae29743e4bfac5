"""Live table, timeline arithmetic and summary."""

import io
from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from async_search_rl.config import Config
from async_search_rl.launch.observe import parse_prometheus
from async_search_rl.launch.screen import Screen
from async_search_rl.launch.summary import closing_lines, summarise
from async_search_rl.launch.table import View, plain_line, render, sparkline
from async_search_rl.launch.timeline import actor_total, last_seconds, sample, shares, total_increase
from async_search_rl.replay.schema import ActorStatus, EvaluationResult, Status

MEANS = {"exact_match": 0.5, "reward": 0.5, "searches": 1.5}
RESULT = EvaluationResult(
    round=0,
    version=3,
    asked=10,
    questions=9,
    means=MEANS,
    by_source={
        "a_2hop": {"searches": 2.0, "exact_match": 0.4, "questions": 6.0},
        "b_2hop": {"searches": 1.0, "questions": 3.0},
        "c": {"searches": 9.0},
    },
    seconds=2.0,
)
STATUS = Status(
    run="r",
    state="running",
    stop=None,
    incarnation=1,
    step=12,
    buffered=4,
    running=20,
    training=16,
    filtered_in_row=0,
    waiting_for="",
    counters={"groups_accepted": 200.0, "groups_trained": 192.0, "groups_stale": 3.0, "max_lag": 2.0, "groups_dropped": 0.0},
    recent={"reward_mean": 0.41},
    learner={"loss": -0.0123, "ess": 0.987, "lag_mean": 0.8, "lag_max": 2.0, "tokens_per_s": 5700.0, "wait_s": 1.0, "step_s": 4.0},
    actors=[ActorStatus(actor="a", version=12, running=20, seen_s_ago=0.1, gauges={"in_flight_updates": 7.0})],
    evaluations=[RESULT],
    staleness={"0": 5, "2": 1},
    parked_questions=[],
)
VIEW = View(
    name="demo",
    max_steps=45,
    max_staleness=2,
    elapsed_s=75,
    phase="",
    status=STATUS,
    learner=STATUS.learner,
    shares={
        "learner_busy": 0.75,
        "learner_waiting": 0.25,
        "generators_busy": 0.9,
        "generators_stalled": 0.04,
        "tokens_per_s": 1776.0,
    },
    rewards=[0.1, 0.4],
    waits=["no progress for 61 s"],
    notes=["learner ended with exit status 9; restarted"],
)


def drawn(view, width=140):
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(render(view, width))
    return console.file.getvalue()


def test_the_table_shows_step_reward_lag_rates_waits_losses_and_evaluations():
    text = drawn(VIEW)
    parts = [
        "demo",
        "1:15",
        "step 12 / 45",
        "0.410",
        "mean 0.80   max 2 of 2",
        "1,776 sampled",
        "5,700 trained",
        "busy 75%",
        "waits 25%",
    ]
    parts += ["updating 4%", "idle 6%", "-0.0123", "0.987", "192 trained", "3 stale", "7 requests went on", "9 of 10", "a_2hop"]
    parts += ["no progress", "exit status 9"]
    for part in parts:
        assert part in text, part
    assert len(drawn(VIEW, 78).splitlines()) > len(text.splitlines())


def test_the_table_before_the_first_status_says_what_is_awaited():
    view = View(name="demo", max_steps=45, max_staleness=2, elapsed_s=1, phase="starting the search and replay services")
    assert "starting the search" in drawn(view)
    assert plain_line(view) == "[0:01] starting the search and replay services"


def test_the_plain_line_has_the_same_figures():
    line = plain_line(VIEW)
    assert plain_line(replace(VIEW, phase="stopping")).endswith("stopping")
    assert "stopping" in drawn(replace(VIEW, phase="stopping"))
    assert "\n" not in line
    for part in (
        "step 12/45",
        "reward 0.410",
        "lag 0.8",
        "tok/s 1,776",
        "learner busy 75%",
        "held-out em 0.500 at step 3",
        "no progress",
    ):
        assert part in line


def test_a_screen_that_is_no_terminal_prints_a_line_and_not_twice_the_same():
    console = Console(file=io.StringIO(), force_terminal=False, width=200)
    with Screen(console, 0.1) as screen:
        screen.show(VIEW)
        screen.show(VIEW)
        screen.show(VIEW, now=True)
    assert console.file.getvalue().count("step 12/45") == 1


def test_a_screen_on_a_terminal_draws_the_table():
    console = Console(file=io.StringIO(), force_terminal=True, width=140, height=50)
    with Screen(console, 0.1) as screen:
        screen.show(VIEW, now=True)
    assert "waits" in console.file.getvalue()


def test_sparklines_rise():
    assert sparkline([0, 1, 2, 3]) == "▁▃▆█"
    assert sparkline([]) == ""
    assert sparkline([1.0, 1.0]) == "▁▁"


@given(st.lists(st.lists(st.integers(0, 50), max_size=6), max_size=5))
def test_a_counter_that_begins_anew_counts_all_its_lives(lives):
    readings, expected = [], 0
    for growth in lives:
        value = 0
        for step in [1, *growth]:
            value += step
            readings.append(value)
        expected += value
    again = [(a, b) for a, b in pairwise(readings) if b < a]
    total = total_increase(readings)
    assert total <= expected
    if len(again) == max(0, len(lives) - 1):
        assert total == expected


def rows(*gauges, step=2.0):
    made = []
    for i, values in enumerate(gauges):
        status = msgspec.structs.replace(STATUS, actors=[ActorStatus(actor="a", version=1, running=1, seen_s_ago=0, gauges=values)])
        made.append(sample(i * step, status, {"busy_s": 0.5 * i}, {"learner": i}))
    return made


def test_shares_follow_from_growth_over_the_window():
    window = rows(
        {"busy_s": 10.0, "idle_s": 5.0, "stall_s": 1.0, "tokens_generated": 100.0},
        {"busy_s": 11.5, "idle_s": 5.5, "stall_s": 1.3, "tokens_generated": 2100.0},
    )
    found = shares(window, [{"wait_s": 1.0, "step_s": 4.0}, {"wait_s": 0.0, "step_s": 4.0}])
    assert found == pytest.approx(
        {
            "generators_busy": 0.6,
            "generators_stalled": 0.15,
            "learner_waiting": 0.125,
            "learner_busy": 0.875,
            "search_busy": 0.25,
            "tokens_per_s": 1000.0,
        }
    )
    assert shares([]) == {}


def test_actor_totals_survive_a_restart_of_the_actor():
    assert (
        actor_total(rows({"in_flight_updates": 5.0}, {"in_flight_updates": 9.0}, {"in_flight_updates": 2.0}), "in_flight_updates")
        == 11.0
    )


def test_the_window_is_the_last_seconds():
    assert [row["t"] for row in last_seconds(rows({}, {}, {}, {}), 2.0)] == [4.0, 6.0]


def test_summary_takes_em_over_all_and_searches_over_two_hop_questions():
    last = msgspec.structs.replace(RESULT, round=1, means={**MEANS, "exact_match": 0.9}, questions=10, by_source={})
    status = msgspec.structs.replace(STATUS, evaluations=[last, RESULT])
    timeline = rows({"weight_updates": 3.0, "in_flight_updates": 8.0})
    learner = [{"reward_mean": 0.1 * i} for i in range(10)]
    found = summarise(Config(), status, timeline, learner, outcome="finished", wall_s=12.34, restarts={})
    wanted = {
        "em_start": 0.5,
        "em_end": 0.9,
        "searches_start": pytest.approx((6 * 2.0 + 3 * 1.0) / 9),
        "searches_end": 1.5,
        "n_eval": 10,
        "steps": 12,
        "wall_s": 12.3,
        "max_lag": 2,
        "weight_updates": 3,
        "in_flight_updates": 8,
        "groups_accepted": 200,
        "groups_trained": 192,
        "groups_dropped": 0,
        "reward_first": pytest.approx(0.2),
        "reward_last": pytest.approx(0.7),
    }
    assert {name: found[name] for name in wanted} == wanted
    assert len(found["config_sha256"]) == 64
    assert "held-out EM 0.500 -> 0.900" in "\n".join(closing_lines(found, Config().run.folder / "index.html"))


def test_summary_of_a_run_without_evaluations_has_nulls():
    status = msgspec.structs.replace(STATUS, evaluations=[], counters={}, staleness={})
    found = summarise(Config(), status, [], [], outcome="interrupted", wall_s=1.0, restarts={})
    assert (found["em_start"], found["searches_end"], found["n_eval"], found["max_lag"]) == (None, None, 0, None)


def test_prometheus_text_is_read_by_prefix():
    lines = ["# HELP x y", "own_busy_s 1.5", 'own_latency{le="1"} 4', "other 3", "own_bad x"]
    assert parse_prometheus("\n".join(lines), "own_") == {"busy_s": 1.5}


def test_a_last_evaluation_without_answers_is_said_and_not_stumbled_over():
    silent = msgspec.structs.replace(RESULT, round=1, means={"valid": 0.0}, by_source={}, questions=0)
    status = msgspec.structs.replace(STATUS, evaluations=[RESULT, silent])
    found = summarise(Config(), status, [], [], outcome="finished", wall_s=1.0, restarts={})
    assert (found["em_start"], found["em_end"]) == (0.5, None)
    text = "\n".join(closing_lines(found, Config().run.folder / "index.html"))
    assert f"the last evaluation has 0 answers of {RESULT.asked}" in text
