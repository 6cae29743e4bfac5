"""What a run needs before anything is started: model folder, questions, corpus, free ports, packages. Quick; imports nothing.

In: the configuration. Out: findings, one a line; `bin/launch` refuses to start at the first failure, `bin/doctor` prints them all.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from async_search_rl.config import Config
from async_search_rl.errors import ConfigError
from async_search_rl.http import port_is_free

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
_LOCAL_BACKENDS = ("auto", "bm25", "tantivy", "rank_bm25", "dense", "hybrid")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at; ``text`` says what was found, or what must hold and what is there instead."""

    subject: str
    level: Literal["ok", "warning", "failure"]
    text: str


def require_startable(config: Config) -> None:
    """Refuse a run that cannot start.

    Raises:
        ConfigError: the first failure of :func:`findings`.
    """
    for finding in findings(config):
        if finding.level == "failure":
            raise ConfigError(finding.text)


def findings(config: Config) -> Iterator[Finding]:
    """Findings about what ``config`` names, from the cheapest to the dearest."""
    yield from _model(config)
    yield from _questions(config)
    yield from _corpus(config)
    yield from _ports(config)
    yield from _packages()


def has_chat_template(folder: Path) -> bool:
    """Whether the tokenizer in ``folder`` has a chat template, in its own file or in its configuration.

    Raises:
        ValueError: the configuration is not JSON.
    """
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    path = folder / "tokenizer_config.json"
    return path.is_file() and bool(_json(path).get("chat_template"))


def _model(config: Config) -> Iterator[Finding]:
    if not config.model.path:
        yield Finding("model", "failure", "model.path must be set to the folder of a transformers causal LM, got ''")
        return
    folder = Path(config.model.path)
    if not (folder / "config.json").is_file():
        yield Finding("model", "failure", f"model.path must be a folder with config.json, got {str(folder)!r}")
        return
    try:
        kind = _json(folder / "config.json").get("model_type", "unnamed")
    except ValueError as error:
        yield Finding("model", "failure", f"{folder / 'config.json'} must be JSON: {error}")
        return
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        yield Finding("model", "failure", f"model.path must hold *.safetensors, got none in {str(folder)!r}")
        return
    size = sum(path.stat().st_size for path in weights)
    yield Finding("model", "ok", f"{folder}: {kind}, {size / 1e6:,.0f} MB of weights")
    yield _tokenizer(config, folder)


def _tokenizer(config: Config, folder: Path) -> Finding:
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        wanted = " or ".join(_TOKENIZERS)
        return Finding("tokenizer", "failure", f"model.path must hold a tokenizer ({wanted}), got none in {str(folder)!r}")
    try:
        has_template = has_chat_template(folder)
    except ValueError as error:
        return Finding("tokenizer", "failure", f"{folder / 'tokenizer_config.json'} must be JSON: {error}")
    if config.data.prompt == "chat" and not has_template:
        return Finding(
            "tokenizer", "failure", f"data.prompt = 'chat' needs a chat template, got a tokenizer without one in {str(folder)!r}"
        )
    return Finding("tokenizer", "ok", "present" + (", with a chat template" if has_template else ""))


def _questions(config: Config) -> Iterator[Finding]:
    for key, path, needed in (("data.train", config.data.train, True), ("data.eval", config.data.eval, False)):
        if path:
            yield _file(key, path)
        elif needed:
            yield Finding(key, "failure", f"{key} must be set, got ''")
        else:
            yield Finding(key, "warning", f"{key} is empty: nothing will be evaluated")


def _corpus(config: Config) -> Iterator[Finding]:
    retrieval = config.retrieval
    if retrieval.url or not config.launch.start_search or retrieval.backend not in _LOCAL_BACKENDS:
        return
    if retrieval.corpus:
        yield _file("retrieval.corpus", retrieval.corpus)
    else:
        yield Finding("retrieval.corpus", "failure", "retrieval.corpus must be set where bin/search is started here, got ''")


def _ports(config: Config) -> Iterator[Finding]:
    wanted = [
        ("weights", config.weights.host, config.weights.port),
        ("replay", config.replay.host, 0 if config.replay.url else config.replay.port),
        ("retrieval", config.retrieval.host, 0 if config.retrieval.url else config.retrieval.port),
    ]
    fixed = [(section, host, port) for section, host, port in wanted if port]
    for section, host, port in fixed:
        others = [other for other, _, taken in fixed if taken == port and other != section]
        if others:
            yield Finding("port", "failure", f"{section}.port must differ from {others[0]}.port, got {port} for both")
        elif port_is_free(host, port):
            yield Finding("port", "ok", f"{section} can bind {host}:{port}")
        else:
            yield Finding("port", "failure", f"{section}.port must be free, got {host}:{port}, which cannot be bound")


def _packages() -> Iterator[Finding]:
    for package in ("torch", "transformers", "vllm", "deepspeed"):
        if importlib.util.find_spec(package) is None:
            yield Finding("packages", "failure", f"{package} must be installed: pip install 'async-search-rl[cpu]' or [gpu]")


def _file(key: str, path: str) -> Finding:
    try:
        with Path(path).open("rb") as file:
            if not file.read(1):
                return Finding(key, "failure", f"{key} must not be empty, got the empty file {path!r}")
    except OSError as error:
        return Finding(key, "failure", f"{key} must be a readable file, got {path!r}: {error.strerror}")
    return Finding(key, "ok", f"{path}: {Path(path).stat().st_size / 1e6:,.1f} MB")


def _json(path: Path) -> dict[str, object]:
    value = json.loads(path.read_text(encoding="utf-8"))
    return value if isinstance(value, dict) else {}
