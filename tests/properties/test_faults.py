"""Each planted fault is caught by a property that does not know of it: the very function that holds when nothing is
planted."""

from contextlib import ExitStack
from dataclasses import replace

import pytest

from espalier.cache.pages import PageDefect
from espalier.config import FP8_KV
from espalier.errors import EspalierError
from espalier.request import Request, SamplingParams
from espalier.speculate.drafters import autoregressive
from lab import __main__ as lab
from lab.faults import command as guard
from lab.faults.planted import FAULTS, find_fault, plant
from lab.faults.rank_faults import RANK_FAULTS
from lab.faults.selection_faults import SELECTION_FAULTS
from lab.faults.source_faults import SOURCE_FAULTS
from lab.faults.state_faults import STATE_FAULTS
from tests.harness import Setup, prompts, request
from tests.oracles.reference_round import Reference
from tests.properties import watch as held
from tests.properties.block_setup import BlockSetup, block_reference_of
from tests.properties.layouts import reference_of
from tests.properties.mtp_setup import MTPSetup, mtp_reference_of
from tests.properties.peagle_setup import PEagleSetup, peagle_reference_of
from tests.properties.summary import FAULT
from tests.properties.watch import PROPERTIES, Watch, run_watched

SETUP = Setup(steps=4, topk=3, num_draft_tokens=24, page_size=2, max_batch=3, max_context=48, chunk_size=16)
# A latent target with experts, and a latent draft.
LATENT = replace(SETUP, family="deepseek_v3")
# Three MTP layers.
CHAIN = MTPSetup(**{**vars(SETUP), "algorithm": "mtp"}, form=(3, "chain"))
READS_TARGET = replace(CHAIN, form=(3, "target"))
# K and V in FP8, with the checkpoint's scales.
IN_FP8 = replace(SETUP, kv_dtype=FP8_KV, draft_kv_dtype=FP8_KV, kv_scales=True)
# Block drafts, without and with edges, of tokens and of paths.
BLOCK = BlockSetup(**{**vars(SETUP), "algorithm": "block"})
EDGES = replace(BLOCK, form="dspark")
SELECTOR = replace(BLOCK, form="dflash2")
RECURRENT = replace(BLOCK, form="rnn")
# A toy hybrid; Qwen3-Next's delta rule and attention, with experts.
HYBRID = replace(SETUP, keeps="hybrid")
DELTA = replace(SETUP, family="qwen3_next")
# Queries that choose rows; the last layer shares what the one before it chose.  The same of an MTP layer.
CHOOSING = replace(SETUP, family="glm_moe_dsa")
CHOOSING_DRAFT = replace(CHAIN, family="deepseek_v32", form=(1, "chain"))
PEAGLE = PEagleSetup(**{**vars(SETUP), "algorithm": "peagle"})
# Rows shared out over the batch; paths of the text beside the draft.
SHARED = replace(SETUP, shared_rows=3)
OWN_TEXT = replace(SETUP, num_text_paths=2)


def traffic() -> list[Request]:
    """Ragged and mixed, two requests more than slots, the last a repetition of the first: all of its pages are
    found."""
    drawn = prompts(17, [7, 3, 12, 5])
    temperatures = (6.0, 0.0, 1.0, 2.0, 6.0)
    return [
        request(i, prompt, SamplingParams(temperature=temperatures[i], max_tokens=14))
        for i, prompt in enumerate([*drawn, drawn[0]])
    ]


def holds(*properties: str, setup: Setup = SETUP) -> None:
    """Run the traffic and hold these properties over it.  Raises AssertionError where one fails."""
    run_watched(Watch(setup.engine(), setup.algorithm, oracle_of(setup), properties), traffic())


def oracle_of(setup: Setup) -> Reference:
    if isinstance(setup, BlockSetup):
        return block_reference_of(setup)
    if isinstance(setup, PEagleSetup):
        return peagle_reference_of(setup)
    return mtp_reference_of(setup) if isinstance(setup, MTPSetup) else reference_of(setup)


def caught(property: str, setup: Setup = SETUP) -> bool:
    try:
        holds(property, setup=setup)
    except PageDefect:
        # The pool's own books, which anything that lets go of a page may trip over: that is conservation's catch alone.
        return property == held.CONSERVED
    except AssertionError:
        return True
    return False


