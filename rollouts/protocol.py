"""Where a turn ends and what it asked for: the first complete ``</search>`` or ``</answer>`` among the sampled tokens.

In: the ids of one turn. Out: how many of them belong to it, and its action. The sampled ids themselves are never changed: a turn
ends after the whole token that completes the tag, even where that token's text runs past ``>``.

Two formats, one a vocabulary. ``text``: tags are found in the decoded text, however they are split over tokens. ``special``: each
tag is one vocabulary token. The engine stops by itself on ``stop_strings`` or ``stop_token_ids``, which only saves work: the cut
made here is what counts, so an engine that stops late, or not at all, changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from async_search_rl.errors import ConfigError
from rollouts.tokenizer import Tokenizer

ActionKind = Literal["search", "answer"]
KINDS: tuple[ActionKind, ...] = ("search", "answer")
_CLOSING = {f"</{kind}>": kind for kind in KINDS}


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """One turn, cut.

    Attributes:
        length: tokens that belong to it.
        complete: whether a closing tag ended it.
        kind: ``search`` or ``answer`` where the closing tag had an opening one and something between them, else ``None``.
        content: the query or the answer, without surrounding blanks; empty without an action.
        text: decoded text of the turn's tokens.
    """

    length: int
    complete: bool
    kind: ActionKind | None
    content: str
    text: str


class ActionFormat(Protocol):
    """How actions look in one vocabulary."""

    stop_strings: tuple[str, ...]
    stop_token_ids: tuple[int, ...]

    def parse(self, token_ids: Sequence[int]) -> ParsedTurn:
        """Cut the sampled ids of one turn after the first complete closing tag, and read the action."""


class TextActions:
    """Tags as text. ``parse`` is exact for every tokenizer whose decoded text keeps a tag once it is there, as more ids follow."""

    stop_strings: tuple[str, ...] = tuple(_CLOSING)
    stop_token_ids: tuple[int, ...] = ()

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode = tokenizer.decode

    def parse(self, token_ids: Sequence[int]) -> ParsedTurn:
        """See :meth:`ActionFormat.parse`; about ``log2(len(token_ids))`` decodings."""
        text = self._decode(token_ids)
        if _first_closing(text) is None:
            return ParsedTurn(len(token_ids), False, None, "", text)
        incomplete, complete = 0, len(token_ids)
        while complete - incomplete > 1:
            middle = (incomplete + complete) // 2
            if _first_closing(self._decode(token_ids[:middle])) is None:
                incomplete = middle
            else:
                complete = middle
        text = self._decode(token_ids[:complete])
        kind, content = read_action(text)
        return ParsedTurn(complete, True, kind, content, text)


class SpecialActions:
    """Tags as single vocabulary tokens.

    Raises:
        ConfigError: the vocabulary lacks one of the tags.
    """

    stop_strings: tuple[str, ...] = ()

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode = tokenizer.decode
        self._opening: dict[ActionKind, int] = {}
        self._kind_of: dict[int, ActionKind] = {}
        for kind in KINDS:
            self._opening[kind] = _tag_id(tokenizer, f"<{kind}>")
            self._kind_of[_tag_id(tokenizer, f"</{kind}>")] = kind
        self.stop_token_ids: tuple[int, ...] = tuple(self._kind_of)

    def parse(self, token_ids: Sequence[int]) -> ParsedTurn:
        """See :meth:`ActionFormat.parse`."""
        end = next((i for i, token in enumerate(token_ids) if token in self._kind_of), None)
        if end is None:
            return ParsedTurn(len(token_ids), False, None, "", self._decode(token_ids))
        kind = self._kind_of[token_ids[end]]
        text = self._decode(token_ids[: end + 1])
        opening = self._opening[kind]
        start = next((i for i in range(end - 1, -1, -1) if token_ids[i] == opening), None)
        content = "" if start is None else self._decode(token_ids[start + 1 : end]).strip()
        return ParsedTurn(end + 1, True, kind if content else None, content, text)


def make_actions(kind: Literal["text", "special"], tokenizer: Tokenizer) -> ActionFormat:
    """The action format that ``rollout.action_tokens`` names."""
    return SpecialActions(tokenizer) if kind == "special" else TextActions(tokenizer)


def read_action(text: str) -> tuple[ActionKind | None, str]:
    """The action of a turn's text: what stands between the first closing tag and the nearest opening tag before it.

    ``(None, "")`` where there is no closing tag, no opening one before it, or nothing but blanks between them.
    """
    found = _first_closing(text)
    if found is None:
        return None, ""
    position, kind = found
    start = text.rfind(f"<{kind}>", 0, position)
    content = text[start + len(kind) + 2 : position].strip() if start >= 0 else ""
    return (kind, content) if content else (None, "")


def _first_closing(text: str) -> tuple[int, ActionKind] | None:
    """Position and kind of the first complete closing tag."""
    found = [(text.find(tag), kind) for tag, kind in _CLOSING.items() if tag in text]
    return min(found) if found else None


def _tag_id(tokenizer: Tokenizer, tag: str) -> int:
    token = tokenizer.token_id(tag)
    if token is None:
        raise ConfigError(f"the vocabulary must hold {tag} as one token with rollout.action_tokens = 'special', got none")
    return token
