"""Reward of an episode: exact match, token F1 and format, each in [0, 1], and their weighted sum.

Exact match and F1 follow SQuAD's evaluation (Rajpurkar et al. 2016) as Search-R1 (Jin et al. 2025) uses it: lower case, ASCII
punctuation out, articles out, blanks folded; the best over all accepted answers counts. Only what the policy sampled is looked at.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

from async_search_rl.config.rollout import RewardSection

PARTS = ("exact_match", "f1", "format")

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_TAG = re.compile(r"<(/?)(think|search|information|answer)>")


def normalize(text: str) -> str:
    """``text`` as SQuAD compares it."""
    lowered = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", lowered).split())


def exact_match(answer: str, targets: Sequence[str]) -> float:
    """1.0 where the normalised answer equals a normalised target and is not empty, else 0.0."""
    given = normalize(answer)
    return float(bool(given) and any(given == normalize(target) for target in targets))


def token_f1(answer: str, targets: Sequence[str]) -> float:
    """The best F1 of the bags of normalised tokens over the targets."""
    return max((_f1(normalize(answer).split(), normalize(target).split()) for target in targets), default=0.0)


def well_formed(turns: Sequence[str], actions: Sequence[str]) -> bool:
    """Whether every turn has one action, its tags are balanced and not nested, and the last action is the answer.

    ``turns`` are the turns' sampled texts, each up to its closing tag; ``actions`` what became of each.
    """
    if not turns or actions[-1] != "answer" or any(action != "search" for action in actions[:-1]):
        return False
    return all(_balanced(turn, action) for turn, action in zip(turns, actions, strict=True))


def reward_parts(answer: str, targets: Sequence[str], turns: Sequence[str], actions: Sequence[str]) -> dict[str, float]:
    """All parts of an answered episode, before weighting."""
    return {
        "exact_match": exact_match(answer, targets),
        "f1": token_f1(answer, targets),
        "format": float(well_formed(turns, actions)),
    }


def weigh(parts: dict[str, float], weights: RewardSection) -> float:
    """The weighted sum of the parts."""
    return weights.exact_match * parts["exact_match"] + weights.f1 * parts["f1"] + weights.format * parts["format"]


def _f1(given: list[str], target: list[str]) -> float:
    common = sum((Counter(given) & Counter(target)).values())
    return 2 * common / (len(given) + len(target)) if common else 0.0


def _balanced(turn: str, action: str) -> bool:
    """Whether the tags of one turn open and close in order, with its action as the only search or answer."""
    open_tag = ""
    actions = 0
    for closing, name in _TAG.findall(turn):
        if closing:
            if name != open_tag:
                return False
            actions += name in ("search", "answer")
            open_tag = ""
        elif open_tag or name not in ("think", action):
            return False
        else:
            open_tag = name
    return not open_tag and actions == 1
