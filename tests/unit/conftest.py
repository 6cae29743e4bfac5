"""Hypothesis for all unit tests: a busy machine is no failure, so that no example has a deadline."""

from hypothesis import HealthCheck, settings

settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machine")
