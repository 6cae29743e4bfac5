import pytest

from async_search_rl.config.rollout import GeneratorSection
from async_search_rl.errors import ConfigError
from async_search_rl.metrics import unknown_names
from rollouts import devices
from rollouts.busy_clock import BusyClock
from rollouts.engine import EngineStats
from rollouts.gauges import Gauges
from rollouts.stall_watch import StallWatch


def stats(tokens):
    return EngineStats(3, tokens, 2, 5, 0.4, 0.1, 7.0, 1.0)


def test_every_gauge_is_in_the_metrics_table():
    assert unknown_names("actor", Gauges().read(stats(0), 0.0)) == []


def test_token_rate_is_that_of_the_last_seconds():
    gauges = Gauges()
    rates = [gauges.read(stats(tokens), now)["tokens_per_s"] for now, tokens in [(0, 0), (1, 100), (5, 500), (10, 500), (20, 500)]]
    assert rates == [0.0, 100.0, 100.0, 0.0, 0.0]


def test_busy_and_idle_seconds():
    clock = BusyClock(0.0)
    clock.change(1, 2.0)
    clock.change(1, 3.0)
    clock.change(-1, 4.0)
    clock.change(-1, 7.0)
    assert clock.read(10.0) == (5.0, 5.0)


def test_an_engine_stalls_only_while_it_has_requests():
    def at(now, running, tokens, updates=0):
        return watch.stalled_s(EngineStats(running, tokens, updates, 0, 0.0, 0.0, 0.0, 0.0), now)

    watch = StallWatch(0.0)
    assert [at(1, 0, 0), at(50, 0, 0)] == [0, 0]
    assert [at(51, 3, 0), at(60, 3, 0), at(61, 3, 7)] == [1, 10, 0]
    assert [at(70, 3, 7), at(71, 3, 7, updates=1), at(75, 3, 7, updates=1)] == [9, 0, 4]


def test_engines_take_devices_in_turn():
    section = GeneratorSection(processes=5, tensor_parallel=2, start_stagger_s=6.0)
    environments = devices.assign(section, ["0", "1", "2", "3", "4"], cores=64)
    assert [e["CUDA_VISIBLE_DEVICES"] for e in environments] == ["0,1", "2,3", "0,1", "2,3", "0,1"]
    assert devices.start_after_s(section, environments) == [0.0, 0.0, 6.0, 6.0, 12.0]


def test_engines_share_the_cores_of_a_machine_without_devices():
    assert devices.assign(GeneratorSection(processes=1), [], cores=2) == [{}]
    several = devices.assign(GeneratorSection(processes=3), [], cores=16)
    assert [e["OMP_NUM_THREADS"] for e in several] == ["5", "5", "5"]


def test_an_engine_wider_than_the_node_is_refused():
    with pytest.raises(ConfigError, match="tensor_parallel must be <= 1"):
        devices.assign(GeneratorSection(tensor_parallel=2), ["0"], cores=4)


@pytest.mark.parametrize(("named", "configured", "expected"), [("3, 4", [], ["3", "4"]), ("", [], []), ("0", [6, 7], ["6", "7"])])
def test_visible_devices(monkeypatch, named, configured, expected):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert devices.visible_devices(GeneratorSection(devices=configured)) == expected
