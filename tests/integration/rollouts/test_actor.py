"""`bin/actor` among real services: a tiny policy answers questions while the test, in the learner's place, changes its weights."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from async_search_rl.codec import decode_group
from async_search_rl.config import load_config, parse_config, to_toml
from async_search_rl.launch.guard import become_subreaper, descendants
from async_search_rl.launch.process import LocalProcess, Piece
from async_search_rl.replay.client import BlockingReplayClient
from async_search_rl.replay.schema import CutRequest, PublishRequest, StartRequest
from async_search_rl.version import PolicyVersion
from async_search_rl.weights.plan import plan_buckets
from async_search_rl.weights.schema import TensorSpec
from async_search_rl.weights.sender import WeightSender

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "assets" / "tiny_policy"
CAPITALS = {"Peru": "Lima", "Kenya": "Nairobi", "Norway": "Oslo", "Egypt": "Cairo", "Cuba": "Havana", "Japan": "Tokyo"}
GROUPS = 4


def write_data(folder):
    questions = [
        {"id": name, "question": f"What is the capital of {country}?", "answers": [CAPITALS[country]], "data_source": "capitals"}
        for name, country in ((f"q{i}", country) for i, country in enumerate(CAPITALS))
    ]
    for file in ("train.jsonl", "eval.jsonl"):
        (folder / file).write_text("".join(json.dumps(q) + "\n" for q in questions))
    documents = [f'"Government of {c}"\nThe capital of {c} is {capital}.' for c, capital in CAPITALS.items()]
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"id": str(i), "contents": d}) + "\n" for i, d in enumerate(documents)))


def configure(folder):
    demo = load_config(ROOT / "configs" / "demo.toml", ["logging.wandb=disabled"])
    tree = {
        "run": {"name": "actor", "dir": str(folder / "runs"), "max_steps": 3},
        "model": {"path": str(MODEL), "dtype": "float32"},
        "data": {
            "train": str(folder / "train.jsonl"),
            "eval": str(folder / "eval.jsonl"),
            "eval_questions": 6,
            "prompt": "chat",
            "template": "{question}",
        },
        "rollout": {name: getattr(demo.rollout, name) for name in demo.rollout.__struct_fields__}
        | {"running_groups": 2, "group_size": 4},
        "generator": {"threads": 1, "kv_cache_gib": 0.25, "max_num_seqs": 64},
        "retrieval": {"backend": "rank_bm25", "corpus": str(folder / "corpus.jsonl")},
        "replay": {"batch_groups": GROUPS, "max_staleness": 1, "filter_uniform": False},
        "launch": {"stop_timeout_s": 30.0},
    }
    config = parse_config(tree)
    (folder / "config.toml").write_text(to_toml(config))
    return config


class Weights:
    """The policy's weights as the learner would publish them: the checkpoint's, then changed a little at each step."""

    def __init__(self, config):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
        self.sender = WeightSender(config.weights, None)
        self.sender.start()
        parameters = dict(self.model.named_parameters())
        specs = [TensorSpec(name=name, shape=tuple(p.shape), dtype="float32") for name, p in parameters.items()]
        self.plan = plan_buckets(specs, 1 << 20)

    def publish(self, version):
        staged = self.sender.acquire_buffers(self.plan, version.pack())
        for name, parameter in self.model.named_parameters():
            staged.write(name, parameter)
        self.sender.publish(staged)

    @torch.no_grad()
    def change(self, seed):
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02 * parameter.std())

    @torch.no_grad()
    def worst_error(self, trajectory):
        ids = torch.tensor([trajectory.token_ids.tolist()])
        table = torch.log_softmax(self.model(ids).logits[0], -1)
        places = np.flatnonzero(trajectory.loss_mask)
        mine = np.array([float(table[i - 1, ids[0, i]]) for i in places])
        return float(np.abs(mine - trajectory.behaviour_logprobs[places]).max())


class Services:
    """Search, replay and actor as processes."""

    def __init__(self, folder, config):
        self.folder, self.config, self.processes = folder, config, {}

    def start(self, name):
        argv = (sys.executable, str(ROOT / "bin" / name), str(self.folder / "config.toml"))
        self.processes[name] = LocalProcess(Piece(name=name, argv=argv), self.folder / f"{name}.log")

    def url(self, name):
        path, process = self.config.run.folder / f"{name}.url", self.processes[name]
        until(lambda: path.is_file() or process.poll() is not None, 60)
        assert process.poll() is None, process.error_line()
        return path.read_text().strip()

    def end(self, name):
        self.processes[name].stop()
        until(lambda: self.processes[name].poll() is not None, 60)
        return self.processes[name].poll()

    def kill_all(self):
        for process in self.processes.values():
            process.kill()
        until(lambda: all(process.poll() is not None for process in self.processes.values()), 30)


def until(condition, timeout_s):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def take_batch(client, incarnation, cut, services):
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        reply = client.cut(CutRequest(incarnation=incarnation, cut=cut, step=cut, wait_s=5.0))
        if reply.groups is not None:
            return [decode_group(data) for data in reply.groups], reply.evaluations
        assert services.processes["actor"].poll() is None, services.processes["actor"].error_line()
    raise AssertionError(f"no batch {cut}: {reply.waiting_for}")


def test_an_actor_among_real_services(tmp_path):
    write_data(tmp_path)
    config = configure(tmp_path)
    services, weights = Services(tmp_path, config), Weights(config)
    try:
        services.start("search")
        services.start("replay")
        services.url("search")
        with BlockingReplayClient(services.url("replay")) as client:
            services.start("actor")
            incarnation = client.start(StartRequest(run="actor", step=0, cut=0, weights_url=weights.sender.url)).incarnation
            weights.publish(PolicyVersion(incarnation, 0))
            client.publish(PublishRequest(incarnation=incarnation, step=0, cut=0))
            first, evaluations = take_batch(client, incarnation, 0, services)

            trajectories = [t for group in first for t in group.trajectories]
            assert all(t.valid for t in trajectories)
            assert {int(v) for t in trajectories for v in t.versions[t.loss_mask]} == {PolicyVersion(incarnation, 0).pack()}
            assert max(weights.worst_error(t) for t in trajectories) <= 1e-3
            assert sum(t.searches for t in trajectories) > 0
            assert any("capital of" in p.text for t in trajectories for turn in t.turns for p in turn.passages)

            weights.change(seed=1)
            weights.publish(PolicyVersion(incarnation, 1))
            client.publish(PublishRequest(incarnation=incarnation, step=1, cut=1))
            second, more = take_batch(client, incarnation, 1, services)
            weights.change(seed=2)
            weights.publish(PolicyVersion(incarnation, 2))
            client.publish(PublishRequest(incarnation=incarnation, step=2, cut=2))
            third, most = take_batch(client, incarnation, 2, services)

            newest = {int(v) for g in [*second, *third] for t in g.trajectories for v in t.versions[t.loss_mask]}
            assert newest <= {PolicyVersion(incarnation, step).pack() for step in range(3)}
            assert len(newest) > 1
            assert all(group.lag(2) <= config.replay.max_staleness for group in third)

            rounds = [*evaluations, *more, *most]
            assert [(r.version, r.asked, r.questions) for r in rounds] == [(PolicyVersion(incarnation, 0).pack(), 6, 6)]

            status = client.status()
            assert status.actors[0].gauges["weight_updates"] >= 2
            assert status.actors[0].gauges["tokens_generated"] > 0
            started = descendants(services.processes["actor"].pid)
            assert len(started) >= 3
            assert services.end("actor") == 0
            assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]
    finally:
        services.kill_all()
        weights.sender.close()


def test_an_engine_that_cannot_start_is_one_line_and_leaves_nothing(tmp_path):
    write_data(tmp_path)
    configure(tmp_path)
    become_subreaper()
    before = set(descendants(os.getpid()))
    settings = ("replay.url=http://127.0.0.1:9", "generator.kv_cache_gib=0.00001")
    argv = [
        sys.executable,
        str(ROOT / "bin" / "actor"),
        str(tmp_path / "config.toml"),
        *(a for s in settings for a in ("--set", s)),
    ]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("actor: generator 0 could not start (exit status 1: ValueError: ")
    assert set(descendants(os.getpid())) <= before
