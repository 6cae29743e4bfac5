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
import gc
import statistics
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from async_search_rl.config.learner import LearnerSection, OptimizerSection  # noqa: E402
from benchmarks.common import alternating, machine, write_json  # noqa: E402
from benchmarks.learner_costs import Cost, measure_logits, measure_padded, measured, profile  # noqa: E402
from benchmarks.learner_models import (  # noqa: E402
    SHAPES,
    PlainLoop,
    make_batch,
    make_micro_batches,
    make_model,
    micro_loss,
)
from learner.batch import Batch, MicroBatch  # noqa: E402
from learner.deepspeed_engine import Engine  # noqa: E402
from learner.flops import ModelShape, peak_flops, training_flops  # noqa: E402
from learner.loading import block_classes  # noqa: E402
from learner.policy import PackedPolicy  # noqa: E402
from learner.ranks import Ranks, join_ranks  # noqa: E402

LOOPS = ["plain", "zero3", "zero3_blocks", "zero3_whole", "zero3_stock", "plain_compiled", "zero3_compiled"]
WARM_UP_STEPS = 2
STOCK_PERSISTENCE = 100_000
ONE_AT_A_TIME_ABOVE = 500_000_000
"""Parameters of a model of which only one loop is in memory at a time."""
LARGE_TENSOR = 1_000_000
"""Elements that no tensor of a batch has."""


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
        result["logits"] = measure_logits(options.logits_tokens, options.logits_vocab, ranks.device)
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
            result[f"profile_{name}"] = profile(lambda loop=loops[name]: train_step(loop, batch, micro_batches))  # type: ignore[misc]
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


def show(shape: str, found: dict[str, Any], names: list[str]) -> None:
    """The loops' figures as text."""
    sizes = f"{found['tokens']} tokens a step in {found['micro_batches']} micro-batches"
    print(f"{shape}: {found['parameters'] / 1e6:.1f}M parameters, {sizes}, {found['attention']}")
    for name in names:
        row = found["loops"][name]
        print(f"  {name:<16}" + "  ".join(f"{key} {value}" for key, value in row.items() if value is not None), flush=True)


if __name__ == "__main__":
    main()
