"""Typed configuration: one frozen struct a section, read from TOML."""

from async_search_rl.config.load import config_from_argv, describe, load_config, parse_config, to_toml
from async_search_rl.config.schema import Config, check

__all__ = ["Config", "check", "config_from_argv", "describe", "load_config", "parse_config", "to_toml"]
