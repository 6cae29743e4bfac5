"""Wire format: msgpack with a schema version, size caps, and numpy arrays as raw bytes.

A message is ``{"schema": SCHEMA_VERSION, "body": tree}``. A tree holds nil, booleans, integers, floats, strings, bytes, lists,
maps with string keys, and arrays (extension type 1: dtype, shape, bytes in C order). Everything else is refused in both
directions; nothing is ever unpickled. Typed messages are msgspec structs converted to and from such trees.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

import msgpack
import msgspec
import numpy as np

from async_search_rl.errors import SchemaError, TooLargeError
from async_search_rl.trajectory import Group, Trajectory, Turn

SCHEMA_VERSION = 1
DEFAULT_MAX_BYTES = 64 << 20

_ARRAY = 1
_DTYPES = {"|b1", "<i4", "<i8", "<f4", "<f8", "|u1"}
_MAX_DIMENSIONS = 8
_TRAJECTORY_ARRAYS = ("token_ids", "loss_mask", "behaviour_logprobs", "versions")

T = TypeVar("T")


def encode(tree: Any) -> bytes:
    """A tree as bytes.

    Raises:
        SchemaError: if the tree holds something the wire format has no place for.
    """
    try:
        packed: bytes = msgpack.packb({"schema": SCHEMA_VERSION, "body": tree}, default=_pack_array, strict_types=False)
    except (TypeError, ValueError, OverflowError) as error:
        raise SchemaError(f"message cannot be encoded: {error}") from error
    return packed


def decode(data: bytes, max_bytes: int = DEFAULT_MAX_BYTES) -> Any:
    """Inverse of :func:`encode`. Arrays share memory with ``data`` and are read-only.

    Raises:
        TooLargeError: if ``data`` is longer than ``max_bytes``.
        SchemaError: if it is not such a message, or of another schema version.
    """
    if len(data) > max_bytes:
        raise TooLargeError(f"message must be <= {max_bytes} bytes, got {len(data)}")
    try:
        message = msgpack.unpackb(data, ext_hook=_unpack_array, strict_map_key=True, raw=False)
    except SchemaError:
        raise
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise SchemaError(f"message is not valid msgpack: {str(error) or type(error).__name__}") from error
    if not isinstance(message, dict) or set(message) != {"schema", "body"}:
        raise SchemaError("message must be a map of schema and body")
    if message["schema"] != SCHEMA_VERSION:
        raise SchemaError(f"schema must be {SCHEMA_VERSION}, got {message['schema']!r}: both sides must run the same release")
    return message["body"]


def encode_message(message: msgspec.Struct) -> bytes:
    """A typed message as bytes."""
    return encode(msgspec.to_builtins(message, builtin_types=(bytes,)))


def decode_message(data: bytes, kind: type[T], max_bytes: int = DEFAULT_MAX_BYTES) -> T:
    """A message of the struct type ``kind``.

    Raises:
        SchemaError: naming the field that is missing, unknown or of the wrong type.
    """
    return _convert(decode(data, max_bytes), kind, kind.__name__)


def group_to_tree(group: Group) -> dict[str, Any]:
    """A group as a tree."""
    return {
        "ticket": group.ticket,
        "attempt": group.attempt,
        "question_id": group.question_id,
        "actor": group.actor,
        "evaluation": group.evaluation,
        "trajectories": [_trajectory_to_tree(t) for t in group.trajectories],
    }


def group_from_tree(tree: Any) -> Group:
    """Inverse of :func:`group_to_tree`; every invariant of :class:`Group` and :class:`Trajectory` is checked.

    Raises:
        SchemaError: naming the field.
    """
    header = _convert(tree, _GroupHeader, "group")
    trajectories = tuple(_trajectory_from_tree(t, i) for i, t in enumerate(header.trajectories))
    return Group(
        ticket=header.ticket,
        attempt=header.attempt,
        question_id=header.question_id,
        actor=header.actor,
        evaluation=header.evaluation,
        trajectories=trajectories,
    )


def encode_group(group: Group) -> bytes:
    """A group as bytes."""
    return encode(group_to_tree(group))


def decode_group(data: bytes, max_bytes: int = DEFAULT_MAX_BYTES) -> Group:
    """Inverse of :func:`encode_group`."""
    return group_from_tree(decode(data, max_bytes))


class _GroupHeader(msgspec.Struct, forbid_unknown_fields=True):
    ticket: int
    attempt: int
    question_id: str
    actor: str
    evaluation: int | None
    trajectories: list[Any]


class _TrajectoryHeader(msgspec.Struct, forbid_unknown_fields=True):
    token_ids: Any
    loss_mask: Any
    behaviour_logprobs: Any
    versions: Any
    prompt_length: int
    turns: tuple[Turn, ...]
    reward: float | None
    reward_parts: dict[str, float]
    outcome: str
    answer: str | None
    fault: str | None
    seconds: float


def _trajectory_to_tree(t: Trajectory) -> dict[str, Any]:
    tree: dict[str, Any] = {name: getattr(t, name) for name in _TrajectoryHeader.__struct_fields__}
    tree["turns"] = msgspec.to_builtins(t.turns)
    return tree


def _trajectory_from_tree(tree: Any, index: int) -> Trajectory:
    where = f"trajectories[{index}]"
    header = _convert(tree, _TrajectoryHeader, where)
    for name in _TRAJECTORY_ARRAYS:
        if not isinstance(getattr(header, name), np.ndarray):
            raise SchemaError(f"{where}.{name} must be an array, got {type(getattr(header, name)).__name__}")
    try:
        return Trajectory(**{name: getattr(header, name) for name in header.__struct_fields__})
    except SchemaError as error:
        raise SchemaError(f"{where}.{error}") from error


def _convert(tree: Any, kind: type[T], where: str) -> T:
    try:
        return msgspec.convert(tree, kind)
    except msgspec.ValidationError as error:
        raise SchemaError(f"{where}: {error}") from error
    except IndexError as error:  # msgspec reads an array in a map's place as if it were a map
        raise SchemaError(f"{where}: maps must not be arrays, got one") from error


def _pack_array(value: Any) -> msgpack.ExtType:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{type(value).__name__} has no place in the wire format")
    if value.dtype.str not in _DTYPES:
        raise TypeError(f"array dtype must be one of {sorted(_DTYPES)}, got {value.dtype.str}")
    header = [value.dtype.str, list(value.shape), np.ascontiguousarray(value).tobytes()]
    return msgpack.ExtType(_ARRAY, msgpack.packb(header))


def _unpack_array(code: int, data: bytes) -> np.ndarray[Any, Any]:
    if code != _ARRAY:
        raise SchemaError(f"extension type must be {_ARRAY}, got {code}")
    header = msgpack.unpackb(data, strict_map_key=True, raw=False)
    if not isinstance(header, list) or len(header) != 3:
        raise SchemaError("array must be [dtype, shape, bytes]")
    dtype, shape, raw = header
    if dtype not in _DTYPES:
        raise SchemaError(f"array dtype must be one of {sorted(_DTYPES)}, got {dtype!r}")
    sizes_ok = isinstance(shape, list) and len(shape) <= _MAX_DIMENSIONS and all(type(n) is int and n >= 0 for n in shape)
    if not sizes_ok or not isinstance(raw, bytes):
        raise SchemaError(f"array shape must be a short list of sizes >= 0 with bytes, got {shape!r}")
    expected = math.prod(shape) * np.dtype(dtype).itemsize
    if len(raw) != expected:
        raise SchemaError(f"array bytes must be {expected} long for {dtype} {shape}, got {len(raw)}")
    if dtype == "|b1" and raw.translate(None, b"\x00\x01"):
        raise SchemaError("array bytes must be 0 or 1 for |b1, got another value")
    return np.frombuffer(raw, dtype=dtype).reshape(shape)
