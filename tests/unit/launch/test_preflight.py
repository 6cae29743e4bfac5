"""What is refused before anything starts, and who may use a run's folder."""

import json
import socket

import pytest

from async_search_rl.config import parse_config
from async_search_rl.errors import ConfigError, RunStoppedError
from async_search_rl.http import port_is_free
from async_search_rl.launch import pieces
from async_search_rl.launch.folder import claimed
from async_search_rl.launch.preflight import findings, require_startable


@pytest.fixture
def tree(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama"}')
    (model / "model.safetensors").write_bytes(b"weights")
    (model / "tokenizer.json").write_text("{}")
    (model / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    for name in ("train", "eval", "corpus"):
        (tmp_path / f"{name}.jsonl").write_text("{}\n")
    return {
        "run": {"dir": str(tmp_path / "runs")},
        "model": {"path": str(model)},
        "data": {"train": str(tmp_path / "train.jsonl"), "eval": str(tmp_path / "eval.jsonl")},
        "retrieval": {"corpus": str(tmp_path / "corpus.jsonl")},
    }


def test_a_complete_configuration_is_startable(tree):
    require_startable(parse_config(tree))
    assert {finding.level for finding in findings(parse_config(tree))} == {"ok"}


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("model/config.json", r"model\.path must be a folder with config\.json"),
        ("model/model.safetensors", r"model\.path must hold \*\.safetensors"),
        ("model/tokenizer.json", r"model\.path must hold a tokenizer"),
        ("model/tokenizer_config.json", r"needs a chat template"),
        ("train.jsonl", r"data\.train must be a readable file, got .*train\.jsonl': No such file"),
        ("corpus.jsonl", r"retrieval\.corpus must be a readable file"),
    ],
)
def test_a_missing_file_is_named(tree, tmp_path, file, message):
    (tmp_path / file).unlink()
    with pytest.raises(ConfigError, match=message):
        require_startable(parse_config(tree))


@pytest.mark.parametrize("damage", [b'{"chat_template": ', b'{"chat_template": "\xff"}'])
def test_a_damaged_tokenizer_configuration_is_named(tree, tmp_path, damage):
    (tmp_path / "model" / "tokenizer_config.json").write_bytes(damage)
    with pytest.raises(ConfigError, match=r"model/tokenizer_config\.json must be JSON"):
        require_startable(parse_config(tree))


@pytest.mark.parametrize(
    ("section", "key", "message"),
    [
        ("model", "path", r"model\.path must be set"),
        ("data", "train", r"data\.train must be set"),
        ("retrieval", "corpus", r"must be set where"),
    ],
)
def test_an_unset_path_is_named(tree, section, key, message):
    tree[section][key] = ""
    with pytest.raises(ConfigError, match=message):
        require_startable(parse_config(tree))


def test_a_search_service_elsewhere_needs_no_corpus(tree):
    tree["retrieval"] = {"url": "http://127.0.0.1:9"}
    require_startable(parse_config(tree))


def test_an_empty_file_is_named(tree, tmp_path):
    (tmp_path / "train.jsonl").write_text("")
    with pytest.raises(ConfigError, match="must not be empty"):
        require_startable(parse_config(tree))


def test_a_busy_port_is_named_and_a_port_given_twice_too(tree):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert not port_is_free("127.0.0.1", port)
        tree["replay"] = {"port": port}
        with pytest.raises(ConfigError, match=rf"replay\.port must be free, got 127\.0\.0\.1:{port}"):
            require_startable(parse_config(tree))
    tree["weights"] = {"port": port}
    with pytest.raises(ConfigError, match=r"must differ"):
        require_startable(parse_config(tree))


