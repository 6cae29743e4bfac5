"""Speed of the learner's engine against a plain torch loop, of packing against padding, and of chunked logits against whole ones.

    python benchmarks/learner.py --shape demo --json OUT                       (CPU, float32)
    python benchmarks/learner.py --shape 135m 1.5b --tokens 65536 --json OUT   (one GPU, bfloat16)

All loops of one shape train on the same micro-batches with the same attention, loss, precision of master weights, AdamW and
clipping, one step each in turn; figures are medians over the steps after the first two. ``zero3`` is the engine as the learner sets
it up, ``zero3_stock`` the same without whole-block gathering and with DeepSpeed's default persistence, ``*_compiled`` has compiled
blocks. ``ratio`` is tokens/s over ``plain`` (``*_compiled`` over ``plain_compiled``), ``host_ratio`` the same of processor seconds.
``unpartitioned`` counts the parameters that ZeRO-3 keeps whole.
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

WARM_UP_STEPS = 2
STOCK_PERSISTENCE = 100_000
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
    parser.add_argument("--profile", action="store_true", help="list where the host's time goes in one zero3 step")
    parser.add_argument("--json", type=Path, help="write the result here")
    return parser.parse_args()


def main() -> None:
    """Measure each shape, then the logits; print and write the result."""
    options = parse_arguments()
    ranks = join_ranks(600.0)
    cuda = ranks.device.type == "cuda"
    result: dict[str, Any] = {"machine": machine(), "threads": torch.get_num_threads(), "shapes": {}}
    for shape in options.shape:
        result["shapes"][shape] = measure_shape(shape, options, ranks)
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
    result["logits"] = measure_logits(options, ranks.device)
    ranks.close()
    show(result)
    if options.json:
        write_json(options.json, result)


def measure_shape(shape: str, options: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """All loops of one shape, step by step in turn; then packing against padding."""
    device = ranks.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    batch = make_batch(shape, options.tokens)
    micro_batches = make_micro_batches(batch, options.micro_batch_tokens or (16384 if device.type == "cuda" else 4096), device)
    loops = {name: make_loop(name, shape, options, ranks, dtype) for name in loop_names(options)}
    costs: dict[str, list[Cost]] = {name: [] for name in loops}
    for _, name in alternating(list(loops), options.steps):
        costs[name].append(measured(lambda loop=loops[name]: train_step(loop, batch, micro_batches), device))  # type: ignore[misc]
    config = loops["plain"].module.model.config
    flops = training_flops(ModelShape.of(config), batch.lengths_S.tolist(), batch.trainable_tokens)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    peak_rate = peak_flops(name, "bfloat16" if dtype == torch.bfloat16 else "float32")
    figures: dict[str, Any] = {}
    for loop_name, loop in loops.items():
        counted = costs[loop_name][WARM_UP_STEPS:]
        step_s = statistics.median(cost.seconds for cost in counted)
        figures[loop_name] = {
            "step_s": round(step_s, 4),
            "host_s": round(statistics.median(cost.host_s for cost in counted), 4),
            "tokens_per_s": round(batch.tokens / step_s),
            "step_peak_gib": round(max(cost.peak_gib for cost in counted), 3),
            "mfu": round(flops / step_s / peak_rate, 4) if peak_rate else None,
            "unpartitioned": loop.unpartitioned if isinstance(loop, Engine) else None,
        }
    for loop_name, row in figures.items():
        base = "plain_compiled" if loop_name.endswith("_compiled") else "plain"
        row["ratio"] = round(row["tokens_per_s"] / figures[base]["tokens_per_s"], 3)
        row["host_ratio"] = round(figures[base]["host_s"] / row["host_s"], 3)
    return {
        "parameters": sum(p.numel() for p in loops["plain"].module.parameters()),
        "tokens": batch.tokens,
        "trainable_tokens": batch.trainable_tokens,
        "micro_batches": len(micro_batches),
        "dtype": str(dtype).removeprefix("torch."),
        "attention": loops["plain"].module.attention,
        "loops": figures,
        "padded": measure_padded(loops["plain"], batch, micro_batches, device),
        "profile": profile(loops["zero3"], batch, micro_batches) if options.profile else None,
    }


def loop_names(options: argparse.Namespace) -> list[str]:
    """Loops to measure, in order."""
    return ["plain", "zero3", "zero3_stock", *(["plain_compiled", "zero3_compiled"] if options.compile else [])]


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
    if name == "zero3_stock":
        section = msgspec.structs.replace(section, leaf_modules=False, persist_params_below=STOCK_PERSISTENCE)
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


def profile(engine: Engine, batch: Batch, micro_batches: list[MicroBatch]) -> list[str]:
    """Functions in which the host spends most of two steps: seconds in the function itself, calls, name."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(2):
        train_step(engine, batch, micro_batches)
    profiler.disable()
    rows = sorted(pstats.Stats(profiler).stats.items(), key=lambda item: -item[1][2])[:25]  # type: ignore[attr-defined]
    return [f"{own:.3f} s {calls} {Path(file).name}:{line} {function}" for (file, line, function), (_, calls, own, _, _) in rows]


def show(result: dict[str, Any]) -> None:
    """The figures as text."""
    for shape, found in result["shapes"].items():
        print(f"{shape}: {found['parameters'] / 1e6:.1f}M parameters, {found['tokens']} tokens a step, {found['attention']}")
        for name, row in found["loops"].items():
            print(f"  {name:<16}" + "  ".join(f"{key} {value}" for key, value in row.items() if value is not None))
        print("  packing        ", found["padded"])
        for line in found["profile"] or []:
            print("   ", line)
    print("logits", result["logits"])


if __name__ == "__main__":
    main()
