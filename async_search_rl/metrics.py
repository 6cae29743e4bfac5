"""Every metric's name, unit and meaning, in one table; and Prometheus text, which shows them.

In: plain ``{name: number}`` maps from the learner, the actors, the replay service and the search service. Out: their meanings, and
the text. What is kept of them over time is written by :mod:`async_search_rl.json_lines`.

Names are snake_case and end in their unit where they have one (`_s` seconds, `_bytes`, `_per_s`); shares are in [0, 1].
Counters only grow within one process; the replay service's grow over restarts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Scope = Literal["learner", "actor", "replay", "recent", "evaluation", "search"]
"""Who measures: the learner (one record a step), a generator's gauges, the replay service's totals and its moving averages, the
means of one evaluation round, the search service."""

Kind = Literal["gauge", "counter"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table."""

    name: str
    kind: Kind
    unit: str
    meaning: str


def _rows(kind: Kind, *rows: tuple[str, str, str]) -> tuple[Metric, ...]:
    return tuple(Metric(name, kind, unit, meaning) for name, unit, meaning in rows)


_LEARNER = _rows(
    "gauge",
    ("step", "batches", "trained batches after this step"),
    ("cut", "batches", "number of the batch that was trained"),
    ("incarnation", "starts", "start of the learner that trained it"),
    ("version", "incarnation.step", "version of the weights after this step"),
    ("loss", "1", "policy loss with its KL and entropy terms"),
    ("policy_loss", "1", "policy loss alone"),
    ("value_loss", "1", "critic loss"),
    ("explained_variance", "1", "share of the returns' variance that the critic explains"),
    ("reward_mean", "reward", "mean final reward of the batch's valid trajectories"),
    ("reward_std", "reward", "standard deviation of the same"),
    ("exact_match", "share", "exact matches among the batch's valid trajectories"),
    ("advantage_std", "1", "standard deviation of the advantages over trainable tokens"),
    ("searches_mean", "searches", "searches a trajectory"),
    ("length_mean", "tokens", "tokens a trajectory, prompt included"),
    ("trajectories", "trajectories", "valid trajectories in the batch"),
    ("trajectories_invalid", "trajectories", "trajectories left out because of a fault"),
    ("groups", "groups", "groups in the batch"),
    ("tokens", "tokens", "tokens of the batch, prompts and observations included"),
    ("trainable_tokens", "tokens", "sampled tokens of the batch"),
    ("reuse_fraction", "share", "trainable tokens that weights older than those the step started from had sampled"),
    ("padding", "share", "padding among the processed tokens"),
    ("microbatches", "micro-batches", "micro-batches of the step on this rank"),
    ("lag_mean", "batches", "mean staleness of the batch's groups"),
    ("lag_max", "batches", "largest staleness of the batch's groups"),
    ("lag_histogram", "groups", "groups of the batch by their staleness"),
    ("length_answered", "tokens", "mean length of trajectories that ended with an answer"),
    ("length_no_answer", "tokens", "mean length of trajectories without an answer; of the valid ones"),
    ("length_length", "tokens", "mean length of trajectories that ran out of context"),
    ("length_fault", "tokens", "mean length of trajectories broken by a fault"),
    ("ess", "share", "effective sample size of the correction weights over trainable tokens"),
    ("ratio_ess", "share", "effective sample size of the raw ratios current over behaviour, whatever the correction"),
    ("weight_mean", "1", "mean correction weight from behaviour to proximal policy"),
    ("clip_fraction", "share", "trainable tokens whose ratio is clipped"),
    ("clip_low_fraction", "share", "those of them whose ratio is below 1"),
    ("clip_high_fraction", "share", "those of them whose ratio is above 1"),
    ("mask_fraction", "share", "trainable tokens whose correction weight is zero"),
    ("truncated_fraction", "share", "trainable tokens whose correction weight is capped"),
    ("clip_active", "0 or 1", "whether clipping can act at all (several mini-batches, or proximal = behaviour)"),
    ("kl_behaviour", "nats a token", "KL(behaviour, current)"),
    ("kl_reference", "nats a token", "KL to the reference policy"),
    ("entropy", "nats a token", "entropy of the current policy on trainable tokens"),
    ("grad_norm", "1", "global gradient norm before clipping"),
    ("lr", "1", "learning rate of the step"),
    ("skipped", "steps", "optimiser steps of the batch not applied, as not finite"),
    ("critic_grad_norm", "1", "the critic's global gradient norm before clipping"),
    ("critic_lr", "1", "the critic's learning rate of the step"),
    ("critic_skipped", "share", "the critic's optimiser steps not applied, as not finite"),
    ("idle_share", "share", "wait for the batch over the whole step"),
    ("buffered", "groups", "groups that waited for a batch when this one was cut"),
    ("wait_s", "s", "wait for the batch"),
    ("train_s", "s", "advantages, packing, forward, backward and optimiser"),
    ("publish_stall_s", "s", "training stood still to stage the weights (the collective part)"),
    ("publish_s", "s", "last finished broadcast of weights, from the offers to the last bucket"),
    ("checkpoint_s", "s", "training stood still for a checkpoint"),
    ("step_s", "s", "whole step, waits included"),
    ("tokens_per_s", "tokens/s", "batch tokens over train_s"),
    ("flops", "operations", "model FLOPs of forward and backward pass over the batch"),
    ("mfu", "share", "model FLOPs utilisation; absent on an unknown device"),
    ("device_memory_bytes", "bytes", "high-water mark of device memory"),
    ("host_memory_bytes", "bytes", "high-water mark of resident host memory"),
    ("publications", "publications", "broadcasts of weights finished since this start, one for each group of receivers"),
    ("publications_aborted", "publications", "broadcasts of weights broken off since this start, for whatever reason"),
)

