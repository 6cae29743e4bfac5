"""Bounded scalar types and the section base class of the configuration.

A section is a frozen msgspec struct: unknown keys and wrong types are refused when the TOML is decoded. The string under a
field is its documentation; ``--help`` prints it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

Positive = Annotated[int, msgspec.Meta(ge=1)]
NonNegative = Annotated[int, msgspec.Meta(ge=0)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]
NonNegativeFloat = Annotated[float, msgspec.Meta(ge=0)]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
BelowOne = Annotated[float, msgspec.Meta(ge=0, lt=1)]
PositiveFraction = Annotated[float, msgspec.Meta(gt=0, le=1)]
Niceness = Annotated[int, msgspec.Meta(ge=0, le=19)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all configuration sections."""
