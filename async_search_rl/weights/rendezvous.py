"""How the members of one publication find each other in the sender's key-value store, and notice that one is gone.

Every member says that it has *joined*; when all have, the sender says *go* and all meet in the process group. While it waits,
every member *beats* and says how far it is. The sender may *abort* with a reason at any time. None of these calls waits; each side
polls. The store listens where the sender's control server does and knows no token: whoever can reach it must be trusted, as with
torch.distributed everywhere.
"""

from __future__ import annotations

import datetime
import socket
import time
from typing import NamedTuple

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from async_search_rl.errors import WeightSyncError

_STORE_TIMEOUT_S = 30.0


def serve_store(host: str) -> TCPStore:
    """A store that listens on a free port of ``host`` and on no other address (torch's own bind takes all of them).

    Raises:
        OSError: ``host`` is no address of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind((host, 0))
        listener.listen(1024)
        port = listener.getsockname()[1]
        own_address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        return TCPStore(
            own_address,
            port,
            is_master=True,
            timeout=datetime.timedelta(seconds=_STORE_TIMEOUT_S),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


def connect_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """A connection of its own to the store at ``host:port``; one that waits blocks the others that share it.

    Raises:
        WeightSyncError: nobody answers there within ``timeout_s``.
    """
    try:
        socket.create_connection((host, port), timeout_s).close()
        return TCPStore(host, port, is_master=False, timeout=datetime.timedelta(seconds=timeout_s))
    except (OSError, RuntimeError) as error:
        raise WeightSyncError(f"the sender's store at {host}:{port} must answer within {timeout_s:.0f} s: {error}") from error


def group_prefix(epoch: int) -> str:
    """Prefix of the keys by which the process group of ``epoch`` is built."""
    return f"epoch/{epoch}"


class Beat(NamedTuple):
    """A member's sign of life: its own clock, for nothing but to tell beats apart, and how many buckets it holds."""

    clock_ns: int
    landed: int


class Rendezvous:
    """One publication's keys: who joined, who still beats, whether to go or to stop."""

    def __init__(self, store: Store, epoch: int, version: int) -> None:
        self._store = PrefixStore(f"publication/{epoch}/{version}", store)

    def join(self, rank: int) -> None:
        """This member is ready to enter the group."""
        self.beat(rank)
        self._store.set(f"joined/{rank}", "1")

    def missing(self, world: int) -> list[int]:
        """Ranks 1 to ``world - 1`` that have not joined."""
        if self._store.check([f"joined/{rank}" for rank in range(1, world)]):
            return []
        return [rank for rank in range(1, world) if not self._store.check([f"joined/{rank}"])]

    def go(self) -> None:
        """All have joined: meet in the group."""
        self._store.set("go", "1")

    def may_go(self) -> bool:
        """Whether the sender said go."""
        return self._store.check(["go"])

    def beat(self, rank: int, landed: int = 0) -> None:
        """This member lives and holds ``landed`` checked buckets."""
        self._store.set(f"beat/{rank}", f"{time.monotonic_ns()} {landed}")

    def beats(self, world: int) -> dict[int, Beat]:
        """The last beat of each rank that gave one."""
        ranks = [rank for rank in range(1, world) if self._store.check([f"beat/{rank}"])]
        values = self._store.multi_get([f"beat/{rank}" for rank in ranks]) if ranks else []
        return {rank: Beat(*map(int, value.split())) for rank, value in zip(ranks, values, strict=True)}

    def abort(self, reason: str) -> None:
        """Tell every member to give this publication up."""
        self._store.set("abort", reason)

    def aborted(self) -> str:
        """The sender's reason for giving up; empty while it has not."""
        return self._store.get("abort").decode("utf-8", "replace") if self._store.check(["abort"]) else ""
