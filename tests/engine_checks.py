"""What must hold of the engine on every device: shared by the integration tests (CPU) and the GPU tests.

:func:`run` plays one scenario on a real engine: turns with earlier turns in the prefix cache, an update in the middle of running
requests, then new turns over the old, cached prefixes. It returns what was sampled; the checks compare it with transformers, whose
KV cache is carried over the same change of weights where requests went on across it.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from async_search_rl.config import Config, parse_config
from async_search_rl.version import PolicyVersion
from rollouts.engine import EngineStats, Sample
from rollouts.protocol import make_actions
from rollouts.tokenizer import load_tokenizer
from rollouts.vllm_compat import prepare_environment
from rollouts.vllm_engine import VllmEngine

OLD = PolicyVersion(1, 4).pack()
NEW = PolicyVersion(1, 5).pack()
TOLERANCE = 1e-3
_TAGS = ["<search>", "</search>", "<answer>", "</answer>", "<information>", "</information>"]


def make_tokenizer(folder: Path) -> int:
    """A byte-level vocabulary with the tags as single tokens, saved in ``folder``; its size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["</s>", *_TAGS])
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>").save_pretrained(folder)
    return int(raw.get_vocab_size())


def make_models(root: Path, tied: bool) -> tuple[Path, Path]:
    """Two folders of random tiny Llamas of one shape and with different weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folders = (root / "old", root / "new")
    for seed, folder in enumerate(folders):
        vocabulary = make_tokenizer(folder)
        torch.manual_seed(seed)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=vocabulary + -vocabulary % 64,
                hidden_size=128,
                intermediate_size=256,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=2,
                max_position_embeddings=512,
                initializer_range=0.15,
                tie_word_embeddings=tied,
                eos_token_id=vocabulary - len(_TAGS) - 1,
                bos_token_id=None,
            )
        )
        model.save_pretrained(folder)
    return folders


def make_config(model: Path, *, action_tokens: str = "special", generator: dict[str, Any] | None = None) -> Config:
    """A configuration for the engine alone."""
    return parse_config(
        {
            "model": {"path": str(model), "dtype": "float32"},
            "rollout": {"max_context_tokens": 512, "max_prompt_tokens": 300, "action_tokens": action_tokens, "ignore_eos": True},
            "generator": {"kv_cache_gib": 0.25, "max_num_seqs": 32, "block_size": 32, **(generator or {})},
        }
    )


@dataclass
class Turn:
    """One request and its answer."""

    prompt: list[int]
    sample: Sample


@dataclass
class Record:
    """Everything the scenario sampled."""

    before: list[Turn] = field(default_factory=list)
    across: list[Turn] = field(default_factory=list)
    after: list[Turn] = field(default_factory=list)
    stats: EngineStats | None = None


class Reference:
    """Log-probabilities by transformers on CPU in float32."""

    def __init__(self, folders: tuple[Path, Path]) -> None:
        from transformers import AutoModelForCausalLM

        self._models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for folder in folders]

    @torch.no_grad()
    def logprobs(self, which: int, turn: Turn) -> list[float]:
        """Of each sampled token, had all of it been computed by the old (0) or the new (1) weights."""
        ids = turn.prompt + turn.sample.token_ids
        table = torch.log_softmax(self._models[which](torch.tensor([ids])).logits[0], -1)
        return [float(table[i - 1, ids[i]]) for i in range(len(turn.prompt), len(ids))]

    @torch.no_grad()
    def logprobs_across(self, turn: Turn, old_tokens: int) -> list[float]:
        """Of each sampled token where the old weights sampled the first ``old_tokens`` and left their KV cache to the new ones."""
        ids = turn.prompt + turn.sample.token_ids
        swap = len(turn.prompt) + old_tokens - 1
        old = self._models[0](torch.tensor([ids[:swap]]), use_cache=True)
        new = self._models[1](torch.tensor([ids[swap:]]), past_key_values=old.past_key_values)
        table = torch.log_softmax(torch.cat([old.logits[0], new.logits[0]]), -1)
        return [float(table[i - 1, ids[i]]) for i in range(len(turn.prompt), len(ids))]


def run(folders: tuple[Path, Path], config: Config, requests: int = 12) -> Record:
    """Play the scenario with ``requests`` at a time, in a process of its own as a generator is one."""
    return msgspec.convert(_in_a_process("update", config, [str(folder) for folder in folders], requests), Record)


def sample(config: Config, prompts: list[list[int]]) -> list[Turn]:
    """One turn after each prompt, in a process of its own."""
    return msgspec.convert(_in_a_process("sample", config, prompts), list[Turn])


def _in_a_process(what: str, config: Config, *arguments: Any) -> Any:
    order = json.dumps([what, msgspec.to_builtins(config), *arguments])
    command = [sys.executable, "-m", "tests.engine_checks"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, input=order, env=env, capture_output=True, text=True, timeout=480, check=False)
    assert done.returncode == 0, f"the engine's process ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def main(order: str) -> None:
    """Inside that process: print what was sampled as the last line."""
    what, config, *arguments = json.loads(order)
    if what == "update":
        folders, requests = arguments
        result: Any = asyncio.run(_scenario((Path(folders[0]), Path(folders[1])), parse_config(config), requests))
    else:
        result = asyncio.run(_sample(parse_config(config), arguments[0]))
    print(msgspec.json.encode(result).decode(), flush=True)


async def _sample(config: Config, prompts: list[list[int]]) -> list[Turn]:
    prepare_environment(config)
    tokenizer = load_tokenizer(config.model.path)
    actions = make_actions(config.rollout.action_tokens, tokenizer)
    engine = await VllmEngine.start(config, actions, tokenizer.eos_id, version=OLD, seed=5)
    try:
        return await _turns(engine, prompts, config.rollout.max_turn_tokens)
    finally:
        await engine.close()


async def _scenario(folders: tuple[Path, Path], config: Config, requests: int) -> Record:
    prepare_environment(config)
    tokenizer = load_tokenizer(folders[0])
    actions = make_actions(config.rollout.action_tokens, tokenizer)
    engine = await VllmEngine.start(config, actions, tokenizer.eos_id, version=OLD, seed=3)
    record = Record()
    rng = random.Random(0)
    prompts = [[rng.randrange(200) for _ in range(rng.randrange(90, 170))] for _ in range(requests)]
    try:
        record.before = await _turns(engine, prompts, 24)
        second = [t.prompt + t.sample.token_ids + [7, 8, 9] for t in record.before]
        record.before += await _turns(engine, second, 16)
        await engine.begin_from(str(folders[1]))
        running = asyncio.create_task(_turns(engine, second, 160))
        at_start = engine.stats().tokens
        async with asyncio.timeout(120):
            while True:
                if set(await engine.states()) == {"ready"} and engine.stats().tokens >= at_start + 3 * requests:
                    break
                await asyncio.sleep(0.001)
        await engine.commit(NEW)
        record.after = await _turns(engine, second, 16)
        record.across = await running
        third = [t.prompt + t.sample.token_ids + [9, 8] for t in record.after]
        record.after += await _turns(engine, third, 16)
        record.stats = engine.stats()
    finally:
        await engine.close()
    return record


async def _turns(engine: VllmEngine, prompts: list[list[int]], tokens: int) -> list[Turn]:
    samples = await asyncio.gather(*(engine.generate(prompt, tokens, 1.0) for prompt in prompts))
    return [Turn(prompt, sample) for prompt, sample in zip(prompts, samples, strict=True)]


def error(reference: list[float], turn: Turn) -> float:
    """Largest difference of log-probabilities."""
    return max(abs(a - b) for a, b in zip(reference, turn.sample.logprobs, strict=True))


def check_parity_before(record: Record, reference: Reference) -> float:
    """Turns before the update agree with transformers on the old weights; the largest error."""
    worst = max(error(reference.logprobs(0, turn), turn) for turn in record.before)
    assert worst <= TOLERANCE
    assert all(set(turn.sample.versions) == {OLD} for turn in record.before)
    return worst


def check_parity_after(record: Record, reference: Reference) -> float:
    """Turns after the update agree with the new weights, over prefixes that the old ones had cached; the largest error."""
    worst = max(error(reference.logprobs(1, turn), turn) for turn in record.after)
    assert worst <= TOLERANCE
    assert all(set(turn.sample.versions) == {NEW} for turn in record.after)
    assert max(error(reference.logprobs(0, turn), turn) for turn in record.after) > 0.5
    return worst


def check_versions_across(record: Record, reference: Reference, *, kv_kept: bool = True) -> None:
    """Requests that went on across the update: each label is that of the weights that made the token.

    With ``kv_kept`` every request kept its KV cache, so both sides of the swap are compared; a request that was preempted computed
    its prefix anew, so there only the tokens before it are.
    """
    mixed = 0
    for turn in record.across:
        versions = turn.sample.versions
        old_tokens = versions.count(OLD)
        assert versions == [OLD] * old_tokens + [NEW] * (len(versions) - old_tokens)
        by_old = reference.logprobs(0, turn)
        assert all(abs(a - b) <= TOLERANCE for a, b in zip(by_old[:old_tokens], turn.sample.logprobs, strict=False))
        if 0 < old_tokens < len(versions):
            mixed += 1
            if kv_kept:
                assert error(reference.logprobs_across(turn, old_tokens), turn) <= TOLERANCE
    assert mixed > 0
    assert record.stats is not None
    assert record.stats.updates == 1
    # All of them began before the update, so those that were running at it are those with tokens of the new weights.
    assert record.stats.in_flight_updates == sum(NEW in turn.sample.versions for turn in record.across) > 0
    assert record.stats.running == 0


if __name__ == "__main__":
    main(sys.stdin.read())
