"""The one exception tree. Every class is also a standard exception, so that callers who do not know this package can catch it.

Raise with a sentence that says what must hold, what came, and from whom: ``max_staleness must be >= 0, got -1``.
"""

from __future__ import annotations


class SearchRLError(Exception):
    """Base of every error this project raises on purpose."""


class ConfigError(SearchRLError, ValueError):
    """A configuration key is unknown, of the wrong type, out of range, or impossible together with another."""


class DataError(SearchRLError, ValueError):
    """A file or record (questions, corpus, index, model folder) is not what it must be; the message names it."""


class SchemaError(SearchRLError, ValueError):
    """A message or structure breaks the wire contract; the message names the field."""


class TooLargeError(SchemaError):
    """A message is over its size cap."""


class ServiceError(SearchRLError, ConnectionError):
    """A remote service failed or answered with an error after all permitted retries."""


class DeadlineError(SearchRLError, TimeoutError):
    """A wait reached its deadline; the message says what was awaited, from whom, and for how long."""


class SearchFailedError(ServiceError):
    """A retrieval call failed. Never to be mistaken for a search that found nothing."""


class EngineError(SearchRLError, RuntimeError):
    """The inference or training engine failed or refused to start."""


class WeightSyncError(SearchRLError, RuntimeError):
    """A weight publication was aborted, arrived damaged, or does not fit the model."""


class CheckpointError(SearchRLError, RuntimeError):
    """A checkpoint is missing, incomplete, or was made by an incompatible configuration."""


class LogCorruptError(SearchRLError, RuntimeError):
    """The trajectory log is damaged before its last record; nothing may be guessed from it."""


class RunStoppedError(SearchRLError, RuntimeError):
    """The run must stop on purpose, with a reason a person can act on (for example, every group is filtered)."""
