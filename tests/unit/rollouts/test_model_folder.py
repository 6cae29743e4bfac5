"""What is refused before an engine is started: damaged weights, a tokenizer that does not fit the configuration."""

import shutil
from pathlib import Path

import pytest

from async_search_rl.config import parse_config
from async_search_rl.errors import ConfigError, DataError
from rollouts.generator import check_model

TINY = Path(__file__).resolve().parents[3] / "assets" / "tiny_policy"


@pytest.mark.parametrize("keep", [0, 1000, -1])
def test_weights_that_are_not_whole_are_named(tmp_path, keep):
    shutil.copytree(TINY, tmp_path / "model")
    config = parse_config({"model": {"path": str(tmp_path / "model")}})
    assert check_model(config).eos_id is not None
    weights = next((tmp_path / "model").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:keep])
    with pytest.raises(DataError, match=f"{weights.name} must be a whole safetensors file"):
        check_model(config)


def test_a_tokenizer_without_a_chat_template_is_refused_where_one_is_needed(tmp_path):
    shutil.copytree(TINY, tmp_path / "model", ignore=shutil.ignore_patterns("chat_template*"))
    config = {"model": {"path": str(tmp_path / "model")}}
    with pytest.raises(DataError, match="must have a chat template"):
        check_model(parse_config(config))
    assert check_model(parse_config(config | {"data": {"prompt": "raw"}})).eos_id is not None


def test_observations_that_cannot_fit_are_refused():
    config = {"model": {"path": str(TINY)}, "rollout": {"max_observation_tokens": 1}}
    with pytest.raises(ConfigError, match=r"rollout\.max_observation_tokens must be >="):
        check_model(parse_config(config))
