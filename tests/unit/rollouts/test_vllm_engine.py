"""The engine wrapper around an engine that answers as the test says; with vLLM itself it is tested among the integration tests."""

import asyncio

import pytest

from async_search_rl.config import parse_config
from async_search_rl.errors import EngineError
from rollouts import vllm_engine
from rollouts.protocol import make_actions
from rollouts.vllm_engine import VllmEngine

PATIENCE_S = 10.0


class Core:
    """Has sent nothing."""

    def __init__(self):
        self.outputs_queue = asyncio.Queue()

    async def get_output_async(self):
        return await self.outputs_queue.get()


class Inner:
    """Notes what it is asked and answers at once, save for the call that ``hangs``."""

    errored = False

    def __init__(self, hangs=""):
        self.engine_core, self.hangs, self.calls = Core(), hangs, []

    async def answer(self, call, *args):
        self.calls.append((call, *args))
        if call == self.hangs:
            await asyncio.Event().wait()
        return [None]

    async def pause_generation(self, mode, clear_cache):
        assert (mode, clear_cache) == ("keep", False)
        await self.answer("pause")

    async def resume_generation(self):
        await self.answer("resume")

    async def collective_rpc(self, method, args):
        return await self.answer(method, *args)


def wrapped(inner, tokenizer, **sections):
    return VllmEngine(inner, make_actions("text", tokenizer), parse_config(sections), None, version=1)


def run(scenario):
    async def bounded():
        async with asyncio.timeout(PATIENCE_S):
            await scenario()

    asyncio.run(bounded())


def test_a_swap_pauses_commits_and_resumes(tokenizer):
    async def scenario():
        inner = Inner()
        engine = wrapped(inner, tokenizer)
        await engine.commit(2)
        assert inner.calls == [("pause",), ("weights_commit",), ("resume",)]
        assert (engine.version, engine.stats().updates, engine.dead) == (2, 1, False)

    run(scenario)


@pytest.mark.parametrize("hangs", ["pause", "weights_commit", "resume"])
def test_an_idle_engine_that_hangs_in_a_swap_is_dead_at_the_deadline(tokenizer, monkeypatch, hangs):
    monkeypatch.setattr(vllm_engine, "_ANSWER_TIMEOUT_S", 0.01)

    async def scenario():
        engine = wrapped(Inner(hangs), tokenizer)
        with pytest.raises(EngineError, match=rf"the swap to version 2 failed: .*answer {hangs} within 0\.01 s"):
            await engine.commit(2)
        assert engine.dead
        assert engine.stats().updates == 0

    run(scenario)


@pytest.mark.parametrize("staging", ["device", "host"])
def test_workers_are_told_where_to_put_what_they_receive(tokenizer, staging):
    async def scenario():
        inner = Inner()
        await wrapped(inner, tokenizer, weights={"staging": staging}).begin(b"offer")
        assert inner.calls == [("weights_begin", b"offer", staging)]

    run(scenario)
