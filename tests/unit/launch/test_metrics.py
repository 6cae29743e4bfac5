"""The metric table, JSON lines and Prometheus text."""

import json
import math
import re
import resource

import pytest

from async_search_rl.json_lines import JsonLines, JsonLinesTail, read_json_lines, surviving_steps
from async_search_rl.metrics import METRICS, prometheus_text, unknown_names


@pytest.mark.parametrize("scope", list(METRICS))
def test_every_metric_has_a_snake_case_name_a_unit_and_a_meaning(scope):
    for name, metric in METRICS[scope].items():
        assert re.fullmatch(r"[a-z][a-z0-9_]*", name)
        assert metric.unit
        assert metric.meaning
        if name.endswith("_s") and not name.endswith("_per_s"):
            assert metric.unit == "s", name


def test_unknown_names_are_named():
    assert unknown_names("learner", ["loss", "lss"]) == ["lss"]


def test_lines_survive_a_writer_that_was_killed_in_the_middle_of_one(tmp_path):
    path = tmp_path / "metrics" / "learner.jsonl"
    with JsonLines(path) as writer:
        writer.write({"step": 1, "loss": 0.5})
    with path.open("ab") as file:
        file.write(b'{"step": 2, "lo')
    with JsonLines(path) as writer:
        writer.write({"step": 2, "loss": math.nan, "parts": {"a": math.inf, "b": [1.0]}})
    rows = list(read_json_lines(path))
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[1]["loss"] is None
    assert rows[1]["parts"] == {"a": None, "b": [1.0]}
    assert all(row["time"] > 1e9 for row in rows)


def test_a_half_written_line_is_an_error_and_does_not_spoil_the_next_one(tmp_path):
    path = tmp_path / "m.jsonl"
    with JsonLines(path) as writer:
        writer.write({"a": 1})
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 9, hard))
        try:
            with pytest.raises(OSError, match="File too large"):
                writer.write({"a": 2})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with JsonLines(path) as writer:
        writer.write({"a": 3})
    assert [row["a"] for row in read_json_lines(path)] == [1, 3]


def test_each_line_can_be_read_while_the_file_is_open(tmp_path):
    with JsonLines(tmp_path / "m.jsonl") as writer:
        writer.write({"a": 1})
        assert json.loads((tmp_path / "m.jsonl").read_text())["a"] == 1


def test_a_tail_gives_each_whole_line_once(tmp_path):
    path = tmp_path / "m.jsonl"
    tail = JsonLinesTail(path)
    assert tail.new() == []
    with path.open("ab", buffering=0) as file:
        file.write(b'{"a": 1}\n{"a": 2}\n{"a"')
        assert [row["a"] for row in tail.new()] == [1, 2]
        file.write(b": 3}\n")
        assert [row["a"] for row in tail.new()] == [3]
    assert tail.new() == []


def test_steps_trained_again_replace_the_lost_ones():
    rows = [{"step": step, "try": number} for number, steps in enumerate([(1, 2, 3, 4), (3, 4, 5)]) for step in steps]
    assert [(row["step"], row["try"]) for row in surviving_steps(rows)] == [(1, 0), (2, 0), (3, 1), (4, 1), (5, 1)]


def test_a_missing_file_reads_as_empty(tmp_path):
    assert list(read_json_lines(tmp_path / "none.jsonl")) == []


def test_prometheus_text_has_help_and_type():
    text = prometheus_text("actor", {"idle_s": 1.5, "tokens_per_s": math.inf})
    assert "# HELP async_search_rl_actor_idle_s no request was in the engine (s)\n" in text
    assert "# TYPE async_search_rl_actor_idle_s counter\n" in text
    assert "\nasync_search_rl_actor_idle_s 1.5\n" in text
    assert "\nasync_search_rl_actor_tokens_per_s +Inf\n" in text
