"""A block drafter through the GPU's kernels: the same context rows and the same tree as in plain torch."""

from contextlib import nullcontext

import pytest
import torch

from espalier.attention import CommittedLengths, ModelCache, grouped_backend
from espalier.cache import kv, layer_spec
from espalier.cache.kv import PagedKV, StagedKV
from espalier.kernels.ops.drafts import block_conv, block_conv_norm, embed_rows, select_paths
from espalier.kernels.ops.rope import rotate_and_store
from espalier.kernels.ops.state import commit_rows, read_chain
from espalier.layout import RoundLayout
from espalier.models import dflash2
from espalier.models.layers import linear
from espalier.speculate.drafters import one_pass
from espalier.speculate.drafters.one_pass import OnePassDrafter
from espalier.speculate.sampler import make_kernel_sampler, make_sampler
from espalier.speculate.tree import Tree
from lab.faults.planted import plant
from tests.block import FORMS, block_directories
from tests.checkpoints import load_pair
from tests.kernels.sampled import ALL_SAMPLING_FEATURES, ASKED, slots_of, table_of

BLOCK, STEPS, VOCAB, NEW = 5, 4, 16, 3
# Greedy, sampled, and with penalties, a bias and banned stops.
SLOTS = (ASKED[0], ASKED[1], ASKED[10], ASKED[11])
BY_KERNELS = {
    (one_pass, "read_chain"): read_chain.triton,
    (one_pass, "select_paths"): select_paths.triton,
    (dflash2, "block_conv"): block_conv.triton,
    (dflash2, "block_conv_norm"): block_conv_norm.triton,
    (layer_spec, "rotate_and_store"): rotate_and_store.triton,
    (linear, "embed_rows"): embed_rows.triton,
    (kv, "commit_rows"): commit_rows.triton,
}


def proposed(form: str, device: torch.device, by_kernels: bool) -> tuple[Tree, list[torch.Tensor]]:
    """(the trees behind a prompt and three more tokens, the pages of the draft)."""
    target_path, draft_path = block_directories("llama", form, BLOCK)
    layout = RoundLayout(len(SLOTS), STEPS, 3, 14, 16, 64, 0, 256, block_rows=BLOCK)
    how = {"dtype": torch.float32, "device": device, "position_rows": layout.position_rows}
    _, draft = load_pair(target_path, draft_path, **how)
    specs = draft.layer_specs
    backend = grouped_backend(
        "triton" if device.type == "cuda" else "sdpa", device.type, torch.float32, 16, specs, [0, 1]
    )
    pages = PagedKV(layout, layout.max_pages, specs, 0, torch.float32, device)
    staging = StagedKV(specs, range(2), layout.draft_rows, torch.float32, device)
    drafter = OnePassDrafter(draft, layout, ModelCache(specs, range(2), pages, staging, backend))
    table = table_of(SLOTS, VOCAB, device)
    held = torch.arange(layout.max_batch * 4, device=device).view(-1, 4).to(torch.int32)
    table.page_table[1:, :4] = 1 + held
    table.root[1:] = torch.arange(len(SLOTS), device=device) % VOCAB
    # The root is the last known token.
    table.history[1:] = table.root[1:, None]
    generator = torch.Generator().manual_seed(3)
    # A prompt of ragged length, then what a round decided.
    counts = torch.arange(len(SLOTS)) * 2 + 1
    for width, length in ((8, counts), (NEW, counts % NEW + 1)):
        features = torch.randn(len(SLOTS), width, 64, generator=generator).to(device)
        slots = slots_of(table, range(1, len(SLOTS) + 1))
        drafter.extend(slots, features, length.to(device))
        table.prefix_len[1:] += length.to(device)
    slots = slots_of(table, range(1, len(SLOTS) + 1))
    drafter.prepare(CommittedLengths(tuple(table.prefix_len[1:].tolist()), exact=True))
    if by_kernels:
        sampler = make_kernel_sampler(slots, ALL_SAMPLING_FEATURES, slots.num_tokens)
    else:
        sampler = make_sampler(slots, ALL_SAMPLING_FEATURES, slots.num_tokens, STEPS + 1, VOCAB, torch.float32)
    return drafter.begin(slots)(sampler), [plane for stack in pages.draft_stacks for plane in stack.planes]


def check(kernel_device: torch.device, form: str, monkeypatch: pytest.MonkeyPatch, fault: str | None = None) -> None:
    """fault: planted in what the kernels run."""
    expected, rows = proposed(form, torch.device("cpu"), by_kernels=False)
    if kernel_device.type == "cpu":
        for (module, name), launcher in BY_KERNELS.items():
            monkeypatch.setattr(module, name, launcher)
    with plant(fault) if fault else nullcontext():
        tree, by_kernels = proposed(form, kernel_device, by_kernels=True)
    for ours, plain in zip(by_kernels, rows, strict=True):
        assert torch.allclose(ours.cpu(), plain, rtol=1e-5, atol=1e-5)
    for name in ("tokens", "parents", "depths", "ancestors"):
        assert torch.equal(getattr(tree, name).cpu(), getattr(expected, name)), name
    assert torch.allclose(tree.scores.cpu(), expected.scores, rtol=1e-3, atol=1e-3)


# Without and with edges, and with edges of paths; the other forms differ in what plain torch and the kernels share.
OF_KERNELS = ("dflash", "dspark", "rnn")


@pytest.mark.parametrize(
    "form", [form if form in OF_KERNELS else pytest.param(form, marks=pytest.mark.full) for form in FORMS]
)
def test_the_kernels_propose_what_plain_torch_proposes(kernel_device, form, monkeypatch):
    check(kernel_device, form, monkeypatch)


@pytest.mark.parametrize(
    ("form", "fault"),
    [
        pytest.param("dspark", "edge-of-wrong-parent", marks=pytest.mark.full),
        ("dflash2", "edge-of-wrong-parent"),
        ("rnn", "state-of-wrong-path"),
    ],
)
def test_an_edge_of_another_row_shows_in_the_kernels_tree(kernel_device, form, fault, monkeypatch):
    with pytest.raises(AssertionError, match="tokens"):
        check(kernel_device, form, monkeypatch, fault)
