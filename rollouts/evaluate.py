"""`bin/evaluate`: scores model folders on the held-out questions, without a learner or a replay service.

In: the configuration and one or more model folders of one architecture. Out: for each the means over its episodes, all together, by
data source and by hops. One engine serves all folders, one after the other; it waits for retrieval, which is started here unless
`retrieval.url` names a running service.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from async_search_rl.config.schema import Config
from async_search_rl.errors import ConfigError, DataError, DeadlineError, EngineError, ServiceError, WeightSyncError
from async_search_rl.http import announced_url
from async_search_rl.launch import pieces
from async_search_rl.launch.process import LocalProcess
from async_search_rl.questions import Question, read_questions
from async_search_rl.trajectory import Trajectory
from async_search_rl.version import PolicyVersion
from rollouts.agent import Agent
from rollouts.episode import Episode, refused
from rollouts.generator import check_model, engine_seed, make_agent
from rollouts.prompts import Prompts
from rollouts.protocol import make_actions
from rollouts.supervisor import ended
from rollouts.vllm_compat import prepare_environment
from search.client import SearchClient

_STAGING_TIMEOUT_S = 600.0
_POLL_S = 0.05
_SEARCH_URL_FILE = "search.url"


async def evaluate(config: Config, models: Sequence[str], report_file: Path | None = None) -> list[dict[str, Any]]:
    """One report a model folder, in order (see :func:`report`); as JSON in ``report_file`` too.

    Raises:
        ConfigError, DataError: no held-out questions, a folder that is no model, or a file that cannot be written.
        EngineError: the engine did not start, or died.
        ServiceError: every episode of a model ended by a fault.
    """
    if not config.data.eval:
        raise ConfigError("data.eval must name the held-out questions, got none")
    if report_file is not None and not os.access(report_file.parent, os.W_OK):
        raise ConfigError(f"the report must go to a folder that can be written, got {str(report_file)!r}")
    questions = read_questions(config.data.eval)[: config.data.eval_questions]
    prepare_environment(config)
    for model in models:
        check_model(with_model(config, model))
    async with retrieval(config) as served:
        reports = await _score(with_model(served, models[0]), models, questions)
    if report_file is not None:
        await asyncio.to_thread(report_file.write_text, json.dumps(reports, indent=1) + "\n", encoding="utf-8")
    return reports


async def _score(config: Config, models: Sequence[str], questions: Sequence[Question]) -> list[dict[str, Any]]:
    from rollouts.vllm_engine import VllmEngine

    tokenizer = check_model(config)
    actions = make_actions(config.rollout.action_tokens, tokenizer)
    prompts = Prompts(tokenizer, config.data, config.rollout.max_prompt_tokens)
    version = PolicyVersion(0, 0)
    engine = await VllmEngine.start(config, actions, tokenizer.eos_id, version.pack(), engine_seed(config.run.seed, 0))
    reports = []
    try:
        async with SearchClient.from_config(config) as search:
            agent = make_agent(config, engine, search.search, actions, tokenizer)
            for step, model in enumerate(models):
                if step:
                    await _load(engine, model, version._replace(step=step).pack())
                start = time.monotonic()
                episodes = await play_all(agent, prompts, questions, config)
                _require_played(model, episodes, engine.dead)
                reports.append({"model": model, "seconds": time.monotonic() - start, **report(questions, episodes)})
    finally:
        await engine.close()
    return reports


async def play_all(agent: Agent, prompts: Prompts, questions: Sequence[Question], config: Config) -> list[Trajectory]:
    """One episode a question, ``rollout.running_evaluations`` at a time, at ``rollout.eval_temperature``.

    A question that cannot be asked (its prompt is too long) makes a fault, as it does in a run.
    """
    places = asyncio.Semaphore(config.rollout.running_evaluations)

    async def play(question: Question) -> Trajectory:
        async with places:
            try:
                episode = Episode(prompts.ids(question))
            except DataError as error:
                return refused(str(error))
            return await agent.play(episode, question.answers, config.rollout.eval_temperature)

    return list(await asyncio.gather(*(play(question) for question in questions)))


def _require_played(model: str, episodes: Sequence[Trajectory], engine_dead: bool) -> None:
    """Refuse figures that say nothing of the model."""
    fault = next((episode.fault for episode in episodes if episode.fault), None)
    if engine_dead:
        raise EngineError(f"the engine died while {model} was evaluated: {fault}")
    if not any(episode.valid for episode in episodes):
        raise ServiceError(f"not one episode of {model} could be played; first fault: {fault}")


def report(questions: Sequence[Question], episodes: Sequence[Trajectory]) -> dict[str, Any]:
    """Means over valid episodes: ``all``, and ``by_source`` and ``by_hops`` where the questions say so; the first fault."""
    pairs = list(zip(questions, episodes, strict=True))
    by_source = {q.data_source for q in questions if q.data_source}
    by_hops = {q.hops for q in questions if q.hops}
    return {
        "all": means(episodes),
        "by_source": {source: means(e for q, e in pairs if q.data_source == source) for source in sorted(by_source)},
        "by_hops": {str(hops): means(e for q, e in pairs if q.hops == hops) for hops in sorted(by_hops)},
        "fault": next((e.fault for e in episodes if e.fault), None),
    }


def means(episodes: Iterable[Trajectory]) -> dict[str, float]:
    """Means over the valid ones of ``episodes``; ``valid`` is their share, ``questions`` how many there are in all."""
    everything = list(episodes)
    valid = [episode for episode in everything if episode.valid]
    result = {"questions": float(len(everything)), "valid": len(valid) / max(1, len(everything))}
    if valid:
        rows = [{"reward": e.reward or 0.0, **e.reward_parts, "searches": e.searches, "length": e.length} for e in valid]
        result |= {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}
        result["answered"] = sum(episode.outcome == "answered" for episode in valid) / len(valid)
    return result


def table(reports: Sequence[dict[str, Any]]) -> str:
    """The reports as text: one line a model and subset, and one for the first fault of a model, if there was any."""
    names = ("questions", "valid", "exact_match", "f1", "searches", "answered", "length")
    lines = [" ".join([f"{'model':<40}", f"{'questions of':<14}", *(f"{name:>11}" for name in names)])]
    for entry in reports:
        subsets = [("all", entry["all"]), *entry["by_source"].items(), *((f"hops = {h}", m) for h, m in entry["by_hops"].items())]
        for subset, values in subsets:
            cells = (f"{values[name]:>11.3f}" if name in values else f"{'-':>11}" for name in names)
            lines.append(" ".join([f"{entry['model'][-40:]:<40}", f"{subset:<14}", *cells]))
        if entry["fault"]:
            lines.append(f"{entry['model'][-40:]:<40} first fault: {entry['fault']}")
    return "\n".join(lines)


def with_model(config: Config, model: str) -> Config:
    """``config`` with another model folder."""
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=model))


@asynccontextmanager
async def retrieval(config: Config) -> AsyncIterator[Config]:
    """The configuration with the address of a retrieval service: the configured one, or one that runs inside the block."""
    if config.retrieval.url:
        yield config
        return
    name = f"{config.run.name}-evaluate"
    config = msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, name=name))
    announced = config.run.folder / _SEARCH_URL_FILE
    announced.unlink(missing_ok=True)
    pieces.write_config(config)
    process = LocalProcess(pieces.search(config), config.run.folder / "logs" / "search.log")
    try:
        url = await _announced(process, announced, config.launch.start_timeout_s)
        yield msgspec.structs.replace(config, retrieval=msgspec.structs.replace(config.retrieval, url=url))
    finally:
        process.stop()
        if not await ended([process], config.launch.stop_timeout_s):
            process.kill()
            await ended([process], config.launch.stop_timeout_s)


async def _announced(process: LocalProcess, path: Path, timeout_s: float) -> str:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        url = announced_url(path)
        if url is not None:
            return url
        if process.poll() is not None:
            raise EngineError(f"the search service could not start: {process.error_line()}")
        await asyncio.sleep(_POLL_S)
    raise DeadlineError(f"the search service must be ready within {timeout_s:g} s (launch.start_timeout_s), it is not")


async def _load(engine: Any, folder: str, version: int) -> None:
    """Load another model folder into the running engine."""
    await engine.begin_from(folder)
    deadline = time.monotonic() + _STAGING_TIMEOUT_S
    while set(states := await engine.states()) != {"ready"}:
        if "receiving" not in states or time.monotonic() > deadline:
            raise WeightSyncError(f"the weights of {folder} must be readable within {_STAGING_TIMEOUT_S:g} s, got {states[0]}")
        await asyncio.sleep(_POLL_S)
    await engine.commit(version)
