"""The policy's tokenizer behind the five calls that rollouts need, so that the rest imports neither transformers nor torch.

In: a model folder. Out: ids for text that is inserted, text for ids that were sampled. Sampled ids are never encoded again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from async_search_rl.errors import DataError
from async_search_rl.questions import Message

TAGS = tuple(f"<{slash}{name}>" for name in ("think", "search", "information", "answer") for slash in ("", "/"))
"""Every tag of the protocol; none of them may come out of a document or a question."""

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")


class Tokenizer(Protocol):
    """Text and ids of one vocabulary."""

    special_tokens: tuple[str, ...]
    """Texts that encode to control tokens."""
    eos_id: int | None
    """End-of-sequence token."""

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, nothing added."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``, control tokens included, nothing tidied."""

    def token_id(self, text: str) -> int | None:
        """Id of the vocabulary entry ``text``, or ``None``."""

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Ids of the chat template over ``messages`` up to where the assistant's reply begins.

        Raises:
            DataError: the tokenizer has no chat template, or the template refuses the messages.
        """


class TransformersTokenizer:
    """:class:`Tokenizer` over a tokenizer of transformers."""

    def __init__(self, inner: Any, where: str) -> None:
        self._inner = inner
        self._where = where
        self._vocabulary: dict[str, int] = inner.get_vocab()
        # Many vocabularies name only BOS and EOS as special, and merely add their other control tokens.
        control = (token.content for token in inner.added_tokens_decoder.values() if token.special)
        self.special_tokens: tuple[str, ...] = tuple(dict.fromkeys([*inner.all_special_tokens, *control]))
        self.eos_id: int | None = inner.eos_token_id

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, nothing added."""
        return [int(i) for i in self._inner.encode(text, add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``, control tokens included, nothing tidied."""
        return str(self._inner.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def token_id(self, text: str) -> int | None:
        """Id of the vocabulary entry ``text``, or ``None``."""
        return self._vocabulary.get(text)

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """See :meth:`Tokenizer.chat`."""
        from jinja2 import TemplateError

        rows = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text = self._inner.apply_chat_template(rows, tokenize=False, add_generation_prompt=True)
        except (ValueError, TypeError, KeyError, TemplateError) as error:
            raise DataError(
                f"the tokenizer of {self._where} must have a chat template for these messages: {_first_line(error)}"
            ) from error
        return self.encode(text)


def load_tokenizer(folder: str | Path) -> TransformersTokenizer:
    """The tokenizer of a model folder.

    Raises:
        DataError: the folder is missing, holds no tokenizer, or one that cannot be read.
    """
    path = Path(folder)
    _require_tokenizer_files(path)
    from transformers import AutoTokenizer

    try:
        inner = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"the tokenizer of {path} cannot be read: {_first_line(error)}") from error
    return TransformersTokenizer(inner, str(path))


def require_model_folder(folder: str | Path) -> None:
    """Refuse what is no model folder; looks at file names only.

    Raises:
        DataError: naming what is missing.
    """
    path = Path(folder)
    _require_tokenizer_files(path)
    for pattern in ("config.json", "*.safetensors"):
        if not any(path.glob(pattern)):
            raise DataError(f"model.path must be a model folder with {pattern}, got {str(folder)!r} without one")


def escape(text: str, special_tokens: Sequence[str] = ()) -> str:
    """``text`` with every protocol tag and control token broken by escaping its first character, as HTML would."""
    names = sorted({*TAGS, *(token for token in special_tokens if token.strip())}, key=len, reverse=True)
    pattern = "|".join(re.escape(name) for name in names)
    return re.sub(pattern, lambda match: _escaped(match.group()), text)


def _require_tokenizer_files(path: Path) -> None:
    if not path.is_dir():
        raise DataError(f"model.path must be a model folder, got {str(path)!r}")
    if not any((path / name).is_file() for name in _FILES):
        raise DataError(f"model.path must hold a tokenizer ({', '.join(_FILES[:3])}, ...), got {str(path)!r} without one")


def _escaped(token: str) -> str:
    first = "&lt;" if token[0] == "<" else f"&#{ord(token[0])};"
    return first + token[1:]


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
