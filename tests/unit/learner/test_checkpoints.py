import random
import shutil
import threading

import msgspec
import numpy as np
import pytest
import torch

from async_search_rl.config import parse_config
from async_search_rl.errors import CheckpointError
from learner.checkpoint import (
    Checkpoints,
    CheckpointState,
    checkpoint_to_resume,
    copy_checkpoint,
    list_checkpoints,
    make_universal,
    random_state,
    read_state,
    set_random_state,
    step_of,
)
from learner.ranks import Ranks

ALONE = Ranks(0, 1, torch.device("cpu"), None)


class Network:
    """An engine that is one number."""

    def __init__(self, value):
        self.value = value

    def save(self, folder):
        folder.mkdir()
        (folder / "value").write_text(str(self.value))

    def load(self, folder, universal=False):
        assert not universal
        self.value = int((folder / "value").read_text())


def config(tmp_path, **sections):
    return parse_config({"run": {"dir": str(tmp_path), "name": "r"}, **sections})


def names(checkpoints):
    return [step_of(c) for c in list_checkpoints(checkpoints.folder)]


def test_saved_and_loaded_with_the_newest_and_the_best_kept(tmp_path):
    network = Network(0)
    checkpoints = Checkpoints(config(tmp_path, checkpoint={"keep": 2}), {"policy": network}, ALONE)
    for step in range(1, 5):
        network.value = 10 * step
        oldest = checkpoints.save(step, step + 100, incarnation=3)
        if step == 1:
            checkpoints.note_score(1, 0.9)
            checkpoints.note_score(2, 0.4)
    assert names(checkpoints) == [1, 3, 4]
    assert oldest == 101
    network.value = -1
    state = checkpoints.load(list_checkpoints(checkpoints.folder)[0])
    assert network.value == 10
    assert (state.step, state.cut, state.incarnation, state.world) == (1, 101, 3, 1)
    checkpoints.note_score(4, 0.95)
    checkpoints.save(5, 105, incarnation=3)
    checkpoints.save(6, 106, incarnation=3)
    assert names(checkpoints) == [4, 5, 6], "the best is another one now"


def refuse_what_exists(path, ignore_errors=False):
    """Ends the process, so to speak, at the first folder that there is to remove."""
    if path.exists():
        raise KeyboardInterrupt


def test_an_unfinished_checkpoint_is_none(tmp_path):
    checkpoints = Checkpoints(config(tmp_path), {"policy": Network(1)}, ALONE)
    checkpoints.save(1, 1, 1)
    (checkpoints.folder / ".partial-step-00000002").mkdir()
    (checkpoints.folder / "step-00000003").mkdir()
    assert names(checkpoints) == [1]


def test_a_checkpoint_half_forgotten_is_none_and_goes_with_the_next_one(tmp_path, monkeypatch):
    checkpoints = Checkpoints(config(tmp_path, checkpoint={"keep": 1}), {"policy": Network(1)}, ALONE)
    checkpoints.save(1, 1, 1)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuse_what_exists)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save(2, 2, 1)
    assert names(checkpoints) == [2]
    checkpoints.save(3, 3, 1)
    assert sorted(p.name for p in checkpoints.folder.iterdir()) == ["step-00000003"]


def test_which_checkpoint_is_resumed(tmp_path):
    settings = config(tmp_path)
    assert checkpoint_to_resume(settings) is None
    with pytest.raises(CheckpointError, match=r"run\.resume = 'must'"):
        checkpoint_to_resume(config(tmp_path, run={"dir": str(tmp_path), "name": "r", "resume": "must"}))
    checkpoints = Checkpoints(settings, {"policy": Network(1)}, ALONE)
    checkpoints.save(2, 2, 1)
    checkpoints.save(12, 12, 1)
    assert step_of(checkpoint_to_resume(settings)) == 12
    with pytest.raises(CheckpointError, match=r"run\.resume = 'never'"):
        checkpoint_to_resume(config(tmp_path, run={"dir": str(tmp_path), "name": "r", "resume": "never"}))
    with pytest.raises(CheckpointError, match=r"learner\.zero_stage must be 3"):
        checkpoint_to_resume(config(tmp_path, learner={"zero_stage": 2}))
    with pytest.raises(CheckpointError, match="the networks must be"):
        checkpoint_to_resume(config(tmp_path, algorithm={"advantage": "gae"}))


def test_a_checkpoint_of_the_same_world_needs_no_universal_form(tmp_path):
    checkpoints = Checkpoints(config(tmp_path), {"policy": Network(1)}, ALONE)
    checkpoints.save(1, 1, 1)
    assert make_universal(list_checkpoints(checkpoints.folder)[0], ALONE) is None


def test_a_damaged_state_is_refused_by_name(tmp_path):
    folder = tmp_path / "step-00000001"
    folder.mkdir()
    (folder / "state.json").write_text('{"step": "one"}')
    with pytest.raises(CheckpointError, match="step-00000001 must be a checkpoint"):
        read_state(folder)
    fields = {f.name for f in msgspec.structs.fields(CheckpointState)}
    assert {"step", "cut", "world"} <= fields


def test_a_copy_appears_whole_and_a_failed_one_is_logged(tmp_path, caplog):
    checkpoint = tmp_path / "step-00000001"
    checkpoint.mkdir()
    (checkpoint / "state.json").write_text("{}")
    copy_checkpoint(checkpoint, tmp_path / "there")
    assert (tmp_path / "there" / checkpoint.name / "state.json").read_text() == "{}"
    (tmp_path / "file").write_text("")
    copy_checkpoint(checkpoint, tmp_path / "file" / "below")
    assert "was not copied" in caplog.text


def test_random_states_are_restored(tmp_path):
    device = torch.device("cpu")
    path = tmp_path / "random.pt"
    torch.save(random_state(device), path)
    drawn = (random.random(), np.random.rand(), torch.rand(3).tolist())
    set_random_state(torch.load(path, weights_only=True), device)
    assert (random.random(), np.random.rand(), torch.rand(3).tolist()) == drawn


def test_a_copy_that_is_too_late_is_named(tmp_path, caplog):
    checkpoints = Checkpoints(config(tmp_path), {"policy": Network(1)}, ALONE)
    gate = threading.Event()
    copy = threading.Thread(target=gate.wait, args=(10,))
    copy.start()
    checkpoints._copies[tmp_path / "step-00000001"] = copy
    checkpoints.wait_for_copies(0.01)
    gate.set()
    copy.join(10)
    assert "step-00000001 was not copied within 0.01 s" in caplog.text
