"""Sections about the run as a whole: identity, model, data, logging, security, placement."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from async_search_rl.config.types import NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section


class RunSection(Section, frozen=True):
    """What this run is called and how long it goes on."""

    name: str = "run"
    """Name of the run; its files are under `dir/name`."""
    dir: str = "runs"
    """Folder of all runs."""
    seed: NonNegative = 0
    """Seed of the question order, of sampling where the engine permits one, and of the learner."""
    max_steps: Positive = 1000
    """Trained batches after which the run ends."""
    resume: Literal["auto", "never", "must"] = "auto"
    """`auto` resumes from the newest checkpoint if there is one, `must` refuses to start without, `never` refuses a used folder."""

    @property
    def folder(self) -> Path:
        """Where everything of this run is written."""
        return Path(self.dir) / self.name


class ModelSection(Section, frozen=True):
    """The policy."""

    path: str = ""
    """Folder with config.json, safetensors and tokenizer of a transformers causal LM."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Dtype of the weights in generation and in the learner's forward and backward pass."""
    reference_path: str = ""
    """Folder of the frozen reference policy of the KL term; empty: the starting policy `path`."""


class DataSection(Section, frozen=True):
    """Questions and how they become prompts."""

    train: str = ""
    """Training questions: JSON lines or Search-R1 / verl parquet."""
    eval: str = ""
    """Held-out questions, same formats; empty: no evaluation."""
    eval_questions: Positive = 256
    """Held-out questions used an evaluation: the first ones of the file."""
    prompt: Literal["chat", "raw", "dataset"] = "chat"
    """`chat`: `template` as one user turn of the chat template; `raw`: `template` as it is; `dataset`: the row's own messages."""
    template: str = (
        "Answer the given question. You must conduct reasoning inside <think> and </think> first every time you get new "
        "information. After reasoning, if you find you lack some knowledge, you can call a search engine by <search> query "
        "</search> and it will return the top searched results between <information> and </information>. You can search as "
        "many times as you want. If you find no further external knowledge needed, you can directly provide the answer inside "
        "<answer> and </answer>, without detailed illustrations. For example, <answer> Beijing </answer>. Question: {question}\n"
    )
    """Prompt text with `{question}`; unused with `prompt = "dataset"`."""
    shuffle: bool = True
    """Seeded permutation of the questions, a new one each epoch; false keeps the file's order."""


class LoggingSection(Section, frozen=True):
    """Where metrics go. JSON lines under the run's folder are always written."""

    wandb: Literal["offline", "online", "disabled"] = "offline"
    """Weights & Biases mode."""
    wandb_project: str = "async-search-rl"
    """Weights & Biases project."""
    table_every_s: PositiveFloat = 2.0
    """Seconds between two refreshes of the live table."""
    keep_trajectories: NonNegative = 10
    """Trajectories before and after that the run's page shows."""


class SecuritySection(Section, frozen=True):
    """Loopback needs nothing; any other bind needs a token."""

    token_file: str = ""
    """File with the bearer token of every service; empty: the variable ASYNC_SEARCH_RL_TOKEN, else no token (loopback only)."""


class LaunchSection(Section, frozen=True):
    """How `bin/launch` places the processes."""

    placement: Literal["local", "ray"] = "local"
    """`local`: child processes of this machine; `ray`: actors over a Ray cluster."""
    actor_nodes: Positive = 1
    """Actor supervisors to start (Ray: one a node)."""
    learner_ranks: Positive = 1
    """Learner ranks, one a device."""
    learner_devices: list[int] = msgspec.field(default_factory=list)
    """GPUs of the learner's ranks on this machine; empty: all that are visible."""
    learner_threads: NonNegative = 0
    """CPU threads of each learner rank; 0: torch decides."""
    start_search: bool = True
    """Start `bin/search` here too; false: `retrieval.url` is served elsewhere."""
    restart_limit: NonNegative = 3
    """Restarts of one dead process within `restart_window_s` before the run stops."""
    restart_window_s: PositiveFloat = 600.0
    """Seconds over which restarts are counted."""
    start_timeout_s: PositiveFloat = 600.0
    """Seconds that a service may take to become ready."""
    stop_timeout_s: PositiveFloat = 30.0
    """Seconds a process has to stop after a polite signal before it is killed."""
    ray_address: str = "auto"
    """Address of the Ray cluster."""
    ray_gpus: bool = True
    """Ask Ray for a GPU for each learner rank and each device of an engine; false: a run on CPUs."""
    idle_warning_s: NonNegativeFloat = 60.0
    """Seconds without progress after which the table says who waits for whom."""
