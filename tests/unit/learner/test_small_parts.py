"""Recorded groups, stop signals, batch figures, model folders and exports."""

import dataclasses
import json
import os
import signal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from async_search_rl.codec import encode_group
from async_search_rl.config import parse_config
from async_search_rl.errors import ConfigError, DataError
from async_search_rl.json_lines import read_json_lines
from async_search_rl.metrics import unknown_names
from async_search_rl.replay.schema import CutRequest
from async_search_rl.version import PolicyVersion
from learner.batch import batch_from_groups
from learner.critic import critic_optimizer
from learner.export import write_model_folder
from learner.loading import check_model_folder
from learner.metrics import MetricsWriter, batch_figures
from learner.recorded import RecordedCuts, read_groups, write_groups
from learner.signals import StopFlag
from tests.learner_cases import groups


def test_recorded_groups_are_served_round_and_round(tmp_path):
    path = tmp_path / "some" / "file.groups"
    made = groups(5)
    write_groups(path, made)
    encoded = [encode_group(g) for g in made]
    assert read_groups(path) == encoded
    source = RecordedCuts(path, batch_groups=3)
    assert source.cut(CutRequest(incarnation=1, cut=0, step=0, wait_s=1.0)).groups == encoded[:3]
    assert source.cut(CutRequest(incarnation=1, cut=1, step=1, wait_s=1.0)).groups == [encoded[3], encoded[4], encoded[0]]


@pytest.mark.parametrize("cut", [1, 7, 100])
def test_a_recorded_file_cut_short_is_refused(tmp_path, cut):
    path = tmp_path / "file.groups"
    write_groups(path, groups(1))
    path.write_bytes(path.read_bytes()[:-cut] if cut > 7 else path.read_bytes() + b"\0" * cut)
    with pytest.raises(DataError, match="whole groups"):
        read_groups(path)


def test_a_missing_or_empty_recorded_file_is_refused(tmp_path):
    with pytest.raises(DataError, match="readable"):
        read_groups(tmp_path / "none")
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(DataError, match="at least one group"):
        read_groups(tmp_path / "empty")


def test_the_first_signal_sets_the_flag_and_the_second_acts_as_before():
    before = signal.getsignal(signal.SIGTERM)
    with StopFlag() as stop:
        assert not stop.is_set
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.is_set
        assert signal.getsignal(signal.SIGTERM) is before
    assert signal.getsignal(signal.SIGTERM) is before


def test_figures_of_a_batch_have_known_names_and_count_what_is_there():
    batch = batch_from_groups(groups(3))
    figures = batch_figures(batch, step=2)
    assert unknown_names("learner", figures) == []
    assert figures["trajectories"] == 11
    assert figures["trajectories_invalid"] == 1
    assert figures["lag_histogram"] == {"2": 3}
    assert figures["lag_max"] == 2
    assert figures["exact_match"] == figures["reward_mean"] == pytest.approx(5 / 11)
    assert figures["length_no_answer"] is None
    assert figures["length_fault"] > 0
    assert figures["searches_mean"] == 1.0


def test_the_reuse_fraction_counts_tokens_of_older_weights_by_their_own_version():
    (group,) = groups(1)
    first = group.trajectories[0]
    versions = np.where(np.cumsum(first.loss_mask) > 1, PolicyVersion(1, 2).pack(), PolicyVersion(2, 1).pack())
    mixed = dataclasses.replace(first, versions=np.where(first.loss_mask, versions, first.versions))
    batch = batch_from_groups([dataclasses.replace(group, trajectories=(mixed,))])
    assert batch.trainable_tokens > 1
    assert batch_figures(batch, step=1)["reuse_fraction"] == 0.0
    assert batch_figures(batch, step=2)["reuse_fraction"] == pytest.approx(1 / batch.trainable_tokens)
    assert batch_figures(batch, step=3)["reuse_fraction"] == 1.0


def test_metrics_are_json_lines(tmp_path):
    config = parse_config({"run": {"dir": str(tmp_path), "name": "r"}, "logging": {"wandb": "disabled"}})
    writer = MetricsWriter(config)
    writer.write({"step": 1, "loss": 0.5, "lag_histogram": {"0": 2}})
    writer.close()
    (line,) = read_json_lines(tmp_path / "r" / "metrics" / "learner.jsonl")
    assert (line["step"], line["loss"], line["lag_histogram"]) == (1, 0.5, {"0": 2})


def test_what_is_wrong_with_a_model_folder_is_named(tmp_path):
    with pytest.raises(DataError, match=r"model\.path must be a folder"):
        check_model_folder("", "model.path")
    with pytest.raises(DataError, match=r"config\.json"):
        check_model_folder(str(tmp_path), "model.path")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataError, match="safetensors"):
        check_model_folder(str(tmp_path), "model.path")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(DataError, match="tokenizer"):
        check_model_folder(str(tmp_path), "model.path")
    assert check_model_folder(str(tmp_path), "model.path", tokenizer=False) == tmp_path
    (tmp_path / "tokenizer.json").write_text("{}")
    assert check_model_folder(str(tmp_path), "model.path") == tmp_path


def test_an_export_has_the_weights_in_the_dtype_asked_for_and_the_other_files(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({"tie_word_embeddings": True, "torch_dtype": "float16"}))
    (source / "tokenizer.json").write_text("{}")
    (source / "model.safetensors").write_bytes(b"old")
    embedding = torch.ones(3, 2)
    write_model_folder({"embed": embedding, "lm_head.weight": embedding}, source, out, torch.bfloat16)
    assert sorted(p.name for p in out.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert json.loads((out / "config.json").read_text()) == {"tie_word_embeddings": True, "dtype": "bfloat16"}
    saved = load_file(out / "model.safetensors")
    assert saved.keys() == {"embed"}
    assert saved["embed"].dtype == torch.bfloat16
    write_model_folder({"embed": 2 * embedding}, source, out, torch.float32)
    assert load_file(out / "model.safetensors")["embed"].max() == 2


def test_an_export_does_not_replace_what_is_no_model(tmp_path):
    source, out = tmp_path / "source", tmp_path / "home"
    source.mkdir()
    (source / "config.json").write_text("{}")
    out.mkdir()
    (out / "letter.txt").write_text("dear")
    with pytest.raises(ConfigError, match="empty or a model folder"):
        write_model_folder({}, source, out, torch.float32)
    assert (out / "letter.txt").read_text() == "dear"


def test_the_critics_optimiser_differs_in_rate_and_warm_up():
    config = parse_config({"optimizer": {"lr": 1e-3, "beta2": 0.9}, "critic": {"lr": 1e-2, "warmup_steps": 7}})
    optimizer = critic_optimizer(config)
    assert (optimizer.lr, optimizer.warmup_steps, optimizer.beta2) == (1e-2, 7, 0.9)
