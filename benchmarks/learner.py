"""Speed of the learner's engine against a plain torch loop, of packing against padding, and of chunked logits against whole ones.

    python benchmarks/learner.py --shape demo --json OUT                       (CPU, float32)
    python benchmarks/learner.py --shape 135m 1.5b --tokens 65536 --json OUT   (one GPU, bfloat16)

All loops of one shape train on the same micro-batches with the same attention, loss, precision of master weights, AdamW and
clipping, one step each in turn (of large models one loop after the other); figures are medians over the steps after the first two.
``zero3`` is the engine as the learner sets it up: small models gathered once a step, others block by block; ``zero3_whole`` and
``zero3_blocks`` have the one or the other for any model. ``zero3_stock`` is ZeRO-3 without either and with DeepSpeed's default
persistence, ``*_compiled`` has compiled blocks. ``ratio`` is tokens/s over ``plain`` (``*_compiled`` over ``plain_compiled``),
``host_ratio`` the same of processor seconds. ``unpartitioned`` counts the parameters that ZeRO-3 keeps whole between steps.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.nn import functional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from async_search_rl.config.learner import LearnerSection, OptimizerSection  # noqa: E402
from benchmarks.common import alternating, machine, write_json  # noqa: E402
from benchmarks.learner_models import (  # noqa: E402
    SHAPES,
    PlainLoop,
    make_batch,
    make_micro_batches,
    make_model,
    micro_loss,
    padded_rows,
)
from learner.batch import Batch, MicroBatch  # noqa: E402
from learner.deepspeed_engine import Engine  # noqa: E402
from learner.flops import ModelShape, peak_flops, training_flops  # noqa: E402
from learner.loading import block_classes  # noqa: E402
from learner.logprobs import chunked_logprobs  # noqa: E402
from learner.policy import PackedPolicy  # noqa: E402
from learner.ranks import Ranks, join_ranks  # noqa: E402

LOOPS = ["plain", "zero3", "zero3_blocks", "zero3_whole", "zero3_stock", "plain_compiled", "zero3_compiled"]
WARM_UP_STEPS = 2
STOCK_PERSISTENCE = 100_000
ONE_AT_A_TIME_ABOVE = 500_000_000
"""Parameters of a model of which only one loop is in memory at a time."""
LARGE_TENSOR = 1_000_000
"""Elements that no tensor of a batch has."""
GIB = 2**30


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=["demo"], help="models to measure")
    parser.add_argument("--tokens", type=int, default=13000, help="tokens a step")
    parser.add_argument("--micro-batch-tokens", type=int, default=0, help="token budget; 0: 4096 on CPU, 16384 on a GPU")
    parser.add_argument("--steps", type=int, default=8, help="steps a loop, the first two not counted")
    parser.add_argument("--compile", action="store_true", help="measure compiled blocks too")
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing in all loops")
    parser.add_argument("--logits-tokens", type=int, default=0, help="of the logits comparison; 0: 2048 on CPU, 32768 on a GPU")
    parser.add_argument("--logits-vocab", type=int, default=0, help="its vocabulary; 0: 4096 on CPU, 151936 on a GPU")
    parser.add_argument("--loops", nargs="+", choices=LOOPS, help="loops to measure; default: all, compiled ones with --compile")
    parser.add_argument("--no-logits", action="store_true", help="leave the logits comparison out")
    parser.add_argument("--profile", action="store_true", help="where the time of two steps goes, host and device")
    parser.add_argument("--json", type=Path, help="write the result here")
    return parser.parse_args()


def main() -> None:
    """Measure each shape, then the logits; print and write the result."""
    options = parse_arguments()
    ranks = join_ranks(600.0)
    result: dict[str, Any] = {"machine": machine(), "threads": torch.get_num_threads(), "shapes": {}}
    if not options.no_logits:
        result["logits"] = measure_logits(options, ranks.device)
        print("logits", result["logits"], flush=True)
    for shape in options.shape:
        measure_shape(shape, options, ranks, result)
    ranks.close()


def measure_shape(shape: str, options: argparse.Namespace, ranks: Ranks, whole_result: dict[str, Any]) -> None:
    """All loops of one shape, step by step in turn, a large model's one loop after the other; then packing against padding.

    What is found is printed, put into ``whole_result`` and written as soon as it is known, for a later loop may run out of memory.
    """
    device = ranks.device
    cuda = device.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    batch = make_batch(shape, options.tokens)
    micro_batches = make_micro_batches(batch, options.micro_batch_tokens or (16384 if cuda else 4096), device)
    outline = make_model(shape, torch.device("meta"), dtype, False)
    parameters = sum(p.numel() for p in outline.parameters())
    flops = training_flops(ModelShape.of(outline.config), batch.lengths_S.tolist(), batch.trainable_tokens)
    peak_rate = peak_flops(torch.cuda.get_device_name(device) if cuda else "cpu", str(dtype).removeprefix("torch."))
    result: dict[str, Any] = whole_result["shapes"].setdefault(shape, {})
    result |= {
        "parameters": parameters,
        "tokens": batch.tokens,
        "trainable_tokens": batch.trainable_tokens,
        "micro_batches": len(micro_batches),
        "dtype": str(dtype).removeprefix("torch."),
        "loops": {},
    }
    names = options.loops or loop_names(options)
    for together in [[name] for name in names] if parameters > ONE_AT_A_TIME_ABOVE else [names]:
        loops = {name: make_loop(name, shape, options, ranks, dtype) for name in together}
        costs: dict[str, list[Cost]] = {name: [] for name in loops}
        for _, name in alternating(list(loops), options.steps):
            costs[name].append(measured(lambda loop=loops[name]: train_step(loop, batch, micro_batches), device))  # type: ignore[misc]
        for name, loop in loops.items():
            result["loops"][name] = figures(loop, costs[name][WARM_UP_STEPS:], batch.tokens, flops, peak_rate)
            result["attention"] = loop.module.attention
        add_ratios(result["loops"])
        show(shape, result, list(loops))
        if "plain" in loops:
            result["padded"] = measure_padded(loops["plain"], batch, micro_batches, device)
            print("  packing        ", result["padded"], flush=True)
        for name in (name for name in loops if options.profile and name != "zero3_stock"):
            result[f"profile_{name}"] = profile(loops[name], batch, micro_batches)
            for place, lines in result[f"profile_{name}"].items():
                print(f"  profile of {name}, {place}:", *lines, sep="\n    ", flush=True)
        if options.json:
            write_json(options.json, whole_result)
        for loop in loops.values():
            discard(loop)
        del loops, loop
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()


def add_ratios(rows: dict[str, dict[str, Any]]) -> None:
    """Each loop's speed over the plain one's, where that is measured."""
    for name, row in rows.items():
        base = rows.get("plain_compiled" if name.endswith("_compiled") else "plain")
        if base:
            row["ratio"] = round(row["tokens_per_s"] / base["tokens_per_s"], 3)
            row["host_ratio"] = round(base["host_s"] / row["host_s"], 3)


def figures(loop: Any, counted: list[Cost], tokens: int, flops: float, peak_rate: float | None) -> dict[str, Any]:
    """One loop's medians."""
    step_s = statistics.median(cost.seconds for cost in counted)
    return {
        "step_s": round(step_s, 4),
        "host_s": round(statistics.median(cost.host_s for cost in counted), 4),
        "tokens_per_s": round(tokens / step_s),
        "step_peak_gib": round(max(cost.peak_gib for cost in counted), 3),
        "mfu": round(flops / step_s / peak_rate, 4) if peak_rate else None,
        "unpartitioned": loop.unpartitioned if isinstance(loop, Engine) else None,
    }


