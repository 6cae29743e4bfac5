"""The real engine on a GPU, against transformers on the CPU: the checks of the CPU tests, with and without CUDA graphs.

float32 needs an attention back end that takes it; vLLM's Triton one does.
"""

import pytest
import torch

from tests import engine_checks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]

GENERATOR = {"attention_backend": "TRITON_ATTN", "block_size": 16}


class Played:
    def __init__(self, folder, *, tied, generator, requests):
        folders = engine_checks.make_models(folder, tied)
        config = engine_checks.make_config(folders[0], generator={**GENERATOR, **generator})
        self.record = engine_checks.run(folders, config, requests)
        self.reference = engine_checks.Reference(folders)


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    generator = {"enforce_eager": True}
    return Played(tmp_path_factory.mktemp("tied"), tied=True, generator=generator, requests=24)


@pytest.fixture(scope="module")
def untied_with_graphs(tmp_path_factory):
    return Played(tmp_path_factory.mktemp("untied"), tied=False, generator={}, requests=24)


@pytest.fixture(scope="module")
def short_of_memory(tmp_path_factory):
    """Room for about a third of the requests, so that some wait and some are preempted while the weights change."""
    generator = {"enforce_eager": True, "kv_cache_gib": 5 / 1024}
    return Played(tmp_path_factory.mktemp("short"), tied=True, generator=generator, requests=24)


@pytest.mark.parametrize("played", ["tied", "untied_with_graphs", "short_of_memory"])
def test_agrees_before_the_update(played, request, record_property):
    it = request.getfixturevalue(played)
    record_property("max_logprob_error", engine_checks.check_parity_before(it.record, it.reference))


@pytest.mark.parametrize("played", ["tied", "untied_with_graphs", "short_of_memory"])
def test_agrees_after_the_update_over_cached_prefixes(played, request, record_property):
    it = request.getfixturevalue(played)
    record_property("max_logprob_error", engine_checks.check_parity_after(it.record, it.reference))


def test_versions_are_right_to_the_token(tied):
    engine_checks.check_versions_across(tied.record, tied.reference)


def test_versions_are_right_to_the_token_with_graphs(untied_with_graphs):
    engine_checks.check_versions_across(untied_with_graphs.record, untied_with_graphs.reference)


def test_versions_of_waiting_and_preempted_requests_are_right(short_of_memory):
    engine_checks.check_versions_across(short_of_memory.record, short_of_memory.reference, kv_kept=False)
