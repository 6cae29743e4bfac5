"""The circuit breaker of one replica, with time passed in."""

from search.replica import Replica


def failing(times: int, now_s: float = 0.0) -> Replica:
    replica = Replica("http://r/", breaker_failures=3, breaker_cooldown_s=1.0)
    for _ in range(times):
        replica.begin()
        replica.fail(now_s)
    return replica


def test_opens_after_failures_in_a_row() -> None:
    assert failing(2).available_in(0.0) == 0
    assert failing(3).available_in(0.25) == 0.75


def test_a_success_starts_the_count_again() -> None:
    replica = failing(2)
    replica.begin()
    replica.succeed(0.1)
    replica.begin()
    replica.fail(0.0)
    assert replica.available_in(0.0) == 0


def test_one_probe_at_a_time_then_closed() -> None:
    replica = failing(3)
    assert replica.available_in(1.0) == 0
    replica.begin()
    assert replica.available_in(1.0) == float("inf")
    replica.succeed(0.1)
    assert replica.available_in(1.0) == 0
    assert replica.outstanding == 0


def test_a_failed_probe_doubles_the_cooldown_up_to_a_bound() -> None:
    replica = failing(3)
    for _ in range(10):
        replica.begin()
        replica.fail(100.0)
    assert replica.available_in(100.0) == 30.0


def test_a_probe_given_up_lets_the_next_one_through() -> None:
    replica = failing(3)
    replica.begin()
    replica.abandon()
    assert replica.available_in(1.0) == 0


def test_p95_needs_enough_latencies() -> None:
    replica = Replica("http://r", 3, 1.0)
    assert replica.p95_s() is None
    for i in range(100):
        replica.begin()
        replica.succeed(i / 100)
    assert replica.p95_s() == 0.95
