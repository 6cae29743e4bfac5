"""The weight channel on GPUs: NCCL between devices, CUDA IPC on one, gloo through host memory, and the three side by side."""

from __future__ import annotations

import signal
import time

import pytest
import torch

from async_search_rl.weights.digest import tensor_digest
from async_search_rl.weights.ipc import export_handle
from tests.integration.weights.channel import PATIENCE_S, channel

DEVICES = torch.cuda.device_count() if torch.cuda.is_available() else 0
one_gpu = pytest.mark.skipif(DEVICES < 1, reason="needs a GPU")
two_gpus = pytest.mark.skipif(DEVICES < 2, reason="needs two GPUs")

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:The pynvml package is deprecated:FutureWarning")]


@one_gpu
@pytest.mark.parametrize("count", [1, 1000, 1 << 17, 9_000_001])
def test_the_digest_is_the_same_on_both_devices(count: int) -> None:
    numbers = torch.randn(count).bfloat16()
    assert tensor_digest(numbers.cuda()) == tensor_digest(numbers)


@one_gpu
@pytest.mark.parametrize("staging", ["device", "host"])
def test_ipc_on_one_device_gives_equal_bytes(staging: str) -> None:
    with channel("cuda:0") as c:
        receivers = [c.receiver(f"r{i}", "--device", "cuda:0", "--staging", staging) for i in range(2)]
        c.wait_until_polling("r0", "r1")
        for step in range(4):
            staged, expected = c.publish(step)
            for receiver in receivers:
                assert receiver.wait_for("offer")["transport"] == "ipc"
                assert c.received(receiver, staged.version)["sums"] == [expected]
            c.wait_until_polling("r0", "r1")
        assert c.sender.stats()["aborted"] == 0


@one_gpu
def test_a_killed_ipc_receiver_frees_the_copy_at_the_deadline() -> None:
    with channel("cuda:0", deadline_s=5.0) as c:
        bad = c.receiver("r0", "--device", "cuda:0", "--stall", "transfer")
        c.wait_until_polling("r0")
        c.publish(0)
        bad.wait_for("stalled")
        bad.process.send_signal(signal.SIGKILL)
        good = c.receiver("r1", "--device", "cuda:0")
        staged, expected = c.publish(1)
        assert good.wait_for("received", version=staged.version)["sums"] == [expected]
        assert c.sender.stats()["aborted"] == 1


@one_gpu
def test_gloo_carries_weights_staged_on_a_device_to_a_host() -> None:
    with channel("cuda:0") as c:
        receiver = c.receiver("r0", "--device", "cpu")
        staged, expected = c.publish(0)
        assert receiver.wait_for("offer")["transport"] == "gloo"
        assert c.received(receiver, staged.version)["sums"] == [expected]


@one_gpu
def test_gloo_on_request_reaches_the_device_of_the_sender() -> None:
    with channel("cuda:0", transport="gloo") as c:
        receiver = c.receiver("r0", "--device", "cuda:0")
        staged, expected = c.publish(0)
        assert receiver.wait_for("offer")["transport"] == "gloo"
        assert c.received(receiver, staged.version)["sums"] == [expected]


@one_gpu
def test_a_handle_is_plain_bytes_and_stays_the_same_over_publications() -> None:
    with channel("cuda:0") as c:
        staged, _ = c.publish(0)
        receiver = c.receiver("r0", "--device", "cuda:0")
        c.received(receiver, staged.version)
        assert len(staged.handles) == len(staged.flats)
        assert all(isinstance(handle, bytes) and len(handle) < 1024 for handle in staged.handles)
        assert len({*staged.handles}) == len(staged.handles)
        assert isinstance(export_handle(torch.zeros(1 << 20, device="cuda:0")), bytes)


@two_gpus
@pytest.mark.parametrize("staging", ["device", "host"])
def test_nccl_between_two_devices_gives_equal_bytes_and_keeps_its_group(staging: str) -> None:
    with channel("cuda:0") as c:
        receiver = c.receiver("r0", "--device", "cuda:1", "--staging", staging)
        c.wait_until_polling("r0")
        epochs = set()
        for step in range(4):
            staged, expected = c.publish(step)
            assert receiver.wait_for("offer")["transport"] == "nccl"
            said = c.received(receiver, staged.version)
            assert said["sums"] == [expected]
            epochs.add(said["epoch"])
            c.wait_until_polling("r0")
        assert len(epochs) == 1


@two_gpus
def test_two_engines_on_one_device_have_a_communicator_each() -> None:
    with channel("cuda:0") as c:
        receivers = [c.receiver(f"r{i}", "--device", "cuda:1") for i in range(2)]
        c.wait_until_polling("r0", "r1")
        for step in range(2):
            staged, expected = c.publish(step)
            said = [c.received(receiver, staged.version) for receiver in receivers]
            assert [one["sums"] for one in said] == [[expected]] * 2
            assert said[0]["epoch"] != said[1]["epoch"]
            c.wait_until_polling("r0", "r1")


@two_gpus
def test_one_publication_goes_out_by_all_three_transports() -> None:
    with channel("cuda:0") as c:
        devices = {"r0": "cuda:0", "r1": "cuda:1", "r2": "cpu"}
        receivers = {name: c.receiver(name, "--device", device) for name, device in devices.items()}
        c.wait_until_polling(*devices)
        staged, expected = c.publish(0)
        transports = {name: receiver.wait_for("offer")["transport"] for name, receiver in receivers.items()}
        assert transports == {"r0": "ipc", "r1": "nccl", "r2": "gloo"}
        for receiver in receivers.values():
            assert c.received(receiver, staged.version)["sums"] == [expected]


@two_gpus
def test_an_engine_over_both_devices_is_reached_through_host_memory() -> None:
    with channel("cuda:0") as c:
        receiver = c.receiver("r0", "--workers", "2", "--device", "cuda:0,cuda:1")
        staged, expected = c.publish(0)
        assert receiver.wait_for("offer")["transport"] == "gloo"
        assert c.received(receiver, staged.version)["sums"] == [expected] * 2


@two_gpus
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_an_nccl_receiver_that_dies_or_freezes_is_left_behind_and_the_sender_lives_on(blow: signal.Signals) -> None:
    with channel("cuda:0", deadline_s=8.0) as c:
        bad = c.receiver("r0", "--device", "cuda:1", "--stall", "transfer")
        c.wait_until_polling("r0")
        staged, expected = c.publish(0)
        bad.wait_for("stalled")
        bad.process.send_signal(blow)
        good = c.receiver("r1", "--device", "cuda:1")
        began = time.monotonic()
        assert good.wait_for("received", version=staged.version)["sums"] == [expected]
        assert time.monotonic() - began < PATIENCE_S
        newer, expected = c.publish(1)
        assert good.wait_for("received", version=newer.version)["sums"] == [expected]
