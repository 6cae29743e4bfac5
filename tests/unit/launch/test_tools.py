"""The doctor and the viewer."""

import dataclasses
import io
import json
import struct
import threading
import urllib.error
import urllib.request

import pytest
from rich.console import Console

from async_search_rl.config import parse_config
from async_search_rl.errors import ConfigError, DataError
from async_search_rl.launch.page import read_run, write_page
from async_search_rl.launch.preflight import Finding
from async_search_rl.tools.doctor import devices_exist, diagnose, estimates, parameter_count, show
from async_search_rl.tools.view import PageServer, episodes, overview


def safetensors(path, shapes):
    header = json.dumps(
        {"__metadata__": {}, **{name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]} for name, shape in shapes.items()}}
    )
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + b"\0" * 4)


def test_the_machine_alone_is_told_line_by_line():
    found = {finding.subject: finding for finding in diagnose(None)}
    assert {"python", "packages", "processor", "memory", "gpu", "disk"} <= set(found)
    assert found["python"].level == "ok"
    assert "cores" in found["processor"].text


def test_a_configuration_is_looked_at_too(tmp_path):
    safetensors(tmp_path / "model.safetensors", {"a": [1000, 1000], "b": [7]})
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "train.jsonl").write_text('{"id": "1", "question": "q?", "answers": ["a"], "data_source": "nq"}\n')
    (tmp_path / "eval.jsonl").write_text('{"id": "1"}\n')
    config = parse_config(
        {
            "run": {"dir": str(tmp_path)},
            "model": {"path": str(tmp_path)},
            "data": {"train": str(tmp_path / "train.jsonl"), "eval": str(tmp_path / "eval.jsonl")},
            "retrieval": {"url": "http://127.0.0.1:9"},
        }
    )
    found = [(finding.subject, finding.level, finding.text) for finding in diagnose(config)]
    assert ("data.train", "ok", "1 questions of nq") in found
    assert any(subject == "data.eval" and level == "failure" and "question" in text for subject, level, text in found)
    assert any(subject == "tokenizer" and level == "failure" for subject, level, _ in found)
    assert any(subject == "retrieval.url" and level == "warning" for subject, level, _ in found)
    assert any(subject == "estimate" and "1 M parameters" in text for subject, _, text in found)


def test_devices_that_are_not_there_are_named():
    config = parse_config({"generator": {"devices": [0, 4]}, "launch": {"learner_devices": [1], "learner_ranks": 2}})
    assert [finding.subject for finding in devices_exist(config, 4)] == ["generator.devices", "launch.learner_ranks"]
    assert [finding.subject for finding in devices_exist(config, 8)] == ["launch.learner_ranks"]
    assert list(devices_exist(parse_config({}), 0)) == []


def test_an_estimate_counts_the_copies_of_weights_in_transfer(tmp_path):
    safetensors(tmp_path / "a.safetensors", {"a": [1 << 14, 1 << 14]})
    tree = {
        "model": {"path": str(tmp_path), "dtype": "bfloat16"},
        "generator": {"kv_cache_gib": 1.0},
        "run": {"dir": str(tmp_path)},
    }

    def estimate(**weights):
        found = estimates(parse_config({**tree, "weights": weights}), 0, [("GPU", 64 << 30)])
        return next(finding.text for finding in found if finding.subject == "estimate")

    # 2^28 parameters of 2 bytes are half a GiB. A learner needs 16 bytes each and two copies, a generator one copy.
    assert "a learner rank needs 5.0 GiB and a generator 2.0 GiB" in estimate()
    assert "a generator 1.5 GiB" in estimate(staging="host")


def test_parameters_are_counted_from_headers_alone(tmp_path):
    safetensors(tmp_path / "a.safetensors", {"a": [3, 5], "scalar": []})
    safetensors(tmp_path / "b.safetensors", {"b": [2]})
    assert parameter_count(tmp_path) == 18
    (tmp_path / "c.safetensors").write_bytes(b"no")
    with pytest.raises(DataError, match=r"c\.safetensors must be a safetensors file"):
        parameter_count(tmp_path)


@pytest.mark.parametrize(("level", "code"), [("ok", 0), ("warning", 0), ("failure", 1)])
def test_only_a_failure_makes_the_exit_status_1(level, code):
    console = Console(file=io.StringIO(), width=60)
    assert show([Finding("model", level, "a [b] " + "x" * 90)], console) == code
    assert console.file.getvalue().count("\n") == 1
    assert "a [b] " in console.file.getvalue()


def test_the_viewer_leaves_out_what_the_last_evaluation_did_not_measure(synthetic_run):
    run = read_run(synthetic_run)
    console = Console(file=io.StringIO(), width=100)
    console.print(overview(dataclasses.replace(run, summary={**run.summary, "em_end": None})))
    assert "exact match" not in console.file.getvalue()
    assert "searches" in console.file.getvalue()


def test_the_viewer_lists_figures_and_episodes(synthetic_run):
    run = read_run(synthetic_run)
    console = Console(file=io.StringIO(), width=100)
    console.print(overview(run), *episodes(run, 2))
    text = console.file.getvalue()
    assert "0.290 → 0.890" in text
    assert text.count("before: Where was") == text.count("after: Where was") == 2
    assert "accepted: Lyon" in text
    assert "<script>alert" in text


def test_only_the_page_is_served_and_only_on_loopback(synthetic_run):
    with PageServer(write_page(synthetic_run), 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with urllib.request.urlopen(server.url, timeout=5) as reply:
            assert b"synthetic" in reply.read()
            assert "default-src 'none'" in reply.headers["Content-Security-Policy"]
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(server.url + "summary.json", timeout=5)
        assert server.server_address[0] == "127.0.0.1"
        with pytest.raises(ConfigError, match="must name a free port"):
            PageServer(synthetic_run / "index.html", server.server_address[1])
        server.shutdown()
