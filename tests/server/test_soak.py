"""Requests of all kinds at once, many of which leave: everyone who stays is answered and nothing is left behind."""

from espalier import SpeculationConfig
from espalier.bench.serve import flags_of
from espalier.bench.soak import soak
from espalier.cli.flags import engine_settings
from espalier.cli.main import parse


def test_a_soak_leaves_nobody_unanswered_and_nothing_behind():
    found = soak({"max_batch": 4, "max_context": 512, "num_pages": 64}, count=60, seed=1)
    assert found.requests == found.answered + found.disconnects
    assert found.disconnects > 5 and found.aborts > 0 and set(found.errors_given) <= {400, 429}
    assert (found.unanswered, found.leaked_pages, found.leaked_processes) == (0, 0, 0)


def test_settings_become_the_flags_that_mean_them():
    tree = SpeculationConfig(steps=3, topk=2)
    settings = {
        "max_batch": 4,
        "prefix_cache": False,
        "overlap": True,
        "speculation": tree,
        "model_overrides": {"a": 1},
    }
    assert engine_settings(parse(["serve", *flags_of(settings)])) == settings
