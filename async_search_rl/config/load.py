"""From a TOML file and ``--set`` overrides to a checked :class:`Config`; and its help and printed form.

Nothing heavy is imported here: a wrong key is refused before torch or vLLM would start to load.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
import tomllib
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec

from async_search_rl.config.schema import Config, check
from async_search_rl.config.types import Section
from async_search_rl.errors import ConfigError


def load_config(path: str | Path, overrides: list[str] | None = None) -> Config:
    """Read ``path`` (TOML), apply ``section.key=value`` overrides, check everything.

    Relative paths inside the file are as they are: relative to the working folder.

    Raises:
        ConfigError: for a missing or malformed file, an unknown key, a wrong type, a value out of range, or an impossible
            combination; the message names the key and what came.
    """
    try:
        tree = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    for override in overrides or []:
        _apply_override(tree, override)
    config = parse_config(tree)
    for warning in check(config):
        print(f"warning: {warning}", file=sys.stderr)
    return config


def parse_config(tree: dict[str, Any]) -> Config:
    """A :class:`Config` from a nested dict, types and ranges checked (not the combinations)."""
    try:
        return msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(_readable(str(error), tree)) from error


def to_toml(config: Config) -> str:
    """``config`` as TOML that :func:`load_config` reads back equal."""
    lines: list[str] = []
    for section, values in msgspec.to_builtins(config).items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {_toml_value(value)}" for key, value in values.items()]
        lines.append("")
    return "\n".join(lines)


def describe() -> str:
    """Every key with its type, default and one-line meaning."""
    lines: list[str] = []
    for section_name, section in get_type_hints(Config).items():
        lines.append(f"[{section_name}]  {inspect.getdoc(section)}")
        docs = _field_docs(section)
        for field in msgspec.structs.fields(section):
            default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
            shown = _toml_value(default)
            shown = shown if len(shown) <= 40 else shown[:37] + '..."'
            lines.append(f"  {field.name} = {shown}\n      {docs.get(field.name, '')}")
        lines.append("")
    return "\n".join(lines)


def config_from_argv(
    argv: list[str], description: str, extra: argparse.ArgumentParser | None = None
) -> tuple[Config, argparse.Namespace]:
    """Parse an entrypoint's command line: ``CONFIG [--set section.key=value ...] [--print-config]``.

    ``--help`` prints every key; ``--print-config`` prints the checked configuration and ends the program with 0.
    """
    parser = argparse.ArgumentParser(
        description=description,
        epilog="Configuration keys:\n\n" + describe() if {"-h", "--help"} & set(argv) else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[extra] if extra else [],
    )
    parser.add_argument("config", metavar="CONFIG", help="TOML file")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override one key; may be repeated")
    parser.add_argument("--print-config", action="store_true", help="print the checked configuration and stop")
    args = parser.parse_args(argv)
    config = load_config(args.config, args.set)
    if args.print_config:
        print(to_toml(config))
        raise SystemExit(0)
    return config, args


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or len(parts) != 2 or not all(parts):
        raise ConfigError(f"--set takes section.key=value, got {override!r}")
    section = tree.setdefault(parts[0], {})
    if not isinstance(section, dict):
        raise ConfigError(f"{parts[0]} must be a section, got {section!r}")
    try:
        section[parts[1]] = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        section[parts[1]] = text


def _readable(message: str, tree: dict[str, Any]) -> str:
    """msgspec's sentence with the key first and the value that came: ``replay.max_staleness must be int >= 0, got -1``."""
    match = re.fullmatch(r"(?s)(.*?)(?: - at `\$\.?(.*?)`)?", message)
    text, where = (match.group(1), match.group(2) or "") if match else (message, "")
    unknown = re.fullmatch(r"Object contains unknown field `(.*)`", text)
    if unknown:
        return f"unknown configuration key {'.'.join(p for p in (where, unknown.group(1)) if p)!r}"
    got: Any = tree
    for part in re.findall(r"[^.\[\]]+", where):
        got = got[int(part)] if isinstance(got, list) else got.get(part) if isinstance(got, dict) else got
    if text.startswith("Invalid enum value"):
        text = f"must be one of {', '.join(repr(choice) for choice in _choices(where))}"
    text = re.sub(r"^Expected ", "must be ", re.sub(r", got `\w+`$", "", text)).replace("`", "")
    return f"{where} {text}, got {got!r}"


def _choices(key: str) -> tuple[Any, ...]:
    section, _, field = key.partition(".")
    return get_args(get_type_hints(get_type_hints(Config)[section])[field])


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t").replace("\r", "\\r")
        return f'"{escaped}"'
    if isinstance(value, list):
        return "[" + ", ".join(_toml_value(v) for v in value) + "]"
    return repr(value)


def _field_docs(section: type[Section]) -> dict[str, str]:
    """The string literal under each field, read from the source."""
    body = ast.parse(inspect.getsource(section)).body[0]
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for field, doc in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(doc, ast.Expr):
            docs[field.target.id] = ast.literal_eval(doc.value)
    return docs
