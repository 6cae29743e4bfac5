"""What is refused before an engine is started: weights that are damaged or not whole."""

import shutil
from pathlib import Path

import pytest

from async_search_rl.config import parse_config
from async_search_rl.errors import DataError
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
