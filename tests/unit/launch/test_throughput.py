"""The throughput benchmark's arithmetic, on run folders with known figures."""

import json

import pytest

from async_search_rl.errors import ConfigError, RunStoppedError
from benchmarks.common import alternating, machine, medians
from benchmarks.throughput import compare, main, measure, overrides, table


def write_run(folder, step_s, wait_s, steps=12, em=0.9):
    """A run whose steps take ``step_s`` seconds each, ``wait_s`` of it waiting; the generator is busy half of the time."""
    (folder / "metrics").mkdir(parents=True)
    with (folder / "metrics" / "learner.jsonl").open("w") as lines:
        for step in range(1, steps + 1):
            row = {
                "time": 1000 + step * step_s,
                "step": step,
                "step_s": step_s,
                "wait_s": wait_s,
                "trajectories": 128,
                "groups": 16,
                "tokens": 12000,
            }
            row |= {"trainable_tokens": 2000, "publish_s": 0.07, "publish_stall_s": 0.01, "lag_histogram": {"0": 10, "1": 6}}
            lines.write(json.dumps(row) + "\n")
    with (folder / "metrics" / "timeline.jsonl").open("w") as lines:
        for second in range(int(steps * step_s) + 1):
            gauges = {
                "busy_s": second / 2,
                "idle_s": second / 2,
                "stall_s": second / 10,
                "weight_updates": second / step_s,
                "tokens_generated": second,
            }
            lines.write(
                json.dumps({"time": 1000 + second, "t": second, "actors": {"a": gauges}, "search": {"busy_s": second / 4}}) + "\n"
            )
    (folder / "summary.json").write_text(json.dumps({"em_end": em, "n_eval": 100, "groups_trained": 16 * steps, "wall_s": 60}))
    return folder


def test_figures_are_taken_between_warm_up_and_end(tmp_path):
    found = measure(write_run(tmp_path / "r", step_s=4.0, wait_s=1.0), warm=3, cool=2)
    assert (found["steps"], found["seconds"]) == (7, 28.0)
    assert found["samples_per_s"] == pytest.approx(32.0)
    assert found["tokens_per_s"] == pytest.approx(3000.0)
    assert (found["generation_wait_s"], found["training_s"]) == (1.0, 3.0)
    assert found["idle"] == pytest.approx({"learner": 0.25, "generators": 0.5, "search": 0.75})
    assert found["generators_stalled"] == pytest.approx(0.1)
    assert found["generator_stall_s"] == pytest.approx(0.4)
    assert found["staleness"] == {"0": 70, "1": 42}


def test_a_run_that_is_too_short_is_refused(tmp_path):
    with pytest.raises(RunStoppedError, match="must hold more than 11 trained steps"):
        measure(write_run(tmp_path / "r", 4.0, 1.0, steps=11), warm=8, cool=2)


def test_ratios_and_bound_follow_from_the_modes(tmp_path):
    figures = {
        "async": measure(write_run(tmp_path / "a", step_s=3.0, wait_s=0.1), 3, 2),
        "barrier": measure(write_run(tmp_path / "b", step_s=5.0, wait_s=2.0), 3, 2),
        "time_shared": measure(write_run(tmp_path / "t", step_s=4.0, wait_s=2.0), 3, 2),
    }
    result = compare([{"mode": mode, "repetition": 0, **found} for mode, found in figures.items()])
    assert (result["g"], result["t"]) == (2.0, 3.0)
    assert result["bound"] == pytest.approx(5 / 3)
    assert result["ratio_barrier"] == pytest.approx(5 / 3)
    assert result["share_of_bound"] == pytest.approx(1.0)
    assert result["ratio_time_shared"] == pytest.approx(4 / 3)
    shown = table({"config": "c.toml", **result})
    assert "ratio_barrier 1.667" in shown.caption
    assert shown.row_count == 14


def test_modes_differ_in_the_bound_and_the_threads():
    assert overrides("async", []) == []
    assert overrides("barrier", ["a.b=1"]) == ["replay.max_staleness=0"]
    shared = overrides("time_shared", ["generator.devices=[0, 1]"])
    assert shared[0] == "replay.max_staleness=0"
    assert shared[-1] == "generator.devices=[0, 1]"
    assert shared[1].startswith("generator.threads=")


def test_repetitions_alternate():
    assert [mode for _, mode in alternating(["a", "b"], 3)] == ["a", "b", "b", "a", "a", "b"]


def test_medians_go_into_maps_and_skip_what_is_not_a_number():
    rows = [
        {"a": 1, "m": {"x": 1.0}, "s": "t", "n": None},
        {"a": 5, "m": {"x": 3.0}, "s": "t", "n": 2.0},
        {"a": 2, "m": {"x": 2.0}, "s": "t", "n": None},
    ]
    assert medians(rows) == {"a": 2, "m": {"x": 2.0}, "n": 2.0}


def test_the_machine_is_named():
    assert machine()["cores"] >= 1


def test_a_warm_up_as_long_as_the_run_is_refused(tmp_path):
    (tmp_path / "c.toml").write_text("[run]\nmax_steps = 6\n")
    with pytest.raises(ConfigError, match="--warm must be in"):
        main([str(tmp_path / "c.toml"), "--warm", "5"])
