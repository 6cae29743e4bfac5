import itertools
import json

import numpy as np
import pytest

from async_search_rl.config.warmstart import WarmstartSection
from async_search_rl.errors import SchemaError
from async_search_rl.supervised import SupervisedSet

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from learner import sft  # noqa: E402

SETTINGS = WarmstartSection(
    hidden_size=32, intermediate_size=48, layers=2, head_dim=16, max_positions=64, steps=60, batch_size=8, lr=1e-2, warmup_steps=5
)


class TwentyTokens:
    bos_token_id, eos_token_id, pad_token_id = 1, 2, 0

    def __len__(self):
        return 20


@pytest.fixture
def model():
    return sft.new_llama(SETTINGS, TwentyTokens(), seed=0)


def copying(count, seed=0):
    """Sequences x y ... / x y ...: the second half repeats the first and is trained."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        half = rng.integers(3, 20, int(rng.integers(1, 6))).tolist()
        rows.append(([1, *half, 2, *half], [False] * (len(half) + 2) + [True] * len(half)))
    return SupervisedSet.from_sequences(rows)


def test_sequences_come_back_from_the_flat_arrays():
    data = SupervisedSet.from_sequences([([1, 2, 3], [False, True, True]), ([4], [True])])
    both = SupervisedSet.concatenate([data, data])
    assert len(both) == 4
    assert both[2][0].tolist() == [1, 2, 3]
    assert both[3][1].tolist() == [True]
    with pytest.raises(SchemaError, match="must hold sequences of at least one token"):
        SupervisedSet.from_sequences([])
    with pytest.raises(SchemaError, match="must hold sum"):
        SupervisedSet(np.zeros(3, np.int32), np.zeros(3, np.bool_), np.array([2]))


def test_a_batch_split_into_micro_batches_has_the_same_gradient(model):
    data = copying(12)
    losses, gradients = [], []
    for slots in (10_000, 20):
        model.zero_grad()
        losses.append(float(sft.backward(model, data, list(range(12)), slots)))
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert torch.allclose(gradients[0], gradients[1], atol=1e-6)


def test_the_gradient_is_that_of_the_trained_tokens_alone(model):
    ids, trained = [1, 5, 6, 2, 5, 6], [False, False, False, False, True, True]
    data = SupervisedSet.from_sequences([(ids, trained), ([1, 7, 2, 7], [False, False, False, True])])
    loss = float(sft.backward(model, data, [0, 1], 1000))
    logprobs = [torch.log_softmax(model(torch.tensor([row])).logits[0].double(), -1) for row in (ids, [1, 7, 2, 7])]
    expected = -(logprobs[0][3, 5] + logprobs[0][4, 6] + logprobs[1][2, 7]) / 3
    assert loss == pytest.approx(expected.item(), abs=1e-5)


def test_micro_batches_hold_every_sequence_once_within_the_slots():
    lengths = [5, 30, 7, 7, 2, 100, 1]
    groups = sft.micro_batches(lengths, 32)
    assert sorted(index for group in groups for index in group) == list(range(7))
    assert all(len(group) == 1 or len(group) * max(lengths[i] for i in group) <= 32 for group in groups)


def test_imitation_learns_and_follows_from_its_seed(model):
    reports = []
    again = sft.new_llama(SETTINGS, TwentyTokens(), seed=0)
    sft.imitate(model, copying(64), SETTINGS, seed=1, report=lambda step, loss: reports.append((step, loss)))
    sft.imitate(again, copying(64), SETTINGS, seed=1)
    assert [step for step, _ in reports] == [60]
    after = float(sft.backward(model, copying(64), list(range(64)), 10_000))
    assert after < 2.2 < np.log(20)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_the_schedule_warms_up_and_decays_to_its_floor():
    values = [sft.schedule(step, 100, 10) for step in range(1, 101)]
    assert values[0] == pytest.approx(0.1)
    assert max(values) == values[9] == 1.0
    assert values[-1] == pytest.approx(sft.MIN_LR_RATIO)
    assert all(a >= b for a, b in itertools.pairwise(values[9:]))


def test_a_saved_model_is_half_precision_with_the_tokenizer_beside_it(model, tmp_path):
    from safetensors.torch import load_file

    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    sft.save(model, tmp_path / "tokenizer", tmp_path / "out")
    state = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in state.values()} == {torch.float16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is True
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
