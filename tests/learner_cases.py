"""Small models, made-up groups and learner processes for the learner's tests."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from async_search_rl.config import Config, parse_config, to_toml
from async_search_rl.trajectory import NO_VERSION, Group, Outcome, Trajectory, Turn
from async_search_rl.version import PolicyVersion

ROOT = Path(__file__).resolve().parents[1]
LEARNER = ROOT / "bin" / "learner"
VOCABULARY = 96
_started: list[subprocess.Popen[str]] = []


def trajectory(
    rng: np.random.Generator, reward: float | None, *, step: int = 0, outcome: Outcome = "answered", turns: int = 2
) -> Trajectory:
    """A made-up episode of a few turns; ``reward=None`` is a fault."""
    ids = list(rng.integers(3, VOCABULARY, int(rng.integers(4, 9))))
    prompt, spans = len(ids), []
    for turn in range(turns):
        start = len(ids)
        ids += list(rng.integers(3, VOCABULARY, int(rng.integers(3, 8))))
        search = turn < turns - 1
        spans.append(Turn(start=start, end=len(ids), action="search" if search else "answer", query="q" if search else None))
        if search:
            ids += list(rng.integers(3, VOCABULARY, int(rng.integers(4, 12))))
    mask = np.zeros(len(ids), dtype=bool)
    for span in spans:
        mask[span.start : span.end] = True
    logprobs = np.where(mask, -np.log(VOCABULARY) - 0.3 * rng.random(len(ids)), 0).astype(np.float32)
    fault = reward is None
    return Trajectory(
        token_ids=np.array(ids, dtype=np.int32),
        loss_mask=mask,
        behaviour_logprobs=logprobs,
        versions=np.where(mask, PolicyVersion(1, step).pack(), NO_VERSION).astype(np.int64),
        prompt_length=prompt,
        turns=tuple(spans),
        reward=reward,
        reward_parts={} if fault else {"exact_match": float(reward or 0)},
        outcome="fault" if fault else outcome,
        answer=None if fault else "x",
        fault="the search failed" if fault else None,
    )


def groups(count: int, size: int = 4, seed: int = 0) -> list[Group]:
    """Groups of mixed rewards, some with an invalid member."""
    rng = np.random.default_rng(seed)
    made = []
    for ticket in range(count):
        rewards: list[float | None] = [float(i % 2) for i in range(size)]
        if ticket % 3 == 1:
            rewards[-1] = None
        members = tuple(trajectory(rng, reward) for reward in rewards)
        made.append(Group(ticket=ticket, attempt=1, question_id=f"q{ticket}", actor="a", trajectories=members))
    return made


def model_folder(path: Path, *, tied: bool = True, seed: int = 0) -> Path:
    """A two-layer Llama with random weights and a tokenizer of whole words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    wrapped.save_pretrained(path)
    return path


def learner_config(folder: Path, start: Path, /, **sections: dict[str, Any]) -> Config:
    """A configuration for small runs; keys of ``sections`` come on top."""
    tree: dict[str, dict[str, Any]] = {
        "run": {"name": "run", "dir": str(folder), "max_steps": 4},
        "model": {"path": str(start), "dtype": "float32"},
        "rollout": {"group_size": 4},
        "replay": {"batch_groups": 3},
        "optimizer": {"lr": 1e-3},
        "learner": {"micro_batch_tokens": 120, "persist_params_below": 100, "batch_timeout_s": 120.0},
        "checkpoint": {"every": 0},
        "logging": {"wandb": "disabled"},
    }
    for name, values in sections.items():
        tree.setdefault(name, {}).update(values)
    return parse_config(tree)


def learner_command(config: Config, recorded: Path | None, *, ranks: int = 1, program: Path = LEARNER) -> list[str]:
    """The command line of a learner, its configuration written beside its run's folder."""
    path = Path(config.run.dir) / f"{config.run.name}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_toml(config))
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    return [sys.executable, *torchrun, str(program), str(path), *(["--recorded", str(recorded)] if recorded else [])]


def start_process(command: Sequence[str]) -> subprocess.Popen[str]:
    """A process in a session of its own, on one thread a rank, without the network settings of this one's launcher."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    process = subprocess.Popen(
        command, env=env, cwd=ROOT, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    _started.append(process)
    return process


def kill_what_is_left() -> None:
    """End the processes a failed test has left."""
    while _started:
        process = _started.pop()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def ended(process: subprocess.Popen[str], status: int = 0) -> str:
    """The process's output, once it has ended with ``status``."""
    output, _ = process.communicate(timeout=240)
    assert process.returncode == status, output
    return output


def run_learner(config: Config, recorded: Path | None, *, ranks: int = 1) -> str:
    """Run a learner to its end; its output. A failure is raised with it."""
    return ended(start_process(learner_command(config, recorded, ranks=ranks)))


def learner_records(config: Config) -> list[dict[str, Any]]:
    """What the run wrote to ``metrics/learner.jsonl``."""
    return [json.loads(line) for line in (config.run.folder / "metrics" / "learner.jsonl").read_text().splitlines()]
