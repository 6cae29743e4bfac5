"""What pieces of the learner's work cost: any of it, packing against padding, chunked against whole logits, and a profile.

In: work as a function, a plain loop, or sizes. Out: seconds and memory, as :class:`Cost` or as plain maps.
"""

from __future__ import annotations

import cProfile
import pstats
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from benchmarks.common import alternating
from benchmarks.learner_models import PlainLoop, padded_rows
from learner.batch import Batch, MicroBatch
from learner.logprobs import chunked_logprobs

GIB = 2**30


@dataclass(frozen=True)
class Cost:
    """What a piece of work took."""

    seconds: float
    """Wall time, the device's work included."""
    host_s: float
    """Processor seconds of this process, which other processes on a busy machine disturb less."""
    peak_gib: float
    """Device memory beyond what was held before."""


def measured(work: Callable[[], Any], device: torch.device) -> Cost:
    """Do ``work`` and say what it took."""
    cuda = device.type == "cuda"
    before = 0
    if cuda:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    began, host_began = time.perf_counter(), time.process_time()
    work()
    if cuda:
        torch.cuda.synchronize(device)
    peak = (torch.cuda.max_memory_allocated(device) - before) / GIB if cuda else 0.0
    return Cost(time.perf_counter() - began, time.process_time() - host_began, peak)


def measure_padded(loop: PlainLoop, batch: Batch, micro_batches: list[MicroBatch], device: torch.device) -> dict[str, Any]:
    """Forward and backward over packed rows and over padded ones with the same number of slots, in the plain loop."""
    slots = max(sum(micro.layout.lengths) for micro in micro_batches)
    rows = padded_rows(batch, slots, device)
    model = loop.module.model

    def packed() -> None:
        for micro in micro_batches:
            loop(micro.input_ids_T, micro.layout, micro.positions_N)[0].sum().backward()
        loop.module.zero_grad()

    def padded() -> None:
        model.set_attn_implementation("sdpa")
        for ids_BT, members in rows:
            mask_BT = torch.arange(ids_BT.shape[1])[None] < torch.from_numpy(batch.lengths_S[list(members)])[:, None]
            hidden_BTd = model.get_decoder()(input_ids=ids_BT, attention_mask=mask_BT.long().to(device)).last_hidden_state
            picked = torch.zeros(ids_BT.shape, dtype=torch.bool)
            for row, i in enumerate(members):
                picked[row, : batch.lengths_S[i]] = torch.from_numpy(batch.trajectories[i].loss_mask.copy())
            hidden_Nd = hidden_BTd[:, :-1][picked[:, 1:].to(device)]
            targets_N = ids_BT[:, 1:][picked[:, 1:].to(device)]
            model.get_output_embeddings()(hidden_Nd, targets_N)[0].sum().backward()
        loop.module.zero_grad()
        model.set_attn_implementation(f"packed_{loop.module.attention}")

    seconds: dict[str, list[float]] = {"packed": [], "padded": []}
    for _, name in alternating(["packed", "padded"], 4):
        seconds[name].append(measured(packed if name == "packed" else padded, device).seconds)
    speeds = {name: batch.tokens / min(took[1:]) for name, took in seconds.items()}
    used = batch.tokens / sum(ids.numel() for ids, _ in rows)
    return {
        "packed_tokens_per_s": round(speeds["packed"]),
        "padded_tokens_per_s": round(speeds["padded"]),
        "ratio": round(speeds["packed"] / speeds["padded"], 3),
        "padding_when_padded": round(1 - used, 4),
    }


def measure_logits(tokens: int, vocabulary: int, device: torch.device) -> dict[str, Any]:
    """Log-probabilities and their gradient, by chunks and with the whole [tokens, vocabulary] matrix: seconds and peak memory.

    0 tokens: 2048 on CPU, 32768 on a GPU; vocabulary 0: 4096 on CPU, 151936 on a GPU.
    """
    cuda = device.type == "cuda"
    tokens = tokens or (32768 if cuda else 2048)
    vocabulary = vocabulary or (151936 if cuda else 4096)
    hidden, dtype = (1536, torch.bfloat16) if cuda else (128, torch.float32)
    torch.manual_seed(0)
    states_Nd = torch.randn(tokens, hidden, device=device, dtype=dtype, requires_grad=True)
    weight_Vd = (0.02 * torch.randn(vocabulary, hidden, device=device)).to(dtype).requires_grad_()
    targets_N = torch.randint(vocabulary, (tokens,), device=device)

    def chunked() -> None:
        chunked_logprobs(states_Nd, weight_Vd, targets_N)[0].sum().backward()  # type: ignore[no-untyped-call]

    def whole() -> None:
        logits_NV = functional.linear(states_Nd, weight_Vd).float()
        torch.log_softmax(logits_NV, -1).gather(-1, targets_N[:, None]).sum().backward()  # type: ignore[no-untyped-call]

    result: dict[str, Any] = {"tokens": tokens, "vocabulary": vocabulary, "hidden": hidden}
    for name, work in (("chunked", chunked), ("whole", whole)):
        costs = []
        for _ in range(4):
            states_Nd.grad = weight_Vd.grad = None
            costs.append(measured(work, device))
        fastest = min(costs[1:], key=lambda cost: cost.seconds)
        result[name] = {"seconds": round(fastest.seconds, 4), "peak_gib": round(fastest.peak_gib, 3) if cuda else None}
    return result


def profile(step: Callable[[], None]) -> dict[str, list[str]]:
    """Where the time of two steps goes: functions of the host by their own seconds, kernels of the device by share."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(2):
        step()
    profiler.disable()
    rows = sorted(pstats.Stats(profiler).stats.items(), key=lambda item: -item[1][2])[:20]  # type: ignore[attr-defined]
    host = [f"{own:.3f} s {calls} {Path(file).name}:{line} {function}" for (file, line, function), (_, calls, own, _, _) in rows]
    if not torch.cuda.is_available():
        return {"host": host, "device": []}
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as traced:
        began = time.perf_counter()
        for _ in range(2):
            step()
        torch.cuda.synchronize()
        wall_us = (time.perf_counter() - began) * 1e6
    kernels = sorted(traced.key_averages(), key=lambda row: -row.self_device_time_total)
    busy = sum(row.self_device_time_total for row in kernels) / wall_us
    shares = [f"{100 * row.self_device_time_total / wall_us:.1f}% {row.count} {row.key[:110]}" for row in kernels[:18]]
    return {"host": host, "device": [f"{100 * busy:.1f}% of {wall_us / 1e6:.3f} s busy", *shares]}
