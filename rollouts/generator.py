"""One generator process: builds an engine and everything around it from the configuration, runs the actor loop, ends cleanly.

In: the configuration and a name. Out: the reason why the replay service let it go. Nothing waits for it; it waits for the engine to
start, and then never for more than one long poll. A stop signal ends it; groups that ran then are issued again elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from async_search_rl.config.schema import Config
from async_search_rl.errors import ConfigError, DataError
from async_search_rl.http import announced_url, read_token, stop_signal
from async_search_rl.questions import Message
from async_search_rl.replay.client import ReplayClient
from async_search_rl.weights.receiver import WeightReceiver
from rollouts.actor_loop import ActorLoop
from rollouts.agent import Agent, Search
from rollouts.engine import Engine
from rollouts.gauges import Gauges
from rollouts.observation import Observations
from rollouts.prompts import Prompts
from rollouts.protocol import ActionFormat, make_actions
from rollouts.tokenizer import Tokenizer, load_tokenizer, require_model_folder
from rollouts.vllm_compat import prepare_environment
from search.client import SearchClient
from search.schema import Passage

REPLAY_URL_FILE = "replay.url"
SEARCH_MARGIN_S = 5.0
"""Seconds beyond the client's own deadline after which the agent gives a search up."""
_AUTOGROUP = Path("/proc/self/autogroup")
_AUTOGROUP_TRIES = 30
_AUTOGROUP_PAUSE_S = 0.1
"""Linux takes one such write in this time, from all unprivileged processes together."""

_log = logging.getLogger(__name__)


async def generate(config: Config, name: str, index: int, ready: Callable[[], None] | None = None) -> str:
    """Run generator number ``index`` of a node until the replay service or a signal ends it; the reason.

    ``ready`` is called once the engine has started.

    Raises:
        ConfigError, DataError: the configuration or the model folder cannot work; nothing heavy was started.
        EngineError: the engine did not start, or died.
    """
    url, token = replay_url(config), read_token(config.security)
    prepare_environment(config)
    yield_cores(config.generator.niceness)
    tokenizer = check_model(config)
    actions = make_actions(config.rollout.action_tokens, tokenizer)
    from rollouts.vllm_engine import VllmEngine

    engine = await VllmEngine.start(config, actions, tokenizer.eos_id, seed=engine_seed(config.run.seed, index))
    gauges = Gauges()
    try:
        devices = await engine.weight_devices()
        receiver = WeightReceiver(None, name, len(devices), ",".join(devices), token)
        async with ReplayClient(url, token) as replay, SearchClient.from_config(config) as search:
            agent = make_agent(config, engine, counted(search.search, gauges), actions, tokenizer)
            prompts = Prompts(tokenizer, config.data, config.rollout.max_prompt_tokens)
            loop = ActorLoop(name, config, engine, agent, prompts, replay, receiver, gauges)
            if ready is not None:
                ready()
            try:
                return await _until_signal(loop)
            finally:
                await receiver.close()
    finally:
        await engine.close()


def yield_cores(niceness: int) -> None:
    """Let the other processes of this machine go first, the learner above all; the engine's processes inherit it.

    Where Linux schedules each session as a group, a process is nice within its session only, so that the group is made so too,
    unless the system forbids it, which is logged.
    """
    os.nice(niceness)
    if niceness and _AUTOGROUP.exists():
        try:
            _set_group_niceness(niceness)
        except OSError as error:
            _log.warning("generator.niceness holds within this session only: %s cannot be written: %s", _AUTOGROUP, error.strerror)


def _set_group_niceness(niceness: int) -> None:
    for tries_left in reversed(range(_AUTOGROUP_TRIES)):
        try:
            _AUTOGROUP.write_text(str(niceness), encoding="ascii")
            return
        except BlockingIOError:
            if not tries_left:
                raise
            time.sleep(_AUTOGROUP_PAUSE_S * random.uniform(1.0, 2.0))


def check_actor(config: Config) -> None:
    """Refuse what would fail in every generator before one is started; quick, loads nothing.

    Raises:
        ConfigError, DataError: naming the key or the file.
    """
    replay_url(config)
    require_model_folder(config.model.path)


def check_model(config: Config) -> Tokenizer:
    """The tokenizer of ``model.path``, which must be a model folder with whole weights and fit the configuration.

    Raises:
        DataError: naming what is missing or damaged, for instance the chat template with ``data.prompt = "chat"``.
        ConfigError: observations have no room in ``rollout.max_observation_tokens``.
    """
    require_model_folder(config.model.path)
    for weights in sorted(Path(config.model.path).glob("*.safetensors")):
        _require_whole(weights)
    tokenizer = load_tokenizer(config.model.path)
    _observations(config, tokenizer)
    if config.data.prompt == "chat":
        tokenizer.chat([Message("user", config.data.template)])
    return tokenizer


def make_agent(config: Config, engine: Engine, search: Search, actions: ActionFormat, tokenizer: Tokenizer) -> Agent:
    """The agent that ``config`` describes."""
    rollout = config.rollout
    observations = _observations(config, tokenizer)
    return Agent(engine, search, actions, observations, rollout, config.reward, config.retrieval.timeout_s + SEARCH_MARGIN_S)


def counted(search: Search, gauges: Gauges) -> Search:
    """``search``, counting those that wait."""

    async def find(query: str, topk: int) -> Sequence[Passage]:
        gauges.episodes_searching += 1
        try:
            return await search(query, topk)
        finally:
            gauges.episodes_searching -= 1

    return find


def engine_seed(run_seed: int, index: int) -> int:
    """A seed for generator ``index``, other in every process, so that no two engines sample the same continuations."""
    return (run_seed * 1_000_003 + index * 7_919 + os.getpid()) % (1 << 31)


def replay_url(config: Config) -> str:
    """Address of the replay service: ``replay.url``, or what the service announced in the run's folder.

    Raises:
        ConfigError: neither is there.
    """
    if config.replay.url:
        return config.replay.url
    announced = config.run.folder / REPLAY_URL_FILE
    url = announced_url(announced)
    if url is None:
        raise ConfigError(f"replay.url must be set, or {announced} be written by a running replay service; got neither")
    return url


def _observations(config: Config, tokenizer: Tokenizer) -> Observations:
    return Observations(tokenizer, config.rollout.max_observation_tokens, config.rollout.space_after_tag)


def _require_whole(weights: Path) -> None:
    """Check header and length, which takes milliseconds whatever the size."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(weights, "numpy"):
            return
    except (SafetensorError, OSError) as error:
        raise DataError(f"{weights} must be a whole safetensors file: {error}") from error


async def _until_signal(loop: ActorLoop) -> str:
    stop = stop_signal()
    running, stopping = asyncio.ensure_future(loop.run()), asyncio.ensure_future(stop.wait())
    await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if running.done():
        return running.result()
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    return "asked to stop"
