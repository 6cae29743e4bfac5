"""Configuration: what is refused names the key, what is printed reads back equal, and nothing heavy is imported."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from async_search_rl.config import Config, config_from_argv, describe, load_config, parse_config, to_toml
from async_search_rl.errors import ConfigError


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "c.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("replay.max_staleness=-1", "replay.max_staleness must be int >= 0, got -1"),
        ("replay.stale=1", "unknown configuration key 'replay.stale'"),
        ("replai.max_staleness=1", "unknown configuration key 'replai'"),
        ("run.seed=a", "run.seed must be int, got 'a'"),
        ("algorithm.loss=ppo2", "algorithm.loss must be one of 'ppo', 'gspo', 'cispo', 'reinforce', got 'ppo2'"),
        ("rollout.temperature=0", "rollout.temperature must be > 0 in training"),
        ("rollout.group_size=1", "rollout.group_size must be >= 2 with algorithm.advantage = 'grpo'"),
        ("algorithm.advantage=vtrace", "algorithm.correction must be 'none' with advantage = 'vtrace'"),
        ("algorithm.loss=gspo", "algorithm.correction_level must be 'sequence' or 'geometric'"),
        ("algorithm.proximal=behaviour", "algorithm.correction must be 'none' with proximal = 'behaviour'"),
        ("rollout.max_prompt_tokens=5000", "rollout.max_prompt_tokens must be < rollout.max_context_tokens (4096)"),
        ("data.template=no place", "data.template must contain {question}"),
        ("reward.exact_match=0", "one of reward.exact_match, reward.f1 and reward.format must not be 0"),
        ("learner.offload_optimizer=nvme", "learner.nvme_path must be set"),
        ("weights.publish_every=3", "weights.publish_every must be <= replay.max_staleness + 1 (2), got 3"),
        ("run.name=a/b", "run.name must be the name of one folder, got 'a/b'"),
        ("run.name=..", "run.name must be the name of one folder, got '..'"),
        ("run.name=", "run.name must be the name of one folder, got ''"),
        ("replay.url=localhost:80", "replay.url must be http://host:port, got 'localhost:80'"),
        ("replay.url=http://h:x", "replay.url must be http://host:port, got 'http://h:x'"),
        ("retrieval.url=http://a:1,b:2", "retrieval.url must be http://host:port, got 'b:2'"),
        ('generator.devices=["a"]', "generator.devices[0] must be int, got 'a'"),
        ("launch.learner_devices=[0, 1.5]", "launch.learner_devices[1] must be int, got 1.5"),
        ("seed=1", "--set takes section.key=value, got 'seed=1'"),
    ],
)
def test_bad_values_are_refused_by_name(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, ""), [override])
    assert message in str(caught.value)


def test_missing_and_malformed_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the configuration .*absent\.toml"):
        load_config(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match=r"c\.toml is not valid TOML"):
        load_config(write(tmp_path, "[run\n"))


def test_printed_configuration_reads_back_equal(tmp_path: Path) -> None:
    text = '[data]\ntemplate = "a \\"quoted\\"\\n{question}\\t\\\\"\n[generator]\ndevices = [0, 1]\n'
    config = load_config(write(tmp_path, text), ["optimizer.lr=2e-4", "run.name=demo"])
    assert config.optimizer.lr == 2e-4
    assert config.data.template == 'a "quoted"\n{question}\t\\'
    assert load_config(write(tmp_path, to_toml(config))) == config


def test_biased_sampling_is_warned_about(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load_config(write(tmp_path, ""), ["rollout.top_p=0.9"])
    assert "rollout.top_p = 0.9: truncated sampling biases importance ratios" in capsys.readouterr().err


def test_every_key_is_documented() -> None:
    lines = describe().splitlines()
    keys = [i for i, line in enumerate(lines) if line.startswith("  ") and not line.startswith("      ")]
    assert [lines[i] for i in keys if not lines[i + 1].strip()] == []
    assert "  max_staleness = 1" in lines


def test_print_config_and_help_end_the_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        config_from_argv([str(write(tmp_path, "")), "--print-config"], "test")
    assert stopped.value.code == 0
    assert "[replay]" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        config_from_argv(["--help"], "test")
    assert "max_staleness" in capsys.readouterr().out


def test_the_filter_is_on_only_where_uniform_groups_carry_no_gradient() -> None:
    def filtering(**algorithm: object) -> bool:
        return parse_config({"algorithm": algorithm}).filters_uniform_groups

    assert filtering(advantage="grpo")
    assert filtering(advantage="rloo")
    assert not filtering(advantage="grpo", kl_coef=0.1)
    assert not filtering(advantage="grpo", entropy_coef=0.1)
    assert not filtering(advantage="reinforce_pp")
    assert not filtering(advantage="gae")


def test_sections_are_immutable() -> None:
    with pytest.raises(AttributeError):
        Config().run.seed = 3  # type: ignore[misc]
    assert msgspec.structs.replace(Config().run, seed=3).seed == 3


def test_contracts_import_quickly_and_without_heavy_packages() -> None:
    heavy = ("torch", "vllm", "deepspeed", "faiss", "transformers", "ray", "bm25s")
    program = (
        "import sys, time; start = time.process_time()\n"
        "import async_search_rl.config, async_search_rl.codec, async_search_rl.replay.schema, async_search_rl.weights.schema\n"
        f"print(time.process_time() - start, [m for m in {heavy!r} if m in sys.modules])"
    )
    runs = [subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout for _ in range(3)]
    assert all(run.split(" ", 1)[1].strip() == "[]" for run in runs)
    assert min(float(run.split(" ", 1)[0]) for run in runs) < 0.3
