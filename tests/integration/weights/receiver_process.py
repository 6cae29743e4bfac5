"""A receiver in a process of its own, as an engine is: one control half, ``workers`` members, no engine.

Prints one JSON line for each thing that happens: {"event": "polling"}, {"event": "offer", ...}, {"event": "received", "version",
"sums", "seconds", "epoch"} or {"event": "failed", "version", "epoch", "error"}. ``--stall join|transfer`` makes it fall silent at
that point.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
import time
import warnings
from typing import Any

import torch

from async_search_rl.codec import decode_message
from async_search_rl.weights import member as member_module
from async_search_rl.weights.device import device_name
from async_search_rl.weights.member import WeightMember
from async_search_rl.weights.receiver import WeightReceiver
from async_search_rl.weights.schema import Offer
from tests.integration.weights.channel import checksums


def say(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


class LocalWorkers:
    """Members in this very process, in place of an engine's workers."""

    def __init__(self, count: int, devices: list[str], staging: Any, stall: str) -> None:
        self.members = [WeightMember(devices[i % len(devices)], staging) for i in range(count)]
        self._stall = stall

    async def begin(self, offer: bytes) -> None:
        message = decode_message(offer, Offer)
        say("offer", version=message.version, epoch=message.epoch, transport=message.transport, world=message.world)
        if self._stall == "join":
            await asyncio.sleep(3600)
        for worker, member in enumerate(self.members):
            member.begin(offer, worker)

    async def states(self) -> list[str]:
        return [member.state() for member in self.members]

    async def abort(self) -> None:
        for member in self.members:
            member.abort()


def stall_in_transfer() -> None:
    """Stop this process dead as soon as the first bucket has landed."""

    def stop(*_: object) -> None:
        say("stalled", pid=os.getpid())
        time.sleep(3600)

    member_module.tensor_digest = stop  # type: ignore[assignment]


async def run(arguments: argparse.Namespace) -> None:
    workers = LocalWorkers(arguments.workers, arguments.device.split(","), arguments.staging, arguments.stall)
    names = [device_name(device) for device in arguments.device.split(",")]
    receiver = WeightReceiver(
        arguments.url, arguments.name, arguments.workers, ",".join(names), arguments.token or None, have=arguments.have
    )
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)

    async def follow_commands() -> None:
        while line := await reader.readline():
            receiver.update_url(line.decode().strip())

    commands = asyncio.create_task(follow_commands())
    say("polling")
    async for offer in receiver.offers():
        began = time.monotonic()
        if await receiver.receive(offer, workers):
            seconds = time.monotonic() - began
            taken = [member.take() for member in workers.members]
            say("received", version=offer.version, epoch=offer.epoch, seconds=seconds, sums=[checksums(pairs) for pairs in taken])
        else:
            say("failed", version=offer.version, epoch=offer.epoch, error=receiver.error)
    commands.cancel()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("name")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--staging", default="device")
    parser.add_argument("--token", default="")
    parser.add_argument("--have", type=int, default=None)
    parser.add_argument("--stall", choices=("", "join", "transfer"), default="")
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        warnings.simplefilter("error")
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    torch.set_num_threads(1)
    if arguments.stall == "transfer":
        stall_in_transfer()
    asyncio.run(run(arguments))


if __name__ == "__main__":
    main()
