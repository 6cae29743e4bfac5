"""From an algorithm's name in the configuration to its function.

In: a table of ``async_search_rl.config.learner`` (name to ``module:function``) and a name that is in it, or a ``module:function``
of the user's own on ``PYTHONPATH``. Out: the function.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from async_search_rl.errors import ConfigError


def resolve(table: Mapping[str, str], name: str, key: str) -> Callable[..., Any]:
    """The function that ``name`` stands for.

    Args:
        table: known names and their ``module:function``.
        name: one of them, or ``module:function``.
        key: configuration key, for the message.

    Raises:
        ConfigError: when the name is in no table and names no function.
    """
    target = table.get(name, name)
    if ":" not in target:
        raise ConfigError(f"{key} must be one of {', '.join(table)} or module:function, got {name!r}")
    try:
        return _load(target)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{key} must name an importable function, got {name!r}: {error}") from error


@cache
def _load(target: str) -> Callable[..., Any]:
    module, _, function = target.partition(":")
    loaded: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return loaded
