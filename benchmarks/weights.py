"""Speed of the weight channel: one sender, several receivers in processes of their own, and the bare transport to compare with.

    python benchmarks/weights.py --mib 512 --receivers 1 2 3 --json OUT
    python benchmarks/weights.py --mib 4096 --device cuda:0 --receiver-device cuda:1 --json OUT

For each number of receivers, the medians over the publications after the first: ``stage_s`` (what the learner's main thread waits
for), ``publish_call_s``, ``broadcast_s`` (offers out until the last bucket is out), ``receive_s`` (the slowest receiver, offer
until every digest is right), ``megabytes_per_s`` (weights over ``receive_s``, counted once), and for gloo between hosts and NCCL
to one receiver ``raw_megabytes_per_s``: the same buckets over a bare group, without handshake and digests. ``first_receive_s`` has
the building of the group in it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from async_search_rl.config.replay import WeightsSection  # noqa: E402
from async_search_rl.version import PolicyVersion  # noqa: E402
from async_search_rl.weights.device import device_name  # noqa: E402
from async_search_rl.weights.digest import tensor_digest  # noqa: E402
from async_search_rl.weights.groups import open_group  # noqa: E402
from async_search_rl.weights.member import WeightMember  # noqa: E402
from async_search_rl.weights.plan import plan_buckets  # noqa: E402
from async_search_rl.weights.receiver import WeightReceiver  # noqa: E402
from async_search_rl.weights.rendezvous import serve_store  # noqa: E402
from async_search_rl.weights.schema import TensorSpec  # noqa: E402
from async_search_rl.weights.sender import WeightSender  # noqa: E402

PATIENCE_S = 300.0
HIDDEN = 2048
RAW_PASSES = 6


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="size of the weights, MiB (bfloat16)")
    parser.add_argument("--bucket-mib", type=float, default=64.0, help="size of a bucket, MiB")
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 2], help="numbers of receivers to measure")
    parser.add_argument("--publications", type=int, default=6, help="publications a measurement")
    parser.add_argument("--device", default="cpu", help="where the learner stages")
    parser.add_argument("--receiver-device", default="cpu", help="where engines are, one for all or one each with commas")
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measure each number of receivers, print a line for each, write the JSON."""
    arguments = parse_arguments()
    torch.set_num_threads(1)
    if arguments.child:
        run_child(arguments.child)
        return
    specs = make_specs(arguments.mib)
    result: dict[str, Any] = {
        "weights_megabytes": sum(spec.numel for spec in specs) * 2 / 1e6,
        "bucket_mib": arguments.bucket_mib,
        "device": arguments.device,
        "receiver_device": arguments.receiver_device,
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "digest_megabytes_per_s": measure_digest(torch.device(arguments.device)),
        "by_receivers": {},
    }
    for count in arguments.receivers:
        measured = measure_channel(arguments, specs, count)
        if transport := bare_transport(arguments.device, arguments.receiver_device, count):
            devices = (arguments.device, arguments.receiver_device)
            measured["raw_megabytes_per_s"] = measure_raw(specs, arguments.bucket_mib, count, transport, devices)
            measured["share_of_raw"] = measured["megabytes_per_s"] / measured["raw_megabytes_per_s"]
        result["by_receivers"][str(count)] = measured
        print(f"{count} receivers: " + ", ".join(f"{key} {value:.4g}" for key, value in measured.items()), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def make_specs(mib: int) -> list[TensorSpec]:
    """Square matrices of about ``mib`` MiB in all."""
    count = max(1, mib * (1 << 20) // (HIDDEN * HIDDEN * 2))
    return [TensorSpec(name=f"layers.{i}.weight", shape=(HIDDEN, HIDDEN), dtype="bfloat16") for i in range(count)]


def measure_digest(device: torch.device) -> float:
    """MB/s of the checksum over 64 MiB; the best of three."""
    flat = torch.randint(-(2**31), 2**31 - 1, (16 << 20,), dtype=torch.int32, device=device)
    tensor_digest(flat)
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        tensor_digest(flat)
        seconds.append(time.perf_counter() - began)
    return flat.numel() * 4 / 1e6 / min(seconds)


def measure_channel(arguments: argparse.Namespace, specs: Sequence[TensorSpec], count: int) -> dict[str, float]:
    """Publish to ``count`` receivers through the whole channel."""
    plan = plan_buckets(specs, int(arguments.bucket_mib * (1 << 20)))
    devices = arguments.receiver_device.split(",")
    section = msgspec.convert({"bucket_mib": arguments.bucket_mib}, WeightsSection)
    sender = WeightSender(section, None, arguments.device)
    sender.start()
    children = [start_child("receive", sender.url, f"r{i}", devices[i % len(devices)]) for i in range(count)]
    weights = {spec.name: torch.randn(spec.shape, dtype=torch.bfloat16, device=arguments.device) for spec in specs}
    rounds = []
    try:
        for child in children:
            read_line(child)
        for step in range(arguments.publications):
            rounds.append(publish_once(sender, plan, weights, step, children))
    finally:
        sender.close()
        for child in children:
            child.kill()
            child.wait()
    later = rounds[1:] or rounds
    medians = {key: statistics.median(one[key] for one in later) for key in rounds[0]}
    megabytes = sum(spec.numel for spec in specs) * 2 / 1e6
    return {"first_receive_s": rounds[0]["receive_s"], **medians, "megabytes_per_s": megabytes / medians["receive_s"]}


def publish_once(
    sender: WeightSender,
    plan: list[list[TensorSpec]],
    weights: dict[str, torch.Tensor],
    step: int,
    children: list[subprocess.Popen[str]],
) -> dict[str, float]:
    """Stage, publish, and wait until every receiver has said how long it took."""
    began = time.perf_counter()
    staged = sender.acquire_buffers(plan, PolicyVersion(1, step).pack())
    for name, tensor in weights.items():
        staged.write(name, tensor)
    if staged.device.type == "cuda":
        torch.cuda.synchronize()
    staged_at = time.perf_counter()
    sender.publish(staged)
    published_at = time.perf_counter()
    received = [json.loads(read_line(child)) for child in children]
    if any(one["version"] != staged.version for one in received):
        raise RuntimeError(f"every receiver must hold version {staged.version}, got {received}")
    return {
        "stage_s": staged_at - began,
        "publish_call_s": published_at - staged_at,
        "broadcast_s": sender.stats()["broadcast_s"],
        "receive_s": max(one["seconds"] for one in received),
        "publish_to_received_s": time.perf_counter() - staged_at,
    }


def bare_transport(sender: str, receiver: str, count: int) -> Literal["gloo", "nccl"] | None:
    """What a bare group between these devices would use; ``None`` where there is no such group to compare with."""
    if sender == receiver == "cpu":
        return "gloo"
    on_gpus = sender.startswith("cuda:") and receiver.startswith("cuda:")
    return "nccl" if on_gpus and count == 1 and sender != receiver else None


def measure_raw(
    specs: Sequence[TensorSpec], bucket_mib: float, count: int, transport: Literal["gloo", "nccl"], devices: tuple[str, str]
) -> float:
    """MB/s of the same buckets over a bare group from the first device to the second; the median of the passes after the first."""
    sizes = [sum(spec.numel for spec in bucket) for bucket in plan_buckets(specs, int(bucket_mib * (1 << 20)))]
    store = serve_store("127.0.0.1")
    numbers = [str(size) for size in sizes]
    place = [transport, devices[1], str(store.port)]
    children = [start_child("raw", *place, str(rank), str(count + 1), *numbers) for rank in range(1, count + 1)]
    try:
        device = torch.device(devices[0])
        flats = [torch.randn(size, device=device).bfloat16() for size in sizes]
        group = open_group(transport, "127.0.0.1", store.port, 1, 0, count + 1, device, PATIENCE_S)
        seconds = []
        for _ in range(RAW_PASSES):
            began = time.perf_counter()
            for flat in flats:
                group.start(flat, PATIENCE_S).wait()
            seconds.append(time.perf_counter() - began)
    finally:
        for child in children:
            child.wait(PATIENCE_S)
    return sum(sizes) * 2 / 1e6 / statistics.median(seconds[1:])


def start_child(*arguments: str) -> subprocess.Popen[str]:
    """This file again, as a receiver."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, __file__, "--child", *arguments], stdout=subprocess.PIPE, text=True, env=environment)


def read_line(child: subprocess.Popen[str]) -> str:
    """The child's next line."""
    if child.stdout is None:
        raise RuntimeError("the child's output must be a pipe")
    line = child.stdout.readline()
    if not line:
        raise RuntimeError("a receiver ended before it had received everything")
    return line


def run_child(arguments: list[str]) -> None:
    """The child's main function."""
    kind, *rest = arguments
    if kind == "raw":
        transport, device, port, rank, world, *sizes = rest
        receive_raw(transport, torch.device(device), int(port), int(rank), int(world), [int(size) for size in sizes])
    else:
        asyncio.run(receive_offers(*rest))


def receive_raw(transport: Any, device: torch.device, port: int, rank: int, world: int, sizes: list[int]) -> None:
    """Take the buckets over a bare group."""
    flats = [torch.empty(size, dtype=torch.bfloat16, device=device) for size in sizes]
    group = open_group(transport, "127.0.0.1", port, 1, rank, world, device, PATIENCE_S)
    for _ in range(RAW_PASSES):
        for flat in flats:
            group.start(flat, PATIENCE_S).wait()


class OneWorker:
    """A member in this process, in place of an engine's workers."""

    def __init__(self, member: WeightMember) -> None:
        self._member = member

    async def begin(self, offer: bytes) -> None:
        """See :class:`async_search_rl.weights.receiver.Workers`."""
        self._member.begin(offer)

    async def states(self) -> list[str]:
        """See :class:`async_search_rl.weights.receiver.Workers`."""
        return [self._member.state()]

    async def abort(self) -> None:
        """See :class:`async_search_rl.weights.receiver.Workers`."""
        self._member.abort()


async def receive_offers(url: str, name: str, device: str) -> None:
    """Receive through the whole channel and print the seconds of each publication."""
    member = WeightMember(device)
    receiver = WeightReceiver(url, name, 1, device_name(device), None)
    print("ready", flush=True)
    async for offer in receiver.offers():
        began = time.perf_counter()
        if await receiver.receive(offer, OneWorker(member)):
            member.take()
            print(json.dumps({"version": offer.version, "seconds": time.perf_counter() - began}), flush=True)


if __name__ == "__main__":
    main()