_ACTOR = _rows(
    "gauge",
    ("episodes_running", "episodes", "episodes being generated or searching"),
    ("episodes_searching", "episodes", "episodes that wait for retrieval"),
    ("tokens_per_s", "tokens/s", "tokens sampled a second, over the last few seconds"),
    ("pause_s", "s", "the engine stood still for the last weight update"),
    ("receive_s", "s", "reception of the last weights, while generating"),
) + _rows(
    "counter",
    ("tokens_generated", "tokens", "tokens sampled"),
    ("episodes", "episodes", "episodes finished"),
    ("faults", "episodes", "episodes ended by a fault"),
    ("groups_sent", "groups", "groups put to the replay service"),
    ("searches", "searches", "searches carried out"),
    ("search_wait_s", "s", "waits for retrieval, summed over episodes"),
    ("idle_s", "s", "no request was in the engine"),
    ("busy_s", "s", "at least one request was in the engine"),
    ("stall_s", "s", "the engine stood still for weight updates"),
    ("weight_updates", "updates", "weight versions loaded"),
    ("in_flight_updates", "requests", "requests that went on generating across a weight update, counted once an update"),
)

_REPLAY = _rows(
    "counter",
    ("tickets_issued", "tickets", "training tickets issued, repeated attempts aside"),
    ("attempts_reissued", "attempts", "attempts beyond a ticket's first"),
    ("attempts_failed", "attempts", "attempts that came back without enough valid trajectories"),
    ("groups_accepted", "groups", "groups that entered the buffer"),
    ("groups_trained", "groups", "groups in batches that were trained"),
    ("groups_stale", "groups", "groups over the staleness bound: at put, at cut, or cancelled while running"),
    ("groups_filtered", "groups", "groups of equal rewards, which carry no gradient"),
    ("groups_failed", "groups", "tickets given up after all attempts"),
    ("groups_cancelled", "groups", "running groups cancelled because they could no longer be used"),
    ("groups_duplicate", "groups", "puts that came after another had won their ticket"),
    ("groups_dropped", "groups", "groups accepted that are nowhere now; must stay 0"),
    ("stale_tokens", "tokens", "mean trajectory lengths of the stale groups that came back, summed; cancelled ones did not"),
    ("trajectories", "trajectories", "trajectories of training groups that were put"),
    ("sampled_tokens", "tokens", "sampled tokens of the same"),
    ("evaluations_done", "rounds", "evaluation rounds finished"),
    ("publications", "publications", "policy versions announced"),
    ("questions_parked", "questions", "questions parked after all attempts"),
    ("bytes_logged", "bytes", "bytes written to the trajectory log"),
) + _rows(
    "gauge",
    ("max_lag", "batches", "largest staleness of any group trained so far"),
    ("running", "groups", "groups being rolled out"),
    ("buffered", "groups", "groups that wait for a batch"),
    ("training", "groups", "groups of batches whose weights are not announced yet"),
)

