"""A launch input on the wire: what arrives in the slot table, and that a round's vector has one form a batch."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from espalier.engine.launch_buffer import LaunchBuffer, pack_launch
from espalier.engine.launch_input import LaunchInput, slot_init
from espalier.errors import EspalierError
from espalier.kernels.ops.state import gather_slots
from espalier.layout import LaunchForm
from espalier.request import SamplingParams
from espalier.sampling.logit_processors import SamplingFeatures
from espalier.slots import FLOAT_COLUMNS, INT_COLUMNS, Guess, SlotTable
from tests.harness import Setup, request

SETUP = Setup(page_size=4, max_batch=3)
LAYOUT = SETUP.layout
VOCAB = 16
WISHES = SamplingParams(
    temperature=0.7,
    top_k=5,
    top_p=0.8,
    min_p=0.1,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=-0.4,
    logit_bias={3: 1.5, 9: -2.25},
    stop_token_ids=[7, 11],
    min_tokens=2,
    max_tokens=9,
)


def table() -> SlotTable:
    made = SlotTable(LAYOUT, VOCAB, {"hidden": (2,)}, torch.float64, torch.device("cpu"))
    for field in (*vars(made).values(), *made.carried.values()):
        if isinstance(field, torch.Tensor) and field.dim() > 1:
            field.fill_(1)  # what an earlier owner left
    return made


def entering(slot: int, prompt: list[int], output: list[int]):
    r = request(0, prompt, WISHES, seed=2**40 + 5)
    r.slot, r.pages, r.output = slot, [4, 2, 6], output
    return slot_init(r, r.tokens, start=1, commit_from=4, max_num_tokens=17, steps=3)


def device_launch(
    into: SlotTable, launch_input: LaunchInput, batch: int, entry: int = 0, pieces: int = 0
) -> LaunchBuffer:
    packed = pack_launch(into, launch_input, entry, LaunchForm(batch, launch_input.width, pieces))
    arrived = packed.with_vector(torch.from_numpy(packed.vector))
    arrived.update_slot_table(into)
    return arrived


def test_an_admission_fills_its_slot_and_no_other():
    into = table()
    slot_inits = entering(2, [3, 1, 3, 8], [5, 5])
    launch_input = LaunchInput(
        (2, 3), SamplingFeatures(), lengths=(3, 2), width=16, slot_inits=(slot_inits,), appended_pages=((3, 1, 9),)
    )
    arrived = device_launch(into, launch_input, batch=2, entry=1)
    assert (arrived.ring_entry.tolist(), arrived.slots.tolist(), arrived.lengths.tolist()) == ([1], [2, 3], [3, 2])
    ints = dict(zip(INT_COLUMNS, into.ints[2].tolist(), strict=True))
    assert ints == {
        "prefix_len": 1,
        "root": 1,
        "known_len": 6,
        "commit_from": 4,
        "end": 17,
        "depth_limit": 3,
        "top_k": 5,
        "seed": 2**40 + 5,
        "min_position": 6,
        "num_logprobs": -1,
        "has_filters": 1,
        "has_penalties": 1,
    }
    floats = {"temperature": 0.7, "top_p": 0.8, "min_p": 0.1}
    floats |= {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": -0.4}
    assert dict(zip(FLOAT_COLUMNS, into.floats[2].tolist(), strict=True)) == pytest.approx(floats)
    assert into.history[2].tolist()[:7] == [3, 1, 3, 8, 5, 5, 0] and not into.history[2, 6:].any()
    assert into.page_table[2].tolist()[:4] == [4, 2, 6, 0] and not into.page_table[2, 3:].any()
    assert into.page_table[3].tolist()[:3] == [1, 9, 1]
    assert dict(zip(into.bias_ids[2].tolist(), into.bias_values[2].tolist(), strict=True)) == {3: 1.5, 9: -2.25, 0: 0}
    assert into.stop_ids[2].tolist()[:3] == [7, 11, -1]
    assert into.seen[2].nonzero().flatten().tolist() == [1, 3, 8]
    assert into.counts[2].tolist() == [0, 0, 0, 0, 0, 2] + [0] * 10
    assert not into.carried["hidden"][2].any()
    for field in (into.ints, into.history, into.counts, into.seen, into.carried["hidden"]):
        assert field[1].eq(1).all() and field[3].eq(1).all()


def test_numbers_are_read_under_their_names():
    into = table()
    into.seed[1], into.min_p[1] = 2**62, 0.25
    assert into.ints[1, INT_COLUMNS.index("seed")] == 2**62
    assert into.floats[1, FLOAT_COLUMNS.index("min_p")] == 0.25


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_a_rounds_vector_has_one_form_a_batch(batch):
    into = table()
    per_request = LAYOUT.max_appended_pages(1)
    most = tuple((1 + i // per_request, i % per_request, 5) for i in range(LAYOUT.max_appended_pages(batch)))
    slots = tuple(range(1, batch + 1))
    forms = {
        pack_launch(
            into, LaunchInput(slots, SamplingFeatures(), appended_pages=appended_pages), entry, LaunchForm(batch)
        ).part_sizes
        for entry, appended_pages in ((0, ()), (1, most[:1]), (2, most))
    }
    assert len(forms) == 1
    with pytest.raises(EspalierError, match="its launch input holds"):
        launch_input = LaunchInput((1,), SamplingFeatures(), appended_pages=(*most, (1, 1, 1)))
        pack_launch(into, launch_input, 0, LaunchForm(batch))


@pytest.mark.parametrize("batch", [1, 3])
def test_what_sources_send_has_one_form_and_padding_changes_no_path(batch):
    into = SlotTable(
        replace(SETUP, num_text_paths=1, num_sent_paths=2).layout, VOCAB, {}, torch.float64, torch.device("cpu")
    )
    shape = tuple(into.survival.shape)
    sent = np.linspace(-2, 0, into.survival.numel(), dtype=np.float32).reshape(shape)
    sent[0] = 0
    guess = Guess(5, 3, (1, 2))
    made = [
        LaunchInput((1,), SamplingFeatures(), guesses=((1, (guess, guess, guess)),), survival=sent),
        LaunchInput((1,), SamplingFeatures()),
        LaunchInput((1,), SamplingFeatures(), guesses=((1, (guess,)),)),
    ]
    sizes = set()
    for launch_input in made:
        packed = pack_launch(into, launch_input, 0, LaunchForm(batch))
        packed.with_vector(torch.from_numpy(packed.vector)).update_slot_table(into)
        sizes.add(packed.part_sizes)
        assert torch.equal(into.survival, torch.from_numpy(sent)), "sent once, and kept"
    assert len(sizes) == 1
    row = [5, 3, 1, 2] + [-1] * (into.guesses.shape[2] - 4)
    assert into.guesses[1].tolist() == [row, [0, 0] + [-1] * (len(row) - 2)] and not into.guesses[2:].any()


def test_padding_is_the_dummy_request_and_writes_its_dummy_page():
    into = table()
    into.page_table.fill_(0)
    arrived = device_launch(into, LaunchInput((3,), SamplingFeatures(), appended_pages=((3, 2, 8),)), batch=3)
    assert arrived.slots.tolist() == [3, 0, 0]
    assert not into.page_table.any(), "a round writes its pages itself"
    gather_slots(into, arrived.slots, arrived.appended_pages)
    assert into.page_table.nonzero().tolist() == [[3, 2]]


def test_a_prefill_pass_is_padded_with_requests_and_pieces_without_tokens():
    """The request in row 0 has tokens for two pieces and a part of a third; the next one for one."""
    launch_input = LaunchInput(
        (2, 1), SamplingFeatures(), lengths=(37, 16), width=16, pieces=((0, 0), (0, 16), (0, 32), (1, 0))
    )
    padded = device_launch(table(), launch_input, 3, pieces=6)
    assert padded.slots.tolist() == [2, 1, 0] and padded.lengths.tolist() == [37, 16, 0]
    made = padded.pieces
    assert (
        made is not None and made.request_row.tolist() == [0, 0, 0, 1, 2, 2] and made.last_piece.tolist() == [2, 3, 0]
    )
    lengths = (padded.lengths[made.request_row] - made.token_offset).clamp(max=16)
    assert lengths.tolist() == [16, 16, 5, 16, 0, 0]
    # Without room for another request, the padding belongs to the last one.
    made = device_launch(table(), launch_input, 2, pieces=6).pieces
    assert made is not None and made.request_row.tolist() == [0, 0, 0, 1, 1, 1] and made.last_piece.tolist() == [2, 3]
    assert made.token_offset.tolist() == [0, 16, 32, 0, 16, 16]


def test_a_captured_pass_finds_its_numbers_where_the_graph_reads_them():
    """Whatever else a launch does: what updates the slot table comes after."""
    launch_input = LaunchInput((2,), SamplingFeatures(), lengths=(3,), width=16)
    entered = replace(launch_input, slot_inits=(entering(2, [3, 1, 3, 8], [5, 5]),), appended_pages=((3, 1, 9),))
    form = LaunchForm(2, 16, 4)
    graph, launch = (pack_launch(table(), each, 1, form).vector for each in (launch_input, entered))
    assert launch[: len(graph)].tolist() == graph.tolist() and len(launch) > len(graph)


def test_a_page_past_the_table_is_refused():
    for slot, column in ((1, LAYOUT.table_width), (LAYOUT.num_slots, 0)):
        with pytest.raises(EspalierError, match="asks for page"):
            launch_input = LaunchInput((1,), SamplingFeatures(), appended_pages=((slot, column, 1),))
            pack_launch(table(), launch_input, 0, launch_input.form())


def test_what_grows_between_two_launches_fits_a_launch_input():
    """The most that a request's pages can grow by: it was just admitted, and two rounds are ahead."""
    for page_size in (1, 2, 3, 16, 64, 512):
        layout = replace(SETUP, page_size=page_size, max_context=4000).layout
        for seen in range(1, 200):
            grown = layout.pages_needed(seen + layout.extend_width, 2, 10**6) - layout.pages_needed(seen, 1, 10**6)
            assert grown <= layout.max_appended_pages(1)


def test_vectors_are_integers():
    packed = pack_launch(table(), LaunchInput((), SamplingFeatures()), 0, LaunchForm(0))
    assert packed.vector.dtype == np.int64 and [size for name, size in packed.part_sizes if name == "ring_entry"] == [1]


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_every_part_begins_at_sixteen_bytes(batch):
    """Else Triton would compile other kernels for another number of requests."""
    launch_input = LaunchInput(
        (2, 3, 1)[:batch],
        SamplingFeatures(),
        lengths=(20, 2, 1)[:batch],
        width=16,
        pieces=((0, 0), (0, 16), (1, 0), (2, 0))[: batch + 1],
        slot_inits=(entering(2, [3, 1, 3, 8], [5]),),
    )
    arrived = device_launch(table(), launch_input, batch)
    assert {part.storage_offset() * part.itemsize % 16 for part in arrived.parts.values()} == {0}
    assert arrived.lengths.tolist() == [20, 2, 1][:batch]
