"""One vLLM engine: token ids in, sampled ids with log-probabilities and versions out, and new weights in the middle of a sentence.

Requests run at once, each awaited by its episode. An update is staged inside the workers while they generate;
:meth:`VllmEngine.commit` then pauses (requests and KV cache are kept), swaps, and resumes. Versions are right to the token: the
engine sends its outputs and its answer to the pause through one ordered channel, so whatever was counted when that answer is
there was sampled by the old weights. Prompts carry the version as cache salt, so a prefix computed by old weights is never used
for a new turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import os
import time
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

from async_search_rl.config.schema import Config
from async_search_rl.errors import DeadlineError, EngineError
from rollouts import vllm_compat
from rollouts.busy_clock import BusyClock
from rollouts.engine import EngineStats, Sample
from rollouts.protocol import ActionFormat
from rollouts.token_versions import TokenVersions

EXTENSION = "rollouts.vllm_worker.WeightExtension"
_DRAIN_TIMEOUT_S = 30.0
_ANSWER_TIMEOUT_S = 600.0

_Answer = TypeVar("_Answer")


class VllmEngine:
    """See the module. Made by :meth:`start`, ended by :meth:`close`; belongs to one event loop."""

    def __init__(self, inner: Any, actions: ActionFormat, config: Config, eos_id: int | None, version: int | None) -> None:
        self._inner = inner
        self._rollout = config.rollout
        self._staging = config.weights.staging
        self._actions = actions
        self._eos_id = eos_id
        self._book = TokenVersions(version)
        self._drained = vllm_compat.count_outputs(inner, self._book.count)
        self._requests = 0
        self._updates = 0
        self._stall_s = self._last_stall_s = 0.0
        self._use = BusyClock(time.monotonic())
        self._broken = ""

    @classmethod
    async def start(
        cls, config: Config, actions: ActionFormat, eos_id: int | None, version: int | None = None, seed: int = 0
    ) -> VllmEngine:
        """Start an engine on ``config.model.path``; its weights count as ``version`` (``None``: unknown until the first commit).

        The event loop stands still for the seconds that this takes.

        Raises:
            EngineError: in one line, when vLLM cannot be imported or the engine does not start; nothing is left running.
        """
        vllm_compat.prepare_environment(config)
        try:
            inner = vllm_compat.start_engine(config, EXTENSION, bool(actions.stop_strings), seed)
        except Exception as error:  # vLLM reports what it cannot use by whatever went wrong in it
            raise EngineError(f"the engine for {config.model.path} did not start: {_one_line(error)}") from error
        engine = cls(inner, actions, config, eos_id, version)
        # Import machinery may keep this frame; it must not keep the engine beyond close().
        del inner
        await engine._call("guard_against", os.getpid())
        return engine

    @property
    def version(self) -> int | None:
        """Packed version that new tokens are sampled from."""
        return self._book.version

    @property
    def dead(self) -> bool:
        """Whether no request can succeed any more."""
        return bool(self._broken or self._inner is None or self._inner.errored)

    async def generate(self, prompt_ids: Sequence[int], max_tokens: int, temperature: float) -> Sample:
        """See :meth:`rollouts.engine.Engine.generate`."""
        request = f"r{self._requests}"
        self._requests += 1
        prompt = {"prompt_token_ids": list(prompt_ids), "cache_salt": f"weights {self.version}"}
        self._book.open(request)
        self._use.change(1, time.monotonic())
        tokens = 0
        try:
            completion = await self._complete(request, prompt, self._sampling(max_tokens, temperature))
            token_ids, logprobs = vllm_compat.sampled(completion)
            tokens = len(token_ids)
        finally:
            self._use.change(-1, time.monotonic())
            versions = self._book.close(request, tokens)
        if not all(math.isfinite(value) for value in logprobs):
            raise EngineError(f"log-probabilities must be finite, got {[v for v in logprobs if not math.isfinite(v)][:3]}")
        return Sample(token_ids, logprobs, versions)

    async def weight_devices(self) -> list[str]:
        """Name of each worker's device, as the weight sender knows it."""
        return [str(name) for name in await self._call("weights_device")]

    async def begin(self, offer: bytes) -> None:
        """Start to receive a publication (an encoded Offer) in every worker; generation goes on."""
        await self._call("weights_begin", offer, self._staging)

    async def begin_from(self, folder: str) -> None:
        """Start to read the weights of a model folder in every worker; generation goes on."""
        await self._call("weights_from_folder", folder)

    async def states(self) -> list[str]:
        """What each worker says of the weights it is staging: ``idle``, ``receiving``, ``ready``, or ``failed: why``."""
        return [str(state) for state in await self._call("weights_state")]

    async def abort(self) -> None:
        """Give up what is being staged."""
        await self._call("weights_abort")

    async def commit(self, version: int) -> None:
        """Swap the staged weights in; requests that run go on with them from their next token.

        Raises:
            EngineError: the swap failed; the engine is dead, for nobody knows what its weights are now.
        """
        start = time.monotonic()
        try:
            await _answered("pause", self._inner.pause_generation(mode="keep", clear_cache=False))
            await self._drain()
            await self._call("weights_commit")
            self._book.advance(version)
            await _answered("resume", self._inner.resume_generation())
        except Exception as error:
            self._broken = f"the swap to version {version} failed: {_one_line(error)}"
            raise EngineError(self._broken) from error
        self._updates += 1
        self._last_stall_s = time.monotonic() - start
        self._stall_s += self._last_stall_s

    def stats(self) -> EngineStats:
        """Totals and gauges."""
        book = self._book
        busy_s, idle_s = self._use.read(time.monotonic())
        return EngineStats(
            running=book.running,
            tokens=book.tokens,
            updates=self._updates,
            in_flight_updates=book.requests_across_updates,
            stall_s=self._stall_s,
            last_stall_s=self._last_stall_s,
            busy_s=busy_s,
            idle_s=idle_s,
        )

    async def close(self) -> None:
        """Stop the engine's processes; running requests fail."""
        inner, self._inner = self._inner, None
        await vllm_compat.stop_outputs(inner)
        await asyncio.to_thread(inner.shutdown)
        # Collected now, for vLLM's destructor cannot run while the interpreter shuts down.
        del inner
        gc.collect()

    async def _complete(self, request: str, prompt: dict[str, Any], sampling: Any) -> Any:
        """Run one request to its end; its completion."""
        if self.dead:
            raise EngineError(self._broken or "the engine is dead")
        output = None
        try:
            async with contextlib.aclosing(self._inner.generate(prompt, sampling, request)) as outputs:
                async for latest in outputs:
                    output = latest
        except asyncio.CancelledError:
            raise
        except Exception as error:
            raise EngineError(f"the engine failed a request: {_one_line(error)}") from error
        if output is None or not output.outputs:
            raise EngineError("the engine must answer a request, got nothing")
        return output.outputs[0]

    def _sampling(self, max_tokens: int, temperature: float) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        stop_ids = list(self._actions.stop_token_ids)
        if self._eos_id is not None and not self._rollout.ignore_eos:
            stop_ids.append(self._eos_id)
        strings = list(self._actions.stop_strings)
        return SamplingParams(
            temperature=temperature,
            top_p=self._rollout.top_p if temperature > 0 else 1.0,
            max_tokens=max_tokens,
            ignore_eos=self._rollout.ignore_eos,
            stop=strings,
            include_stop_str_in_output=bool(strings),
            stop_token_ids=stop_ids,
            detokenize=bool(strings),
            skip_special_tokens=False,
            logprobs=0,
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    async def _drain(self) -> None:
        """Let every output that the engine sent before it paused be counted."""
        deadline = time.monotonic() + _DRAIN_TIMEOUT_S
        while not self._drained():
            if time.monotonic() > deadline:
                raise DeadlineError(f"outputs sent before a pause must be read within {_DRAIN_TIMEOUT_S} s, got some left")
            await asyncio.sleep(0)

    async def _call(self, method: str, *args: Any) -> list[Any]:
        """Run a method of the worker extension on every worker."""
        return list(await _answered(method, self._inner.collective_rpc(method, args=args)))


async def _answered(call: str, answer: Awaitable[_Answer]) -> _Answer:
    """What the engine answers.

    Raises:
        DeadlineError: nothing in time.
    """
    try:
        async with asyncio.timeout(_ANSWER_TIMEOUT_S):
            return await answer
    except TimeoutError as error:
        raise DeadlineError(f"the engine must answer {call} within {_ANSWER_TIMEOUT_S:g} s, it did not") from error


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and "validation error" in lines[0]:
        del lines[0]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
