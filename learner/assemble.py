"""From a configuration to a learner that is ready to train: ranks, networks, checkpoint, service, sender.

In: the configuration, and a file of recorded groups in the place of the replay service if one is given. Out: a :class:`Learner`.
Whatever is wrong with a folder or cannot fit into memory is said here, before anything is trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from async_search_rl.config import Config
from async_search_rl.files import writable
from async_search_rl.http import read_token
from async_search_rl.replay.client import BlockingReplayClient
from async_search_rl.replay.schema import StartRequest
from async_search_rl.version import PolicyVersion
from async_search_rl.weights.sender import WeightSender
from learner.checkpoint import Checkpoints, checkpoint_to_resume
from learner.critic import Critic, build_critic
from learner.deepspeed_engine import Engine
from learner.feed import CutSource, Feed, Prefetch
from learner.flops import ModelShape
from learner.guard import Guard
from learner.loading import block_classes, load_policy
from learner.memory import check_memory
from learner.metrics import MetricsWriter, SpeedFigures
from learner.publisher import Publisher
from learner.ranks import Ranks
from learner.recorded import RecordedCuts
from learner.reference import build_reference
from learner.service import replay_address
from learner.step import TrainStep


@dataclass
class Learner:
    """The parts of a learner on this rank, and where training stands."""

    config: Config
    ranks: Ranks
    policy: Engine
    critic: Critic | None
    trainer: TrainStep
    checkpoints: Checkpoints
    publisher: Publisher
    feed: Feed
    source: CutSource | None
    """The replay service; on rank 0 alone."""
    metrics: MetricsWriter | None
    """On rank 0 alone."""
    speed: SpeedFigures
    guard: Guard
    incarnation: int
    step: int
    """Trained batches; also the number of the next one."""

    @property
    def version(self) -> PolicyVersion:
        """Of the weights as they are now."""
        return PolicyVersion(self.incarnation, self.step)


@contextmanager
def assemble(config: Config, ranks: Ranks, recorded: Path | None) -> Iterator[Learner]:
    """The learner of ``config``, resumed from the newest checkpoint; its threads and connections end with the block.

    Raises:
        ConfigError: the run's folder cannot be written.
        DataError: a model folder is not what it must be.
        CheckpointError: the checkpoint does not fit.
        EngineError: the model cannot be trained here, or would not fit into memory.
    """
    with writable(config.run.folder / "metrics"):
        pass  # Now, for the models take a while to load.
    torch.manual_seed(config.run.seed + ranks.rank)
    check_memory(config, ranks)
    checkpoint = checkpoint_to_resume(config)
    model = load_policy(config, config.model.path, "model.path", ranks)
    shape, names = ModelShape.of(model.model.config), dict(model.model.named_parameters())
    blocks = block_classes(model.model)
    policy = Engine(model, blocks=blocks, optimizer=config.optimizer, learner=config.learner, ranks=ranks)
    critic = build_critic(config, ranks) if config.uses_critic else None
    engines = {"policy": policy} | ({"critic": critic.engine} if critic is not None else {})
    reference = build_reference(config, ranks)
    checkpoints = Checkpoints(config, engines, ranks)
    step = checkpoints.load(checkpoint).step if checkpoint is not None else 0
    with ExitStack() as stack:
        sender = source = prefetch = metrics = None
        incarnation = 1
        if ranks.first:
            sender, source = _connect(config, ranks, recorded, stack)
            metrics = MetricsWriter(config)
            stack.callback(metrics.close)
            url = sender.url if sender is not None else ""
            incarnation = source.start(StartRequest(run=config.run.name, step=step, cut=step, weights_url=url)).incarnation
            prefetch = Prefetch(source, incarnation, config.replay.poll_s)
            stack.callback(prefetch.close)
        yield Learner(
            config=config,
            ranks=ranks,
            policy=policy,
            critic=critic,
            trainer=TrainStep(config, shape, policy, critic, reference, ranks),
            checkpoints=checkpoints,
            publisher=Publisher(policy, names, config.weights, ranks, sender),
            feed=Feed(ranks, prefetch, config.run.max_steps - 1, config.learner.batch_timeout_s),
            source=source,
            metrics=metrics,
            speed=SpeedFigures(shape, config, ranks.device, ranks.world),
            guard=Guard(config.guard),
            incarnation=incarnation,
            step=step,
        )


def _connect(config: Config, ranks: Ranks, recorded: Path | None, stack: ExitStack) -> tuple[WeightSender | None, CutSource]:
    """The weight sender and the replay service of rank 0; recorded groups need no sender."""
    if recorded is not None:
        return None, RecordedCuts(recorded, config.replay.batch_groups)
    token = read_token(config.security)
    sender = WeightSender(config.weights, token, ranks.device)
    sender.start()
    stack.callback(sender.close)
    client = BlockingReplayClient(stack.enter_context(replay_address(config)), token)
    stack.callback(client.close)
    return sender, client
