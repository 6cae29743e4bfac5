"""A sender that cannot serve says so in the terms of its configuration."""

from __future__ import annotations

import pytest

from async_search_rl.config.replay import WeightsSection
from async_search_rl.errors import ConfigError
from async_search_rl.weights.sender import WeightSender

NOT_HERE = "192.0.2.1"
"""Reserved for documentation (RFC 5737), so no machine has it."""


def test_a_host_of_another_machine_is_refused_by_its_key() -> None:
    sender = WeightSender(WeightsSection(host=NOT_HERE), token="secret")
    with pytest.raises(ConfigError, match=r"weights\.host must be an address of this machine, got '192\.0\.2\.1': Cannot assign"):
        sender.start()
    sender.close()