# The property that is there to catch it.  Others may, too.
CATCHES = {
    "sibling-committed": held.INCREMENTAL,
    "extend-one-short": held.INCREMENTAL,
    "wrong-ancestor": held.PROPOSAL,
    "rows-without-topk": held.PROPOSAL,
    "table-column-off": held.INCREMENTAL,
    "stale-hidden": held.READY,
    "stale-feed": held.READY,
    "chain-reads-target": held.INCREMENTAL,
    "target-reads-chain": held.INCREMENTAL,
    "hidden-before-norm": held.READY,
    "packed-stride": held.INCREMENTAL,
    "per-branch-reserve": held.RESERVE,
    "parent-noise": held.TOKENS,
    "page-freed-twice": held.CONSERVED,
    "rope-left-out": held.INCREMENTAL,
    "padding-routed": held.ROUTED,
    "shared-expert-twice": held.INCREMENTAL,
    "mask-row-kept": held.INCREMENTAL,
    "features-of-wrong-layer": held.INCREMENTAL,
    "anchor-late": held.PROPOSAL,
    "edge-of-wrong-parent": held.PROPOSAL,
    "state-of-wrong-path": held.PROPOSAL,
    "neighbours-scale": held.INCREMENTAL,
    "v-scaled-twice": held.TOKENS,
    **{fault.name: held.INCREMENTAL for fault in SELECTION_FAULTS},
    "shared-selection-one-off": held.TOKENS,
    "index-row-without-topk": held.PROPOSAL,
    "parent-not-chosen": held.PROPOSAL,
    "rows-of-neighbour": held.TOKENS,
    **dict.fromkeys(("path-counted-twice", "picks-counted-twice"), held.COUNTED),
    **dict.fromkeys(
        (
            *("sibling-state", "state-one-short", "tail-not-rolled-back"),
            *("snapshot-of-wrong-page", "state-carried-over"),
        ),
        held.INCREMENTAL,
    ),
}
# What only some setups show: a latent target with experts, MTP layers, a block draft, or rows in FP8.
SHOWN_BY = {
    "rope-left-out": LATENT,
    "padding-routed": LATENT,
    "shared-expert-twice": LATENT,
    "stale-feed": CHAIN,
    "chain-reads-target": CHAIN,
    "target-reads-chain": READS_TARGET,
    "hidden-before-norm": CHAIN,
    **dict.fromkeys(("mask-row-kept", "features-of-wrong-layer", "anchor-late"), BLOCK),
    "edge-of-wrong-parent": EDGES,
    "state-of-wrong-path": RECURRENT,
    **dict.fromkeys(("neighbours-scale", "v-scaled-twice"), IN_FP8),
    **dict.fromkeys((fault.name for fault in STATE_FAULTS), HYBRID),
    **dict.fromkeys((fault.name for fault in SELECTION_FAULTS), CHOOSING),
    "index-row-without-topk": CHOOSING_DRAFT,
    **dict.fromkeys((fault.name for fault in SOURCE_FAULTS), SHARED),
    "path-counted-twice": OWN_TEXT,
}
# What a latent target shows too.
ALSO_OF_LATENT = ("rows-without-topk", "packed-stride", "sibling-committed", "wrong-ancestor")
# What DFlash 2's drafts and P-EAGLE's heads show too.
ALSO_OF_OTHER_DRAFTS = (
    *((name, "selector") for name in ("edge-of-wrong-parent", "anchor-late", "features-of-wrong-layer")),
    *((name, "peagle") for name in ("anchor-late", "extend-one-short", "stale-hidden")),
)


SETUPS = {
    "own text": OWN_TEXT,
    # Theirs hold in the files of their layouts too: test_layouts.py, test_mtp.py, test_block.py and others.
    **{
        name: pytest.param(setup, marks=pytest.mark.full)
        for name, setup in {
            "fp8": IN_FP8,
            "latent": LATENT,
            "chain": CHAIN,
            "target": READS_TARGET,
            "shared": SHARED,
            "block": BLOCK,
            "edges": EDGES,
            "recurrent": RECURRENT,
            "hybrid": HYBRID,
            "delta": DELTA,
            "choosing": CHOOSING,
            "choosing draft": CHOOSING_DRAFT,
        }.items()
    },
}
# SETUP holds them below, where every fault is gone again.
# Their properties hold unbroken in test_block.py and test_peagle.py.
OTHER_DRAFTS = {"selector": SELECTOR, "peagle": PEAGLE}


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_unbroken_every_property_holds(setup):
    # The brute-force tree is the draft's alone.
    holds(*(each for each in PROPERTIES if each != held.PROPOSAL or not setup.num_text_paths), setup=setup)


# test_ranks.py catches those of several ranks.
OF_ONE_RANK = [name for name in FAULTS if name not in RANK_FAULTS]


@pytest.mark.parametrize("name", OF_ONE_RANK)
def test_a_property_catches(name, put_on_record):
    with plant(name) as fault:
        assert caught(CATCHES[name], SHOWN_BY.get(name, SETUP))
    put_on_record(FAULT, [name, " ".join(fault.reports) or "-", CATCHES[name]])


