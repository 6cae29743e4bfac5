"""The part that lives inside vLLM's worker processes: new weights are staged beside the running model, then swapped in.

The engine wrapper calls these methods by name on every worker (tensor-parallel rank). Staging runs on a thread of its own while the
worker goes on generating; only :meth:`WeightExtension.weights_commit` touches the model, and only while generation is paused.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, Protocol

from async_search_rl.errors import WeightSyncError
from async_search_rl.weights.device import device_name
from async_search_rl.weights.member import WeightMember
from rollouts.vllm_compat import load_into_running_model


class Staging(Protocol):
    """Weights on their way."""

    def state(self) -> str:
        """``idle``, ``receiving``, ``ready``, or ``failed: why``."""

    def take(self) -> Iterable[tuple[str, Any]]:
        """The staged ``(name, tensor)`` pairs in the checkpoint's format, once."""


class FolderStaging:
    """Stages the safetensors files of a model folder."""

    def __init__(self, folder: str) -> None:
        self._tensors: list[tuple[str, Any]] = []
        self._state = "receiving"
        threading.Thread(target=self._read, args=(Path(folder),), daemon=True, name="weights-from-folder").start()

    def state(self) -> str:
        """See :meth:`Staging.state`."""
        return self._state

    def take(self) -> Iterable[tuple[str, Any]]:
        """See :meth:`Staging.take`."""
        tensors, self._tensors = self._tensors, []
        return tensors

    def _read(self, folder: Path) -> None:
        from safetensors.torch import load_file

        try:
            files = sorted(folder.glob("*.safetensors"))
            if not files:
                raise WeightSyncError(f"{folder} must hold safetensors files, got none")
            self._tensors = [pair for file in files for pair in load_file(file).items()]
            self._state = "ready"
        except Exception as error:
            self._state = f"failed: {error}"


class WeightExtension:
    """Mixed into vLLM's worker class; ``self`` is the worker."""

    _weight_member: WeightMember | None = None
    _weight_staging: Staging | None = None

    def guard_against(self, owner: int) -> None:
        """End this worker and its engine core as soon as the process ``owner`` has died without stopping them."""
        core = os.getpid() if os.getppid() == owner else os.getppid()
        handle = os.pidfd_open(owner)
        threading.Thread(target=_end_with, args=(handle, core), daemon=True, name="owner-guard").start()

    def weights_device(self) -> str:
        """Name of this worker's device, as the weight sender knows it."""
        return device_name(self.device)  # type: ignore[attr-defined]

    def weights_begin(self, offer: bytes, staging: Literal["device", "host"]) -> None:
        """Start to receive the publication that ``offer`` (an encoded Offer) describes, into ``staging`` (`weights.staging`)."""
        if self._weight_member is None:
            self._weight_member = WeightMember(self.device, staging)  # type: ignore[attr-defined]
        self._weight_member.begin(offer, self.rank)  # type: ignore[attr-defined]
        self._weight_staging = self._weight_member

    def weights_from_folder(self, folder: str) -> None:
        """Start to read the weights of a model folder."""
        self._weight_staging = FolderStaging(folder)

    def weights_state(self) -> str:
        """State of what is being staged."""
        return "idle" if self._weight_staging is None else self._weight_staging.state()

    def weights_abort(self) -> None:
        """Give up what is being received."""
        if self._weight_member is not None:
            self._weight_member.abort()
        self._weight_staging = None

    def weights_commit(self) -> None:
        """Put the staged weights into the model. Generation must be paused.

        Raises:
            WeightSyncError: nothing is staged completely.
        """
        staging, self._weight_staging = self._weight_staging, None
        if staging is None or staging.state() != "ready":
            raise WeightSyncError(f"weights must be ready to commit, got {'idle' if staging is None else staging.state()}")
        load_into_running_model(self, staging.take())


def _end_with(handle: int, core: int) -> None:
    select.select([handle], [], [])
    if core != os.getpid():
        with contextlib.suppress(ProcessLookupError):  # another worker was faster
            os.kill(core, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