_RECENT = _rows(
    "gauge",
    ("reward_mean", "reward", "mean reward of groups put lately, filtered ones included"),
    ("exact_match", "share", "exact matches among the same"),
    ("searches_mean", "searches", "searches a trajectory among the same"),
    ("length_mean", "tokens", "tokens a trajectory among the same"),
    ("seconds_mean", "s", "wall time of an episode among the same"),
    ("lag_mean", "batches", "mean staleness of the groups of the last two batches"),
    ("lag_max", "batches", "largest staleness of the same"),
    ("groups_per_s", "groups/s", "groups put a second"),
    ("tokens_per_s", "tokens/s", "sampled tokens put a second"),
    ("puts_per_s", "puts/s", "training puts answered a second, duplicates included"),
    ("valid_share", "share", "trajectories without a fault among the groups put lately"),
    ("filtered_share", "share", "filtered groups among those put lately"),
)

_EVALUATION = _rows(
    "gauge",
    ("reward", "reward", "mean reward"),
    ("exact_match", "share", "exact matches"),
    ("f1", "share", "mean token F1"),
    ("format", "share", "well-formed trajectories"),
    ("searches", "searches", "searches a question"),
    ("length", "tokens", "tokens a trajectory"),
    ("valid", "share", "trajectories without a fault"),
)

_SEARCH = _rows(
    "gauge",
    ("queue", "queries", "queries waiting"),
    ("cache_entries", "entries", "results in the cache"),
    ("cache_hit_rate", "share", "queries answered from the cache, of those looked up"),
    ("batch_mean", "queries", "queries a search call"),
    ("latency_p50_s", "s", "median time from a parsed request to its answer, lately"),
    ("latency_p99_s", "s", "99th percentile of the same"),
) + _rows(
    "counter",
    ("requests", "requests", "requests answered"),
    ("queries", "queries", "queries answered"),
    ("cache_hits", "queries", "queries answered from the cache"),
    ("coalesced", "queries", "queries that joined an equal one in flight"),
    ("rejected", "queries", "queries answered 503"),
    ("failed", "queries", "queries whose search failed or missed its deadline"),
    ("busy_s", "s", "the search worker was busy"),
)

METRICS: dict[Scope, dict[str, Metric]] = {
    "learner": {m.name: m for m in _LEARNER},
    "actor": {m.name: m for m in _ACTOR},
    "replay": {m.name: m for m in _REPLAY},
    "recent": {m.name: m for m in _RECENT},
    "evaluation": {m.name: m for m in _EVALUATION},
    "search": {m.name: m for m in _SEARCH},
}
"""The table: scope, then name."""


def unknown_names(scope: Scope, names: Iterable[str]) -> list[str]:
    """Those of ``names`` that the table does not have; a test of each process keeps this empty."""
    return sorted(set(names) - set(METRICS[scope]))


def prometheus_text(scope: Scope, values: Mapping[str, float]) -> str:
    """``values`` in Prometheus' text format, as ``async_search_rl_<scope>_<name>``, with what the table says about them."""
    text: list[str] = []
    for name, value in values.items():
        full = f"async_search_rl_{scope}_{name}"
        if metric := METRICS[scope].get(name):
            text += [f"# HELP {full} {metric.meaning} ({metric.unit})", f"# TYPE {full} {metric.kind}"]
        text.append(f"{full} {_number(value)}")
    return "\n".join(text) + "\n" if text else ""


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return ("+Inf" if value > 0 else "-Inf") if math.isinf(value) else repr(float(value))
