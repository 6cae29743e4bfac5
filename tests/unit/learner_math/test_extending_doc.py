"""The worked example of docs/extending.md, run as it stands there."""

import ast
import re
import sys
from pathlib import Path

import pytest

from async_search_rl.config import learner as tables
from async_search_rl.config.load import load_config
from async_search_rl.errors import ConfigError

DOC = Path(__file__).resolve().parents[3] / "docs" / "extending.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", DOC.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_the_example_is_one_function_and_one_table_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    function, entry, test = blocks("python")
    (toml,) = blocks("toml")
    (tmp_path / "my_losses.py").write_text(function, encoding="utf-8")
    (tmp_path / "run.toml").write_text(toml, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_losses", raising=False)
    with pytest.raises(ConfigError, match=r"algorithm\.loss must be one of .*, got 'sapo'"):
        load_config(tmp_path / "run.toml")
    (added,) = ast.literal_eval("{" + entry + "}").items()
    monkeypatch.setitem(tables.LOSSES, *added)
    algorithm = load_config(tmp_path / "run.toml").algorithm
    assert (algorithm.loss, algorithm.minibatches) == ("sapo", 4)
    assert len([node for node in ast.parse(function).body if isinstance(node, ast.FunctionDef)]) == 1
    names: dict[str, object] = {}
    exec(compile(test, str(DOC), "exec"), names)
    assert names["batch"].current_N.grad is not None
    assert load_config(tmp_path / "run.toml", ["algorithm.loss=my_losses:sapo"]).algorithm.loss == "my_losses:sapo"


def test_every_table_entry_of_the_configuration_is_documented() -> None:
    text = (DOC.parent / "algorithms.md").read_text(encoding="utf-8")
    names = [*tables.ADVANTAGES, *tables.LOSSES, *tables.CORRECTIONS]
    assert [name for name in names if f"`{name}`" not in text] == []
