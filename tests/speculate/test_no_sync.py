"""No stage of a round reads the device on the host, and none brings a host tensor to it: what a captured round may not
do."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from espalier.engine.executor import CpuExecutor
from espalier.kernels.ops import drafts
from espalier.request import SamplingParams
from espalier.speculate import round
from espalier.speculate.drafters import path_merging
from tests.harness import Setup, prompts, request
from tests.pairwise import in_turn_params

SETUP = Setup(steps=3, topk=2, num_draft_tokens=8, page_size=3, max_batch=3)
SHARED = replace(SETUP, num_text_paths=2, num_sent_paths=2, shared_rows=3)
aten = torch.ops.aten
# Their results' values or shapes are read by the host, or their values come from it.
READERS = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.is_nonzero.default,
    aten.equal.default,
    aten.repeat_interleave.Tensor,
    aten.bincount.default,
}
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}


class NoSync(TorchDispatchMode):
    """Raises where a CUDA device would be waited for."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        masks = func in INDEXING and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        # Of no dimension it is a number, which `buffer[row] = 0` fills in on the device.
        brought = func is aten.lift_fresh.default and args[0].ndim > 0
        if func in READERS or masks or brought:
            raise AssertionError(f"{func} reads the device on the host")
        return func(*args, **kwargs or {})


def watched(right):
    def verb(*args):
        with NoSync():
            return right(*args)

    return verb


@pytest.mark.parametrize(
    ("algorithm", "attention"), in_turn_params(["eagle3", "ngram", "none", "shared", "alone"], ["reference", "sdpa"])
)
def test_drafters_and_backends_do_not_wait(algorithm, attention, monkeypatch):
    """shared: sources beside a draft, and rows that are shared out; alone: sources without a draft pass."""
    sourced = algorithm in ("shared", "alone")
    setup = replace(SHARED, drafts=algorithm == "shared") if sourced else replace(SETUP, algorithm=algorithm)
    setup = replace(setup if algorithm != "none" else SETUP.plain(), attention=attention)
    engine = setup.engine()
    # In inference mode reads of a number are not dispatched, and would not be seen.
    plainly = CpuExecutor.run.__wrapped__
    monkeypatch.setattr(CpuExecutor, "run", torch.no_grad()(plainly))
    # As a GPU's executor runs it.
    monkeypatch.setattr(CpuExecutor, "_runner_for", lambda executor, launch_input: executor.runner)
    drafter = engine.executor.runner.drafter
    for verb in ("begin", "extend"):
        monkeypatch.setattr(drafter, verb, watched(getattr(drafter, verb)))
    # What only a CPU's path reads: a GPU's kernels end where the text does, and its graphs always merge.
    monkeypatch.setattr(path_merging, "have_no_paths", lambda paths: False)
    monkeypatch.setattr(drafts, "max_history_length", lambda root: engine.layout.history_width)
    for stage in ("propose", "accept", "verify", "commit"):
        monkeypatch.setattr(round, stage, watched(getattr(round, stage)))
    for i, prompt in enumerate(prompts(0, (5, 9))):
        engine.add(request(i, prompt, SamplingParams(temperature=float(i), max_tokens=8, presence_penalty=0.1 * i)))
    while engine.has_work:
        engine.step()


def test_what_waits_is_seen():
    values = torch.arange(3)
    for waits in (values.sum().item, lambda: values[values > 1], lambda: torch.tensor([1]), values.nonzero):
        with NoSync(), pytest.raises(AssertionError, match="on the host"):
            waits()
