import numpy as np
import pytest
import torch

from async_search_rl.errors import SchemaError
from learner.batch import batch_from_groups, micro_batch
from tests.learner_cases import groups

CPU = torch.device("cpu")


def test_arrays_of_a_batch_leave_out_invalid_trajectories():
    made = groups(3)
    batch = batch_from_groups(made)
    used = [t for g in made for t in g.trajectories if t.valid]
    assert len(batch.trajectories) == 12
    assert batch.valid_S.sum() == len(used) == 11
    assert batch.trainable_tokens == sum(t.trainable_tokens for t in used) == len(batch.behaviour_N) == len(batch.versions_N)
    assert batch.tokens_S[~batch.valid_S].tolist() == [0]
    assert batch.rewards_S[~batch.valid_S].tolist() == [0.0]
    assert batch.tokens == sum(t.length for t in used)
    assert batch.group_ids_S.tolist() == [0] * 4 + [1] * 4 + [2] * 4


def test_a_batch_without_valid_trajectories_is_refused():
    group = groups(2)[1]
    broken = type(group)(
        ticket=1, attempt=1, question_id="q", actor="a", trajectories=tuple(t for t in group.trajectories if not t.valid)
    )
    with pytest.raises(SchemaError, match="valid trajectories"):
        batch_from_groups([broken])


def test_a_micro_batch_points_at_its_trainable_tokens_and_back_into_the_batch():
    batch = batch_from_groups(groups(3))
    members = [9, 2, 4]
    micro = micro_batch(batch, members, CPU)
    expected_ids, expected_lengths = [], []
    for i in members:
        expected_ids += batch.trajectories[i].token_ids[batch.trajectories[i].loss_mask].tolist()
        expected_lengths.append(batch.trajectories[i].length)
    assert micro.input_ids_T[micro.positions_N].tolist() == expected_ids
    assert micro.layout.lengths == tuple(expected_lengths)
    assert micro.layout.position_ids_T[micro.positions_N].min() > 0, "a trajectory's first token is never trained"
    sampled = np.concatenate([batch.trajectories[i].behaviour_logprobs[batch.trajectories[i].loss_mask] for i in members])
    assert micro.pick(batch.behaviour_N).tolist() == pytest.approx(sampled.tolist())
    assert np.bincount(micro.sequence_N.numpy()).tolist() == [batch.tokens_S[i] for i in members]


def test_an_empty_micro_batch_has_one_token_and_nothing_to_train():
    batch = batch_from_groups(groups(2))
    micro = micro_batch(batch, [], CPU)
    assert micro.input_ids_T.shape == (1,)
    assert micro.positions_N.numel() == micro.sequence_N.numel() == len(micro.batch_tokens_N) == 0
    assert micro.pick(batch.behaviour_N).shape == (0,)
