"""A learner with a replay service of its own and actors that make groups up: the whole exchange over real sockets."""

import asyncio
import re
import signal
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from async_search_rl.codec import encode_group
from async_search_rl.config import Config
from async_search_rl.questions import Question, write_questions
from async_search_rl.replay.client import BlockingReplayClient, ReplayClient
from async_search_rl.replay.schema import LeaseRequest, PutRequest, Ticket
from async_search_rl.replay.serve import URL_FILE
from async_search_rl.trajectory import Group
from async_search_rl.version import PolicyVersion
from learner.checkpoint import list_checkpoints, read_state
from tests.learner_cases import learner_command, learner_config, learner_records, model_folder, start_process, trajectory

pytestmark = pytest.mark.integration
DEADLINE_S = 180.0
WARNING = re.compile(r"(?i)warn|error|deprecat|traceback")


def config_with_questions(folder: Path) -> Config:
    write_questions(folder / "train.jsonl", [Question(id=f"q{i}", question=f"Who {i}?", answers=("x",)) for i in range(20)])
    return learner_config(
        folder,
        model_folder(folder / "start"),
        run={"max_steps": 3},
        data={"train": str(folder / "train.jsonl")},
        replay={"max_staleness": 1, "poll_s": 1.0},
        checkpoint={"every": 2},
    )


def made_up(ticket: Ticket, step: int, rng: np.random.Generator) -> Group:
    members = tuple(trajectory(rng, float(i % 2), step=step) for i in range(ticket.group_size))
    return Group(ticket=ticket.ticket, attempt=ticket.attempt, question_id=ticket.question.id, actor="a", trajectories=members)


def announced_url(url_file: Path) -> str:
    """The service's address once it is there."""
    ends_at = time.monotonic() + DEADLINE_S
    while not url_file.exists():
        assert time.monotonic() < ends_at
        time.sleep(0.05)
    return url_file.read_text().strip()


async def act(url_file: Path, ended: asyncio.Event) -> int:
    """Lease, make groups up, put; until the service says stop or the learner has ended. Groups that were accepted."""
    rng, accepted, known = np.random.default_rng(0), 0, None
    url = await asyncio.to_thread(announced_url, url_file)
    async with ReplayClient(url, retry_s=1.0) as client:
        while not ended.is_set():
            request = LeaseRequest(actor="a", running=[], want=4, want_evaluations=0, wait_s=0.5, version=known, known_policy=known)
            reply = await client.lease(request)
            if reply.stop is not None:
                break
            known = reply.policy.version if reply.policy is not None else known
            for ticket in reply.tickets:
                assert known is not None
                group = made_up(ticket, PolicyVersion.unpack(known).step, rng)
                result = await client.put(PutRequest(actor="a", group=encode_group(group)))
                accepted += result.result == "accepted"
    return accepted


async def train_with_made_up_groups(config: Config) -> tuple[int, str, int]:
    process = start_process(learner_command(config, None))
    ended = asyncio.Event()
    actor = asyncio.create_task(act(config.run.folder / URL_FILE, ended))
    output, _ = await asyncio.to_thread(process.communicate, timeout=DEADLINE_S)
    ended.set()
    return process.returncode, output, await asyncio.wait_for(actor, 30)


def test_a_learner_trains_on_what_actors_send_and_ends(tmp_path: Path) -> None:
    config = config_with_questions(tmp_path)
    returncode, output, accepted = asyncio.run(train_with_made_up_groups(config))
    assert returncode == 0, output
    assert output.startswith("memory a rank, GiB")
    assert not WARNING.search(output), output
    records = learner_records(config)
    assert [record["step"] for record in records] == [1, 2, 3]
    assert accepted >= 9
    assert max(record["lag_max"] for record in records) <= 1
    assert all(record["version"] == f"1.{record['step']}" for record in records)
    assert len({frozenset(record) for record in records}) == 1, "every step has the same keys"
    assert (config.run.folder / "model" / "model.safetensors").is_file()


def test_sigterm_while_waiting_for_a_batch_leaves_a_checkpoint_and_ends_well(tmp_path: Path) -> None:
    config = config_with_questions(tmp_path)
    process = start_process(learner_command(config, None))
    with BlockingReplayClient(announced_url(config.run.folder / URL_FILE), retry_s=10.0) as client:
        ends_at = time.monotonic() + DEADLINE_S
        while client.status().state != "running":
            assert time.monotonic() < ends_at
            time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert [read_state(c).step for c in list_checkpoints(config.run.folder / "checkpoints")] == [0]


def test_a_batch_that_never_comes_ends_the_learner_with_one_clear_line(tmp_path: Path) -> None:
    config = config_with_questions(tmp_path)
    section = msgspec.structs.replace(config.learner, batch_timeout_s=2.0)
    process = start_process(learner_command(msgspec.structs.replace(config, learner=section), None))
    output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert output.splitlines()[-1].startswith("learner: no batch came within 2 s: waiting for 3 of 3 groups"), output
    assert "Traceback" not in output
