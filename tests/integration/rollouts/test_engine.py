"""The real engine on CPU, against transformers, before, across and after an update of its weights."""

import pytest

from tests import engine_checks

pytestmark = pytest.mark.integration


class Played:
    def __init__(self, folder, *, tied, generator, requests=12):
        folders = engine_checks.make_models(folder, tied)
        config = engine_checks.make_config(folders[0], generator=generator)
        self.record = engine_checks.run(folders, config, requests)
        self.reference = engine_checks.Reference(folders)


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return Played(tmp_path_factory.mktemp("tied"), tied=True, generator={"threads": 1})


@pytest.fixture(scope="module")
def untied_and_short_of_memory(tmp_path_factory):
    """Room for about a third of the requests, so that some wait and some are preempted while the weights change."""
    generator = {"threads": 1, "kv_cache_gib": 3 / 1024}
    return Played(tmp_path_factory.mktemp("untied"), tied=False, generator=generator)


def test_tied_head_agrees_before_the_update(tied):
    engine_checks.check_parity_before(tied.record, tied.reference)


def test_tied_head_agrees_after_the_update_over_cached_prefixes(tied):
    engine_checks.check_parity_after(tied.record, tied.reference)


def test_versions_are_right_to_the_token(tied):
    engine_checks.check_versions_across(tied.record, tied.reference)


def test_untied_head_agrees_before_the_update(untied_and_short_of_memory):
    engine_checks.check_parity_before(untied_and_short_of_memory.record, untied_and_short_of_memory.reference)


def test_untied_head_agrees_after_the_update_over_cached_prefixes(untied_and_short_of_memory):
    engine_checks.check_parity_after(untied_and_short_of_memory.record, untied_and_short_of_memory.reference)


def test_versions_of_waiting_and_preempted_requests_are_right(untied_and_short_of_memory):
    engine_checks.check_versions_across(untied_and_short_of_memory.record, untied_and_short_of_memory.reference, kv_kept=False)
