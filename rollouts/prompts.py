"""From a question to prompt ids: chat template, raw template, or the messages that the data set rendered.

In: a :class:`Question`. Out: ids, at most ``rollout.max_prompt_tokens`` of them; a longer prompt is refused, naming the question.
Tags inside the question's text are escaped; templates and rendered messages are the user's own and stay as they are.
"""

from __future__ import annotations

from async_search_rl.config.run import DataSection
from async_search_rl.errors import DataError
from async_search_rl.questions import Message, Question
from rollouts.tokenizer import Tokenizer, escape


class Prompts:
    """Renders prompts as ``data.prompt`` and ``data.template`` say."""

    def __init__(self, tokenizer: Tokenizer, data: DataSection, max_prompt_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._data = data
        self._max_tokens = max_prompt_tokens

    def ids(self, question: Question) -> list[int]:
        """Prompt ids of ``question``.

        Raises:
            DataError: the prompt is too long or empty, or the question has no messages with ``data.prompt = "dataset"``.
        """
        ids = self._render(question)
        if not 1 <= len(ids) <= self._max_tokens:
            raise DataError(
                f"the prompt of question {question.id!r} must have 1 to {self._max_tokens} tokens (rollout.max_prompt_tokens), "
                f"got {len(ids)}"
            )
        return ids

    def _render(self, question: Question) -> list[int]:
        if self._data.prompt == "dataset":
            if not question.prompt:
                raise DataError(f"question {question.id!r} must have messages with data.prompt = 'dataset', got none")
            return self._tokenizer.chat(question.prompt)
        text = self._data.template.replace("{question}", escape(question.question, self._tokenizer.special_tokens))
        if self._data.prompt == "raw":
            return self._tokenizer.encode(text)
        return self._tokenizer.chat([Message("user", text)])
