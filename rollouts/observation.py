"""What the environment says back: retrieved passages between information tags, or a message after a turn without an action.

In: passages and a limit in tokens. Out: ids to append, none of which is trained on, and the passages they hold. Passages go in
whole, best first, as many as fit; the closing tag is always there. Only where not even the best one fits, its beginning goes in.
Tags and control tokens inside passages are escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from async_search_rl.errors import ConfigError
from rollouts.tokenizer import Tokenizer, escape
from search.schema import Passage

_INVALID = (
    "\n\nThis turn held no action. A search is written <search> query </search>, a final answer <answer> answer </answer>. "
    "I try again.\n\n"
)


@dataclass(frozen=True, slots=True)
class Observation:
    """Ids to append, and the passages that are in them, best first."""

    token_ids: list[int]
    passages: tuple[Passage, ...]


class Observations:
    """Renders observations for one vocabulary.

    ``space_after_tag``: ``<information> title: text title: text</information>``, each passage encoded by itself, for small
    vocabularies in which every word begins with its blank; otherwise Search-R1's numbered documents between blank lines.

    Raises:
        ConfigError: ``max_tokens`` has no room for an empty observation.
    """

    def __init__(self, tokenizer: Tokenizer, max_tokens: int, space_after_tag: bool) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._compact = space_after_tag
        self._open = tokenizer.encode("<information>" if space_after_tag else "\n\n<information>")
        self._close = tokenizer.encode("</information>" if space_after_tag else "</information>\n\n")
        compact_invalid = [*self._open, *tokenizer.encode(" no action"), *self._close]
        self.invalid_action: list[int] = compact_invalid if space_after_tag else tokenizer.encode(_INVALID)
        """Appended after a turn without an action."""
        if len(self._open) + len(self._close) > max_tokens:
            raise ConfigError(
                f"rollout.max_observation_tokens must be >= {len(self._open) + len(self._close)} (an empty observation), "
                f"got {max_tokens}"
            )

    def passages(self, passages: Sequence[Passage], room: int) -> Observation | None:
        """The observation of a search, in at most ``room`` tokens; ``None`` if not even an empty one fits."""
        budget = min(room, self._max_tokens) - len(self._open) - len(self._close)
        if budget < 0:
            return None
        inside: list[int] = []
        shown = 0
        for number, passage in enumerate(passages, start=1):
            ids = self._tokenizer.encode(self._render(number, passage))
            if len(inside) + len(ids) > budget:
                break
            inside += ids
            shown = number
        if passages and not shown and budget > 0:
            inside = self._tokenizer.encode(self._render(1, passages[0]))[:budget]
            shown = 1
        return Observation([*self._open, *inside, *self._close], tuple(passages[:shown]))

    def _render(self, number: int, passage: Passage) -> str:
        title = escape(passage.title, self._tokenizer.special_tokens)
        text = escape(passage.text, self._tokenizer.special_tokens)
        return f" {title}: {text}" if self._compact else f"Doc {number}(Title: {title}) {text}\n"