@pytest.mark.parametrize("name", ALSO_OF_LATENT)
def test_the_same_property_catches_it_on_a_latent_target(name, put_on_record):
    with plant(name) as fault:
        assert caught(CATCHES[name], LATENT)
    put_on_record(FAULT, [f"{name}, latent target", " ".join(fault.reports) or "-", CATCHES[name]])


@pytest.mark.parametrize("name", [fault.name for fault in STATE_FAULTS if fault.name != "snapshot-of-wrong-page"])
def test_the_user_sees_a_wrong_state(name):
    with plant(name):
        assert caught(held.TOKENS, HYBRID)


@pytest.mark.parametrize(("name", "draft"), ALSO_OF_OTHER_DRAFTS)
def test_the_same_property_catches_it_of_another_draft(name, draft, put_on_record):
    with plant(name) as fault:
        assert caught(CATCHES[name], OTHER_DRAFTS[draft])
    put_on_record(FAULT, [f"{name}, {draft}", " ".join(fault.reports) or "-", CATCHES[name]])


# Faults, and where they change nothing: there the broken path is the right one, and nobody may complain.
HARMLESS: tuple[tuple[tuple[str, ...], Setup], ...] = (
    (("wrong-ancestor", "rows-without-topk"), replace(SETUP, topk=1, num_draft_tokens=5)),
    (("packed-stride",), replace(SETUP, max_batch=1)),
    (("table-column-off",), replace(SETUP, page_size=64)),
    # Without edges, and with edges that read no path.
    (("edge-of-wrong-parent",), replace(BLOCK, form="jetspec")),
    (("state-of-wrong-path",), replace(BLOCK, form="gated")),
    # Where the checkpoint has no scales, so that all are 1.
    (("v-scaled-twice",), replace(SETUP, kv_dtype=FP8_KV, draft_kv_dtype=FP8_KV)),
    # Without latent rows, experts, MTP layers and FP8.
    (
        (
            *("rope-left-out", "padding-routed", "shared-expert-twice", "neighbours-scale"),
            *("stale-feed", "chain-reads-target", "target-reads-chain", "hidden-before-norm"),
            *(fault.name for fault in (*STATE_FAULTS, *SELECTION_FAULTS, *SOURCE_FAULTS)),
        ),
        SETUP,
    ),
)


LIKE_OTHERS = ("packed-stride", "table-column-off", "edge-of-wrong-parent", "state-of-wrong-path", "v-scaled-twice")


@pytest.mark.parametrize(
    ("names", "setup"),
    # One of layouts, and all the others at once.
    [pytest.param(*each, marks=pytest.mark.full if each[0][0] in LIKE_OTHERS else ()) for each in HARMLESS],
    ids=[",".join(names) for names, _ in HARMLESS],
)
def test_where_faults_change_nothing_no_property_fails(names, setup):
    """All at once."""
    with ExitStack() as planted:
        for name in names:
            planted.enter_context(plant(name))
        holds(*PROPERTIES, setup=setup)


def test_what_was_planted_is_gone_afterwards():
    for name in FAULTS:
        with plant(name):
            pass
    holds(*PROPERTIES)


REPORTS = ("27460", "27338", "27428", "27360", "22832", "21987", "19807", "26972", "26866")


@pytest.mark.parametrize("number", REPORTS)
def test_a_report_is_a_name_too(number):
    assert number in find_fault(number).reports
    assert [fault.name for fault in FAULTS.values() if number in fault.reports] == [find_fault(number).name]


def test_an_unknown_fault_is_refused_by_name():
    with pytest.raises(EspalierError, match=r"'12345' is unknown; use a name \(sibling-committed, "):
        find_fault("12345")


def test_a_command_runs_with_a_fault_and_says_so_once(monkeypatch, capsys):
    right, ran = autoregressive.select_beams, []
    monkeypatch.setattr(guard, "start", lambda command: ran.append((command, caught(held.PROPOSAL))) or 7)
    assert lab.main(["fault", "wrong-ancestor", "generate", "a", "--topk", "3"]) == 7
    assert ran == [(["generate", "a", "--topk", "3"], True)] and autoregressive.select_beams is right
    said = capsys.readouterr().err
    assert said.count("planted fault wrong-ancestor: ") == said.count("WRONG BY INTENT") == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["12345", "demo"], "fault '12345' is unknown; use a name"),
        (["27460", "serve"], "give a command after the fault: demo or generate, with its flags"),
        (["27460"], "give a command after the fault"),
    ],
)
def test_a_fault_or_a_command_that_is_not_for_it_is_refused_before_it_runs(arguments, says, monkeypatch, capsys):
    monkeypatch.setattr(guard, "start", None)
    assert lab.main(["fault", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"espalier: {says}") and said.count("\n") == 1
