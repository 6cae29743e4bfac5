"""The import rule: which package may import which, and which files may import the heavy ones."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("async_search_rl", "rollouts", "learner", "search")
ALLOWED = {
    "async_search_rl": {"async_search_rl"},
    "search": {"search", "async_search_rl"},
    "learner": {"learner", "async_search_rl"},
    "rollouts": {"rollouts", "async_search_rl", "search.client", "search.schema"},
}
NAMED_AFTER = ("vllm", "deepspeed", "ray")


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports(path: Path) -> list[tuple[str, bool]]:
    """Imported module names, and whether the import stands at the module's top level."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    top = set(map(id, tree.body))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.append((node.module or "", id(node) in top))
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_what_they_may(package: str) -> None:
    broken = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in modules(package)
        for name, _ in imports(path)
        if name.split(".")[0] in PACKAGES and not any(name == ok or name.startswith(ok + ".") for ok in ALLOWED[package])
    ]
    assert broken == []


@pytest.mark.parametrize("heavy", NAMED_AFTER)
def test_heavy_packages_are_imported_only_in_files_named_after_them(heavy: str) -> None:
    broken = [
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in modules(package)
        if any(name.split(".")[0] == heavy for name, _ in imports(path)) and heavy not in path.stem
    ]
    assert broken == []


def test_the_contracts_import_torch_only_in_the_weight_channel_and_lazily_in_tools() -> None:
    broken = [
        str(path.relative_to(ROOT))
        for path in modules("async_search_rl")
        for name, top in imports(path)
        if name.split(".")[0] in ("torch", "transformers") and "weights" not in path.parts and ("tools" not in path.parts or top)
    ]
    assert broken == []


LIGHT = "async_search_rl.config async_search_rl.launch async_search_rl.replay.client async_search_rl.replay.service search.service"


@pytest.mark.parametrize(
    ("modules", "blocked"),
    [
        (LIGHT, "vllm deepspeed faiss torch transformers ray"),
        ("search.client", "vllm deepspeed faiss torch transformers ray bm25s tantivy"),
        ("rollouts.agent rollouts.actor_loop", "vllm deepspeed faiss ray"),
        ("learner.advantages learner.losses learner.packing", "vllm deepspeed faiss ray"),
        ("learner.loop", "vllm faiss ray"),
    ],
)
def test_modules_import_without_the_packages_they_do_not_need(modules: str, blocked: str) -> None:
    program = f"import sys\nfor name in {blocked.split()!r}: sys.modules[name] = None\nimport {', '.join(modules.split())}"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr.strip().splitlines()[-1]


def test_entrypoints_only_parse_import_and_run() -> None:
    scripts = [p for p in sorted((ROOT / "bin").iterdir()) if p.is_file() and p.suffix != ".sh"]
    long = {p.name: n for p in scripts if (n := len(p.read_text(encoding="utf-8").splitlines())) > 40}
    assert scripts
    assert long == {}
    assert not any(p.suffix == ".py" for p in scripts), "bin/learner.py would shadow the package"