def discard(loop: Any) -> None:
    """End the loop and free its memory. DeepSpeed's caches hold a module for as long as the process lives, so it is emptied."""
    if isinstance(loop, Engine):
        loop.destroy()
    for tensor in gc.get_objects():
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.is_cuda and tensor.numel() > LARGE_TENSOR:
            tensor.untyped_storage().resize_(0)


def loop_names(options: argparse.Namespace) -> list[str]:
    """Loops to measure, in order."""
    eager = ["plain", "zero3", "zero3_blocks", "zero3_stock"]
    return [*eager, *(["plain_compiled", "zero3_compiled"] if options.compile else [])]


def make_loop(name: str, shape: str, options: argparse.Namespace, ranks: Ranks, dtype: torch.dtype) -> Any:
    """The loop of that name, with a model of its own."""
    model = make_model(shape, ranks.device, dtype, options.checkpointing)
    policy = PackedPolicy(model)
    optimizer = OptimizerSection(lr=1e-6, grad_clip=1.0)
    blocks = block_classes(model)
    compiled = name.endswith("_compiled")
    if name.startswith("plain"):
        if compiled:
            for block in (m for m in policy.modules() if type(m).__name__ in blocks):
                block.forward = torch.compile(block.forward, dynamic=True)  # type: ignore[method-assign]
        policy.train()
        return PlainLoop(policy, optimizer)
    section = LearnerSection(compile=compiled)
    if name.startswith("zero3_blocks"):
        section = msgspec.structs.replace(section, gather_whole_below=0)
    elif name == "zero3_whole":
        section = msgspec.structs.replace(section, gather_whole_below=10**12)
    elif name == "zero3_stock":
        section = msgspec.structs.replace(section, gather_whole_below=0, leaf_modules=False, persist_params_below=STOCK_PERSISTENCE)
    return Engine(policy, blocks=blocks, optimizer=optimizer, learner=section, ranks=ranks)


