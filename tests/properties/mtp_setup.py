"""Engines whose draft is multi-token prediction layers, and their oracle."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from espalier.models import CausalLM, DraftModel
from tests.checkpoints import load_pair
from tests.harness import CPU, DTYPE, MAX_POSITIONS, Setup
from tests.mtp import mtp_directories
from tests.oracles.plain_mtp import plain_modules
from tests.oracles.reference_round import Reference


@dataclass(frozen=True)
class MTPSetup(Setup):
    algorithm: str = "mtp"
    form: tuple[int, str] = (1, "chain")

    @property
    def num_recomputed_tokens(self) -> int:
        return self.form[0] if self.algorithm == "mtp" else super().num_recomputed_tokens

    def models(self, position_rows: int = MAX_POSITIONS) -> tuple[CausalLM, DraftModel | None]:
        target, draft = mtp_models(self.family, *self.form, self.window, position_rows)
        return target, draft if self.algorithm == "mtp" else None


@lru_cache
def mtp_models(
    family: str, modules: int, form: str, window: int | None, position_rows: int
) -> tuple[CausalLM, DraftModel]:
    target_path, draft_path = mtp_directories(family, modules, form, window)
    how: dict[str, Any] = {"dtype": DTYPE, "device": CPU, "position_rows": position_rows}
    return load_pair(target_path, draft_path, **how)


@lru_cache
def _reference(family: str, modules: int, form: str, window: int | None) -> Reference:
    target, draft = mtp_models(family, modules, form, window, MAX_POSITIONS)
    plain = plain_modules(*mtp_directories(family, modules, form, window), target, draft)  # type: ignore[arg-type]
    return Reference(target, draft, plain)


def mtp_reference_of(setup: MTPSetup) -> Reference:
    return _reference(setup.family, *setup.form, setup.window)
