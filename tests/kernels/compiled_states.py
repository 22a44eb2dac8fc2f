"""Translates the kernels of layers that keep a state for Hopper, and prints, as JSON, their names and what was refused.

A program of its own: where kernels are interpreted, nothing compiles.  The interpreter accepts code that the compiler
refuses: names of two shapes, and uses of pointers that are None.  The tests' own calls are made, without their results.

    python -m tests.kernels.compiled_states machine

compiles the kernels whose products have operands in 16 bits, and prints what machine_code.py finds in each.  "all": of
heads of more sizes.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import product
from typing import Any

import torch
import triton
from triton.runtime import driver

from espalier.cache.layer_spec import RecurrentState
from espalier.kernels.ops.states import PathRows, SlotStates, chain_outputs, tree_outputs
from espalier.kernels.recurrence import chain, tree
from espalier.kernels.runtime.launch import launch_hook
from tests.kernels import test_states as cases
from tests.kernels.asked import Driver
from tests.kernels.machine_code import unwritten_registers

# Sizes of a head's keys and values.
SIZES = [(6, 10)]
ALL_SIZES = [(5, 6), *product((16, 32, 64, 96, 128, 256), (16, 32, 64, 96, 128))]


class Translated:
    """A launch hook.  names: of kernels; refused: by name, the last line of what Triton says."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.refused: dict[str, str] = {}

    def __call__(self, function: Any, grid: Any, *args: Any, **kwargs: Any) -> None:
        name = function.fn.__name__
        self.names.add(name)
        try:
            function.warmup(*args, grid=grid, **kwargs)
        except Exception as error:
            self.refused[name] = f"{error}".strip().rpartition("\n")[2]


def translated_only(backend: Any = None, stages: dict[str, Any] | None = None, *_: object) -> tuple[str, str] | None:
    """A stages hook of Triton: Python becomes Triton's own code, and no machine's."""
    if stages is None:
        return ("translated only", "translated only")

    def named(module: object, metadata: dict[str, Any]) -> str:
        metadata.update(name="translated", shared=0, tmem_size=0)
        for kind in ("global", "profile"):
            metadata.update({f"{kind}_scratch_size": 0, f"{kind}_scratch_align": 1})
        return ""

    stages.update(ttgir=lambda module, _: module, llir=named, ptx=lambda *_: "", cubin=lambda *_: b"\x7fELF")
    return None


def calls() -> Iterator[Callable[..., object]]:
    """Each kernel with and without what may be None."""
    for of_kind in cases.KINDS:
        yield partial(cases.test_a_node_reads_the_state_of_its_parent, of_kind, (1, 4))
        for marks in (False, True):
            yield partial(cases.test_a_path_goes_into_the_states_of_all_layers, of_kind, (3, 4, marks))
            yield partial(cases.test_a_chain_is_read_and_taken_in, of_kind, (1, 3, marks))
    yield partial(cases.test_pieces_of_a_chain_follow_one_another, "delta", 16)
    for order in cases.ORDERS:
        for kind in ("tree", "pieces"):
            yield partial(cases.test_inputs_are_convolved_along_their_paths, order, kind, torch.float32)
    for kind in ("path", "chain", "pieces"):
        yield partial(cases.test_tails_end_in_the_last_inputs_taken, "delta", kind)
    for is_first in (False, True):
        yield partial(cases.test_what_heads_read_is_normed_and_gated, (1, 36, is_first), torch.float16)


class InMachineCode:
    """A launch hook.  lost: by name and sizes, instructions that read a register which is never written."""

    def __init__(self, names: set[str]) -> None:
        self.names, self.what = names, ""
        self.lost: dict[str, list[str]] = {}

    def __call__(self, function: Any, grid: Any, *args: Any, **kwargs: Any) -> None:
        name = function.fn.__name__
        if name in self.names:
            compiled = function.warmup(*args, grid=grid, **kwargs)
            self.lost[f"{name} {self.what}"] = unwritten_registers(compiled.asm["cubin"])


def products_of_16_bits(*_: object) -> tree.ProductPrecision:
    return tree.ProductPrecision(torch.bfloat16, "tf32")


def compiled_for(k_size: int, v_size: int, delta: bool) -> None:
    """The launches of a tree and of a chain with marks."""
    keeps = RecurrentState(taps=4, heads=4, k_heads=2, k_size=k_size, v_size=v_size, delta=delta, units=delta)
    drawn = cases.Drawn(0, torch.device("cpu"))
    q, rows = drawn.rows(keeps, 2, 16)
    q, rows = q if delta else q.bfloat16(), rows._replace(v=rows.v.bfloat16())
    state = SlotStates(drawn.state(keeps, 4), torch.tensor([1, 2]))
    tree_outputs.triton(q, rows, state, drawn.tree(2, 16)[1], None, delta)
    path = PathRows(state.slots, None, *[torch.tensor([16, 9])] * 3, None, None, 16, 3)
    chain_outputs.triton(q, rows, state, path, None, delta)


def in_machine_code(names: set[str], sizes: list[tuple[int, int]], kinds: tuple[bool, ...]) -> dict[str, list[str]]:
    tree.choose_precision = chain.choose_precision = products_of_16_bits
    made = InMachineCode(names)
    launch_hook.set(made)
    for (k_size, v_size), delta in product(sizes, kinds):
        made.what = f"{k_size} x {v_size} {'delta' if delta else 'added'}"
        compiled_for(k_size, v_size, delta)
    return made.lost


def main() -> None:
    driver.set_active(Driver())
    if "machine" in sys.argv:
        print(json.dumps(in_machine_code({"_scan_chunks_kernel"}, SIZES, (True,))))
        return
    if "all" in sys.argv:
        names = {"_scan_chunks_kernel", "_solve_chunks_kernel", "_tree_kernel"}
        print(json.dumps(in_machine_code(names, [*SIZES, *ALL_SIZES], (True, False))))
        return
    triton.knobs.runtime.add_stages_inspection_hook = translated_only
    made = Translated()
    launch_hook.set(made)
    for call in calls():
        # What a kernel would have filled is compared at the end of a test.
        with suppress(AssertionError):
            call(kernel_device=torch.device("cpu"))
    print(json.dumps({"names": sorted(made.names), "refused": made.refused}))


if __name__ == "__main__":
    main()
