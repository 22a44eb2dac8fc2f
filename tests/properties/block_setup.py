"""Engines whose draft is a block draft, and their oracle."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from espalier.layout import RoundLayout
from espalier.models import CausalLM, DraftModel
from tests.block import block_directories
from tests.checkpoints import load_pair
from tests.harness import CPU, DTYPE, MAX_POSITIONS, Setup
from tests.oracles.plain_block import BlockReference, PlainBlock


@dataclass(frozen=True)
class BlockSetup(Setup):
    """spare: rows of the block that propose nothing."""

    algorithm: str = "block"
    form: str = "dflash"
    spare: int = 1

    @property
    def num_recomputed_tokens(self) -> int:
        return 0

    @property
    def block_size(self) -> int:
        return self.steps + 1 + self.spare

    @property
    def layout(self) -> RoundLayout:
        return replace(super().layout, block_rows=self.block_size if self.algorithm == "block" else 0)

    def models(self, position_rows: int = MAX_POSITIONS) -> tuple[CausalLM, DraftModel | None]:
        target, draft = block_models(self.family, self.form, self.block_size, position_rows)
        return target, draft if self.algorithm == "block" else None


@lru_cache
def block_models(family: str, form: str, block_size: int, position_rows: int) -> tuple[CausalLM, DraftModel]:
    target_path, draft_path = block_directories(family, form, block_size)
    how: dict[str, Any] = {"dtype": DTYPE, "device": CPU, "position_rows": position_rows}
    return load_pair(target_path, draft_path, **how)


@lru_cache
def _reference(family: str, form: str, block_size: int) -> BlockReference:
    target, draft = block_models(family, form, block_size, MAX_POSITIONS)
    return BlockReference(target, draft, PlainBlock.load(*block_directories(family, form, block_size)))


def block_reference_of(setup: BlockSetup) -> BlockReference:
    return _reference(setup.family, setup.form, setup.block_size)
