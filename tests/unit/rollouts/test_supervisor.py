import asyncio
import os
import sys
import time
from pathlib import Path

import pytest

from async_search_rl.config import parse_config
from async_search_rl.errors import ConfigError, DataError, DeadlineError, EngineError
from rollouts.supervisor import supervise

MODEL = Path(__file__).resolve().parents[3] / "assets" / "tiny_policy"
READY = "import pathlib, sys, os, time; ready = pathlib.Path(sys.argv[1]); "


def run(tmp_path, program, **generator):
    """Supervise stand-ins that run ``program`` with the ready file as their argument."""
    config = parse_config(
        {
            "run": {"dir": str(tmp_path), "name": "run"},
            "model": {"path": str(MODEL)},
            "replay": {"url": "http://127.0.0.1:1"},
            "generator": {"start_stagger_s": 0.05, "start_timeout_s": 20, **generator},
            "launch": {"stop_timeout_s": 5.0},
        }
    )

    def command(index, name, ready):
        return (sys.executable, "-S", "-c", READY + program, str(ready), str(index), str(tmp_path))

    asyncio.run(supervise(config, command))


def test_ends_when_every_generator_was_told_to_stop(tmp_path):
    run(tmp_path, "ready.touch(); pathlib.Path(sys.argv[3], 'ran-' + sys.argv[2]).touch()", processes=3)
    assert sorted(path.name for path in tmp_path.glob("ran-*")) == ["ran-0", "ran-1", "ran-2"]


def test_one_that_cannot_start_is_named_with_its_reason_and_the_others_are_stopped(tmp_path):
    program = (
        "pathlib.Path(sys.argv[3], 'pid-' + sys.argv[2]).write_text(str(os.getpid())); "
        "(time.sleep(60) if sys.argv[2] == '0' else sys.exit('actor: the engine did not start: no memory'))"
    )
    with pytest.raises(
        EngineError, match=r"generator 1 could not start \(exit status 1: the engine did not start: no memory; its log"
    ):
        run(tmp_path, program, processes=2)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid-0").read_text()), 0)


def test_the_engines_own_pointer_to_an_earlier_line_is_followed(tmp_path):
    program = (
        "print('ValueError: no room for the cache'); "
        "sys.exit('actor: the engine did not start: RuntimeError: failed. See root cause above.')"
    )
    with pytest.raises(EngineError, match="ValueError: no room for the cache"):
        run(tmp_path, program)


def test_one_that_dies_later_is_started_again_up_to_the_limit(tmp_path):
    program = "ready.touch(); time.sleep(0.3); open(sys.argv[3] + '/starts', 'a').write('x'); sys.exit('actor: the engine died')"
    with pytest.raises(EngineError, match=r"generator 0 died once more after 2 restarts .*the engine died"):
        run(tmp_path, program, restart_limit=2)
    assert (tmp_path / "starts").read_text() == "xxx"


def test_a_silent_start_has_a_deadline(tmp_path):
    start = time.monotonic()
    with pytest.raises(DeadlineError, match=r"generator 0 must be ready within 0\.2 s"):
        run(tmp_path, "time.sleep(60)", start_timeout_s=0.2)
    assert time.monotonic() - start < 30


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("tokenizer.json", r"model\.path must hold a tokenizer"),
        ("config.json", r"model\.path must be a model folder with config\.json"),
    ],
)
def test_an_incomplete_model_folder_is_refused_before_anything_starts(tmp_path, missing, message):
    folder = tmp_path / "model"
    folder.mkdir()
    for name in {"config.json", "model.safetensors", "tokenizer.json"} - {missing}:
        (folder / name).touch()
    config = parse_config({"model": {"path": str(folder)}, "replay": {"url": "http://127.0.0.1:1"}})
    with pytest.raises(DataError, match=message):
        asyncio.run(supervise(config, lambda *_: ("false",)))


def test_an_actor_needs_a_replay_service(tmp_path):
    config = parse_config({"run": {"dir": str(tmp_path)}, "model": {"path": str(MODEL)}})
    with pytest.raises(ConfigError, match=r"replay\.url must be set"):
        asyncio.run(supervise(config, lambda *_: ("false",)))


def test_a_run_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"run\.dir and run\.name must be a folder that can be written"):
        run(tmp_path / "file", "ready.touch()")
