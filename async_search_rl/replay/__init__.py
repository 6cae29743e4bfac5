"""Tickets, replay buffer, trajectory log and registry: the service between actors and learner. Needs no torch."""
