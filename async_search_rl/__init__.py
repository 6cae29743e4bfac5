"""Contracts shared by actors, learner, retrieval and replay: configuration, trajectories, wire format, errors, metrics."""

__version__ = "0.1.0"
