"""One episode as coloured, escaped text: what the policy sampled, what was inserted, and which tag each stretch is inside of.

In: a trajectory and a function from token ids to text. Out: segments, and their HTML. Text of documents and of the model is data:
everything is escaped, and a tag that a passage contains cannot end the passage.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path

from async_search_rl.codec import DEFAULT_MAX_BYTES, decode, decode_group
from async_search_rl.errors import DataError, SchemaError
from async_search_rl.trajectory import Group, Trajectory
from async_search_rl.version import PolicyVersion

_TAG = re.compile(r"<(/?)(think|search|information|answer)>")
_LONG_PROMPT_CHARS = 300
_FILE_MAX_BYTES = 8 * DEFAULT_MAX_BYTES

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of text.

    ``kind``: the tag around it (`think`, `search`, `information`, `answer`), `prompt`, or `plain`. ``sampled``: by the policy, else
    inserted. ``tag``: it is such a tag itself.
    """

    text: str
    kind: str
    sampled: bool
    tag: bool = False


def read_groups(path: Path) -> list[Group]:
    """The groups of a file of kept episodes; none if there is no file.

    Raises:
        DataError: the file is damaged.
    """
    if not path.is_file():
        return []
    try:
        return [decode_group(data) for data in decode(path.read_bytes(), _FILE_MAX_BYTES)]
    except (SchemaError, TypeError) as error:
        raise DataError(f"{path} must be a list of encoded groups: {error}") from error


def load_decoder(model_folder: Path) -> Decode:
    """Ids to text by the model's own tokenizer, special tokens included.

    Raises:
        DataError: there is no tokenizer.json, or it cannot be read.
    """
    import tokenizers

    path = model_folder / "tokenizer.json"
    if not path.is_file():
        raise DataError(f"a tokenizer.json must be in {model_folder}, got none")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    return lambda ids: str(tokenizer.decode([int(i) for i in ids], skip_special_tokens=False))


def segments(trajectory: Trajectory, decode_ids: Decode) -> list[Segment]:
    """The episode's text in order: the prompt, then sampled and inserted stretches, split at their tags."""
    start = trajectory.prompt_length
    found = [Segment(decode_ids(trajectory.token_ids[:start].tolist()), "prompt", sampled=False)]
    rest = zip(trajectory.loss_mask[start:].tolist(), trajectory.token_ids[start:].tolist(), strict=True)
    kind = "plain"
    for sampled, tokens in groupby(rest, key=lambda pair: pair[0]):
        parts, kind = _split(decode_ids([token for _, token in tokens]), kind, sampled=sampled)
        found += parts
    return found


def html(parts: Sequence[Segment]) -> str:
    """Segments as HTML, one block for each run of one kind; the prompt folds away where it is long."""
    out = []
    for kind, group in groupby((part for part in parts if part.text.strip()), key=lambda part: part.kind):
        run = list(group)
        text = "".join(_span(part) for part in run)
        if kind == "prompt" and sum(len(part.text) for part in run) > _LONG_PROMPT_CHARS:
            out.append(f'<details class="block prompt"><summary>prompt</summary>{text}</details>')
        else:
            out.append(f'<div class="block {kind}">{text}</div>')
    return "".join(out)


def versions_text(trajectory: Trajectory) -> str:
    """Which weights sampled it: `weights of step 3`, or `weights of steps 3 to 5` where an update came in the middle."""
    steps = sorted({PolicyVersion.unpack(v).step for v in trajectory.versions[trajectory.loss_mask].tolist()})
    if not steps:
        return "nothing sampled"
    return f"weights of step {steps[0]}" if len(steps) == 1 else f"weights of steps {steps[0]} to {steps[-1]}"


def _span(part: Segment) -> str:
    classes = ("sampled" if part.sampled else "inserted") + (" tag" if part.tag else "")
    return f'<span class="{classes}">{escape(part.text)}</span>'


def _split(text: str, kind: str, *, sampled: bool) -> tuple[list[Segment], str]:
    """``text`` at its tags, and the kind that is open at its end.

    Inside passages only their own end counts; a sampled `<information>` is the policy's text, not passages.
    """
    parts: list[Segment] = []
    at = 0
    for match in _TAG.finditer(text):
        closing, name = match.group(1) == "/", match.group(2)
        if (kind == "information" and not (closing and name == "information")) or (name == "information" and sampled):
            continue
        parts.append(Segment(text[at : match.start()], kind, sampled))
        parts.append(Segment(match.group(), name, sampled, tag=True))
        kind, at = ("plain" if closing else name), match.end()
    parts.append(Segment(text[at:], kind, sampled))
    return [part for part in parts if part.text], kind
