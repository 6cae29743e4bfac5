"""Packing: which trajectories share a micro-batch, and which rank computes it.

In: token counts, a token budget, the number of ranks. Out: for each rank a list of micro-batches (lists of trajectory
indices). Every rank gets the same number of micro-batches, because ZeRO-3's collectives must line up; the micro-batches
that run at the same time cost about the same. Pure and deterministic: every rank computes the same plan for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from async_search_rl.errors import SchemaError

QUADRATIC_TOKENS = 32768
"""Default length at which a trajectory's attention costs as much as the rest of the model: P / (layers * hidden) for 1.5B."""

_REFINEMENTS = 400


@dataclass(frozen=True)
class PackingPlan:
    """The micro-batches of one optimiser step."""

    ranks: list[list[list[int]]]
    """``ranks[r][m]``: trajectory indices of rank r's m-th micro-batch; may be empty, and then still has to be run."""
    padding: float
    """Share of the token slots that idle: 1 - tokens / (sum over micro-steps of ranks * longest micro-batch)."""
    imbalance: float
    """The same share for the cost ``L + L^2 / quadratic_tokens``."""

    @property
    def micro_batches(self) -> int:
        """Micro-batches of each rank."""
        return len(self.ranks[0])


def pack(lengths: Sequence[int], budget: int, ranks: int = 1, quadratic_tokens: int = QUADRATIC_TOKENS) -> PackingPlan:
    """Pack trajectories of ``lengths`` tokens into micro-batches of at most ``budget`` tokens, balanced over ``ranks``.

    A trajectory over the budget has a micro-batch to itself. The number of micro-batches is the smallest found that is a
    multiple of ``ranks``; within it the sums of L and of L^2 are balanced.

    Raises:
        SchemaError: when ``budget`` or ``ranks`` is below 1, or a length is.
    """
    if budget < 1 or ranks < 1 or quadratic_tokens < 1:
        raise SchemaError(f"budget, ranks and quadratic_tokens must be >= 1, got {budget}, {ranks}, {quadratic_tokens}")
    if any(length < 1 for length in lengths):
        raise SchemaError(f"every length must be >= 1 token, got {min(lengths)}")
    costs = [length + length * length / quadratic_tokens for length in lengths]
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    alone = [[i] for i in order if lengths[i] > budget]
    rest = [i for i in order if lengths[i] <= budget]
    bins = alone + _fill(rest, lengths, costs, budget, ranks, len(alone))
    plan = _deal(bins, lengths, costs, ranks)
    return PackingPlan(plan, _idle(plan, lengths), _idle(plan, costs))