def test_a_port_is_free_or_not_of_one_address():
    with socket.socket() as taken:
        taken.bind(("127.0.0.2", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert not port_is_free("127.0.0.2", port)
        assert port_is_free("127.0.0.1", port)
    assert port_is_free("127.0.0.2", port)
    assert not port_is_free("127.0.0.1", 65536)


def test_two_launches_cannot_share_a_folder(tree):
    config = parse_config(tree)
    with claimed(config), pytest.raises(ConfigError, match="must not be in use"), claimed(config):
        pass


def test_a_run_folder_that_cannot_be_written_is_named(tree, tmp_path):
    tree["run"]["dir"] = str(tmp_path / "train.jsonl")
    config, refused = (
        parse_config(tree),
        r"run\.dir and run\.name must be a folder that can be written, got .*train\.jsonl/run: Not a",
    )
    with pytest.raises(ConfigError, match=refused), claimed(config):
        pass
    with pytest.raises(ConfigError, match=refused):
        pieces.write_config(config)


def test_a_lock_that_cannot_be_made_is_named_too(tree):
    config = parse_config(tree)
    (config.run.folder / ".lock").mkdir(parents=True)
    with pytest.raises(ConfigError, match="must be a folder that can be written"), claimed(config):
        pass


def test_a_used_folder_is_refused_with_resume_never(tree):
    tree["run"]["resume"] = "never"
    config = parse_config(tree)
    with claimed(config) as folder:
        (folder / "logs").mkdir()
    with claimed(config) as folder:
        (folder / "config.toml").touch()
    with pytest.raises(ConfigError, match="must be empty"), claimed(config):
        pass


def test_a_finished_run_is_not_run_again_unless_more_steps_are_asked_for(tree):
    tree["run"]["max_steps"] = 5
    config = parse_config(tree)
    with claimed(config) as folder:
        (folder / "summary.json").write_text(json.dumps({"outcome": "finished", "steps": 5}))
    with pytest.raises(RunStoppedError, match="holds a finished run of 5 steps"), claimed(config):
        pass
    tree["run"]["max_steps"] = 6
    with claimed(parse_config(tree)) as folder:
        assert folder.is_dir()


def test_pieces_have_their_arguments_and_environment(tree, tmp_path, monkeypatch):
    monkeypatch.setattr(pieces, "BIN", tmp_path)
    for name in ("search", "replay", "learner", "actor"):
        (tmp_path / name).touch()
    tree["launch"] = {"learner_ranks": 2, "learner_threads": 3, "learner_devices": [4, 5], "actor_nodes": 2}
    config = parse_config(tree)
    learner = pieces.learner(config)
    assert learner.argv[1:5] == ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    assert learner.argv[-1] == str(pieces.config_path(config))
    assert learner.env == {"OMP_NUM_THREADS": "3", "CUDA_VISIBLE_DEVICES": "4,5"}
    assert learner.restart_argv == ("--set", "run.resume=auto")
    assert [piece.name for piece in pieces.actors(config)] == ["actor-0", "actor-1"]
    assert pieces.stop_order(["search", "replay", "learner", "actor-0", "actor-1"]) == [
        "actor-0",
        "actor-1",
        "learner",
        "search",
        "replay",
    ]


def test_service_addresses_keep_their_port_for_a_restart(tree):
    config = pieces.with_service(parse_config(tree), "replay", "http://127.0.0.1:4321")
    assert (config.replay.url, config.replay.port) == ("http://127.0.0.1:4321", 4321)


def test_services_on_several_machines_bind_their_own_addresses(tree):
    tree["replay"] = {"host": "10.0.0.9"}
    config = pieces.with_hosts(
        parse_config(tree), {"search": "10.0.0.1", "replay": "10.0.0.2", "learner": "10.0.0.3", "actor": "10.0.0.4"}
    )
    assert (config.retrieval.host, config.replay.host, config.weights.host) == ("10.0.0.1", "10.0.0.9", "10.0.0.3")


def test_a_missing_entrypoint_is_named(tree, tmp_path, monkeypatch):
    monkeypatch.setattr(pieces, "BIN", tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="source checkout"):
        pieces.search(parse_config(tree))
