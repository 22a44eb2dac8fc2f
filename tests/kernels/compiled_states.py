"""Translates the kernels of layers that keep a state for Hopper, and prints, as JSON, their names and what was refused.

A program of its own: where kernels are interpreted, nothing compiles.  The interpreter accepts code that the compiler
refuses: names of two shapes, and uses of pointers that are None.  The tests' own calls are made, without their results.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import triton
from triton.runtime import driver

from espalier.kernels.runtime.launch import launch_hook
from tests.kernels import test_states as cases
from tests.kernels.asked import Driver


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
    for keeps in (cases.DELTA, cases.ADDED):
        yield partial(cases.test_a_node_reads_the_state_of_its_parent, keeps, 1, 4)
        for marks in (False, True):
            yield partial(cases.test_a_path_goes_into_the_states_of_all_layers, keeps, 3, 4, marks)
            yield partial(cases.test_a_chain_is_read_and_taken_in, keeps, 1, 3, marks)
    yield partial(cases.test_pieces_of_a_chain_follow_one_another, cases.DELTA, 16)
    for keeps, columns, bias in cases.ORDERS:
        for kind in ("tree", "pieces"):
            yield partial(cases.test_inputs_are_convolved_along_their_paths, keeps, columns, bias, kind, torch.float32)
    for kind in ("path", "chain", "pieces"):
        yield partial(cases.test_tails_end_in_the_last_inputs_taken, *cases.ORDERS[0], kind)
    for is_first in (False, True):
        yield partial(cases.test_what_heads_read_is_normed_and_gated, (1, 36, is_first), torch.float16)


def main() -> None:
    driver.set_active(Driver())
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