def split_groups(group_ids: Sequence[Any], parts: int) -> list[list[int]]:
    """Trajectory indices of each of ``parts`` mini-batches: whole groups, in order of first appearance, counts as equal as can be.

    Raises:
        SchemaError: when there are fewer groups than parts.
    """
    members: dict[Any, list[int]] = {}
    for index, group in enumerate(group_ids):
        members.setdefault(group, []).append(index)
    groups = list(members.values())
    if not 1 <= parts <= len(groups):
        raise SchemaError(f"mini-batches must be between 1 and the number of groups ({len(groups)}), got {parts}")
    bounds = [part * len(groups) // parts for part in range(parts + 1)]
    return [[i for group in groups[low:high] for i in group] for low, high in pairwise(bounds)]


def _fill(items: list[int], lengths: Sequence[int], costs: Sequence[float], budget: int, ranks: int, taken: int) -> list[list[int]]:
    """Bins for ``items`` (longest first) so that ``taken`` plus their number is the smallest multiple of ``ranks`` that works."""
    fewest = -(-sum(lengths[i] for i in items) // budget)
    count = max(_multiple(taken + fewest, ranks), ranks) - taken
    first_fit = _first_fit(items, lengths, budget)
    while True:
        bins = _spread(items, lengths, costs, budget, count)
        if bins is None and len(first_fit) <= count:
            bins = first_fit + [[] for _ in range(count - len(first_fit))]
        if bins is not None:
            return _refine(bins, lengths, costs, budget)
        count += ranks


def _multiple(count: int, of: int) -> int:
    return -(-count // of) * of


def _first_fit(items: list[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """First fit decreasing: at most 11/9 of the optimal number of bins, and often the optimum."""
    bins: list[list[int]] = []
    used: list[int] = []
    for i in items:
        at = next((b for b, tokens in enumerate(used) if tokens + lengths[i] <= budget), None)
        if at is None:
            bins.append([i])
            used.append(lengths[i])
        else:
            bins[at].append(i)
            used[at] += lengths[i]
    return bins


def _spread(items: list[int], lengths: Sequence[int], costs: Sequence[float], budget: int, count: int) -> list[list[int]] | None:
    """Longest first into the cheapest of ``count`` bins that has room; None when one has room nowhere."""
    if count == 0:
        return [] if not items else None
    bins: list[list[int]] = [[] for _ in range(count)]
    used, cost = np.zeros(count, dtype=np.int64), np.zeros(count)
    for i in items:
        at = int(np.argmin(np.where(used + lengths[i] <= budget, cost, np.inf)))
        if used[at] + lengths[i] > budget:
            return None
        bins[at].append(i)
        used[at] += lengths[i]
        cost[at] += costs[i]
    return bins


def _refine(bins: list[list[int]], lengths: Sequence[int], costs: Sequence[float], budget: int) -> list[list[int]]:
    """Move or swap trajectories between the dearest and the cheapest bin while that narrows their gap."""
    used = [sum(lengths[i] for i in members) for members in bins]
    cost = [sum(costs[i] for i in members) for members in bins]
    for _ in range(_REFINEMENTS if len(bins) > 1 else 0):
        high, low = int(np.argmax(cost)), int(np.argmin(cost))
        step = _best_exchange(bins[high], bins[low], lengths, costs, budget - used[low], cost[high] - cost[low])
        if step is None:
            break
        out, back = step
        bins[high].remove(out)
        bins[low].append(out)
        moved_tokens, moved_cost = lengths[out], costs[out]
        if back is not None:
            bins[low].remove(back)
            bins[high].append(back)
            moved_tokens, moved_cost = moved_tokens - lengths[back], moved_cost - costs[back]
        used[high], used[low] = used[high] - moved_tokens, used[low] + moved_tokens
        cost[high], cost[low] = cost[high] - moved_cost, cost[low] + moved_cost
    return bins


def _best_exchange(
    high: list[int], low: list[int], lengths: Sequence[int], costs: Sequence[float], room: int, gap: float
) -> tuple[int, int | None] | None:
    """The member of ``high`` to give, and the member of ``low`` to take back (None: nothing), that leave the smallest gap."""
    best, best_gap = None, gap * (1 - 1e-3)
    for out in high:
        for back in [None, *low]:
            tokens = lengths[out] - (lengths[back] if back is not None else 0)
            moved = costs[out] - (costs[back] if back is not None else 0.0)
            if moved > 0 and tokens <= room and abs(gap - 2 * moved) < best_gap:
                best, best_gap = (out, back), abs(gap - 2 * moved)
    return best


def _deal(bins: list[list[int]], lengths: Sequence[int], costs: Sequence[float], ranks: int) -> list[list[list[int]]]:
    """Bins of similar cost run at the same time; in each such step the largest sum of L^2 goes to the rank with the least so far.

    Who takes which bin of a step changes no time, so it is free to balance the squares.
    """
    cost = [sum(costs[i] for i in members) for members in bins]
    squares = [sum(lengths[i] ** 2 for i in members) for members in bins]
    order = sorted(range(len(bins)), key=lambda b: (-cost[b], b))
    plan: list[list[list[int]]] = [[] for _ in range(ranks)]
    done = [0] * ranks
    for start in range(0, len(order), ranks):
        least_first = sorted(range(ranks), key=lambda r: (done[r], r))
        largest_first = sorted(order[start : start + ranks], key=lambda b: (-squares[b], b))
        for rank, b in zip(least_first, largest_first, strict=True):
            plan[rank].append(sorted(bins[b]))
            done[rank] += squares[b]
    return plan


def _idle(plan: list[list[list[int]]], weights: Sequence[float]) -> float:
    steps = [[sum(weights[i] for i in members) for members in step] for step in zip(*plan, strict=True)]
    slots = sum(max(step) * len(step) for step in steps)
    return 1 - sum(map(sum, steps)) / slots if slots else 0.0