def train_step(loop: Any, batch: Batch, micro_batches: list[MicroBatch]) -> None:
    """Forward and backward over all micro-batches, then the optimiser step."""
    for index, micro in enumerate(micro_batches):
        logprobs = loop(micro.input_ids_T, micro.layout, micro.positions_N)
        loop.backward(micro_loss(batch, micro, logprobs), last=index == len(micro_batches) - 1)
    loop.step(1e-6)


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


def measure_logits(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Log-probabilities and their gradient, by chunks and with the whole [tokens, vocabulary] matrix: seconds and peak memory."""
    cuda = device.type == "cuda"
    tokens = options.logits_tokens or (32768 if cuda else 2048)
    vocabulary = options.logits_vocab or (151936 if cuda else 4096)
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


def profile(loop: Any, batch: Batch, micro_batches: list[MicroBatch]) -> dict[str, list[str]]:
    """Where two steps' time goes: functions of the host by their own seconds, kernels of the device by share."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(2):
        train_step(loop, batch, micro_batches)
    profiler.disable()
    rows = sorted(pstats.Stats(profiler).stats.items(), key=lambda item: -item[1][2])[:20]  # type: ignore[attr-defined]
    host = [f"{own:.3f} s {calls} {Path(file).name}:{line} {function}" for (file, line, function), (_, calls, own, _, _) in rows]
    if not torch.cuda.is_available():
        return {"host": host, "device": []}
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as traced:
        began = time.perf_counter()
        for _ in range(2):
            train_step(loop, batch, micro_batches)
        torch.cuda.synchronize()
        wall_us = (time.perf_counter() - began) * 1e6
    kernels = sorted(traced.key_averages(), key=lambda row: -row.self_device_time_total)
    busy = sum(row.self_device_time_total for row in kernels) / wall_us
    shares = [f"{100 * row.self_device_time_total / wall_us:.1f}% {row.count} {row.key[:110]}" for row in kernels[:18]]
    return {"host": host, "device": [f"{100 * busy:.1f}% of {wall_us / 1e6:.3f} s busy", *shares]}


def show(shape: str, found: dict[str, Any], names: list[str]) -> None:
    """The loops' figures as text."""
    sizes = f"{found['tokens']} tokens a step in {found['micro_batches']} micro-batches"
    print(f"{shape}: {found['parameters'] / 1e6:.1f}M parameters, {sizes}, {found['attention']}")
    for name in names:
        row = found["loops"][name]
        print(f"  {name:<16}" + "  ".join(f"{key} {value}" for key, value in row.items() if value is not None), flush=True)


if __name__ == "__main__":
    main()
