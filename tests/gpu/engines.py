"""Tiny engines on the GPU, in any dtype: their weights are numbers that bfloat16 holds, so that every dtype runs one
model, and the oracle, in float64 on the CPU, runs it too."""

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from shutil import copytree

import torch
from safetensors.torch import load_file, save_file

from espalier.attention import default_backend
from espalier.config import FP8_KV
from espalier.engine.cuda import CudaExecutor
from espalier.engine.engine import Engine
from espalier.models import CausalLM, DraftModel, load_target
from espalier.speculate.drafters.registry import drafter_without_files
from espalier.startup.build import LoadedModels, assemble_engine
from tests.checkpoints import load_pair
from tests.folders import new_folder
from tests.harness import MAX_POSITIONS, Setup, directories
from tests.oracles.fp8_cache import ones
from tests.oracles.reference_round import Reference

GPU = torch.device("cuda")
# Of the two rows of a tied pair the second is larger by one unit in the last place of float32.
TIE = 1 + 2.0**-23


def dense_of(family: str) -> str:
    """The family of a target that routes nothing, for bfloat16: where two experts score nearly alike, a rounded router
    chooses another one than the oracle, and the row is another one's."""
    return "qwen3" if family == "qwen3_moe" else f"{family}_dense"


@lru_cache
def files(family: str, seed: int, window: int | None, draft_vocab: int | None, tied: bool) -> tuple[Path, Path]:
    """The harness's target and draft with every weight rounded to bfloat16.

    tied: the target's tokens come in pairs, 2i and 2i + 1, whose logits differ by the last place of float32 only.
    """
    return rounded(directories(family, seed, window, draft_vocab), tied)


def rounded(sources: tuple[Path, Path], tied: bool = False) -> tuple[Path, Path]:
    """Copies of a target and a draft with every weight rounded to bfloat16."""
    root = new_folder("gpu-")
    copies = []
    for source, name in zip(sources, ("target", "draft"), strict=True):
        copies.append(Path(copytree(source, root / name)))
        file = copies[-1] / "model.safetensors"
        weights = {key: value.to(torch.bfloat16).double() for key, value in _floats(load_file(file)).items()}
        if tied and name == "target":
            weights["lm_head.weight"][1::2] = weights["lm_head.weight"][::2] * TIE
        save_file({**load_file(file), **weights}, file, metadata={"format": "pt"})
    return copies[0], copies[1]


def _floats(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value for key, value in weights.items() if value.is_floating_point()}


@lru_cache
def loaded(
    paths: tuple[Path, Path],
    speculative: bool,
    dtype: torch.dtype,
    device: torch.device,
    rows: int,
    model_impl: str = "auto",
) -> tuple[CausalLM, DraftModel | None]:
    target_path, draft_path = paths
    how = {"dtype": dtype, "device": device, "position_rows": rows}
    if not speculative:
        return load_target(target_path, model_impl=model_impl, **how), None
    return load_pair(target_path, draft_path, model_impl, **how)


@dataclass(frozen=True)
class DeviceSetup(Setup):
    """A Setup that runs on the GPU.

    attention: "auto" is what users get in that dtype; graph_batch: None captures every batch; capture_stages: of an
    LLM, which most tests do not need.
    """

    dtype: torch.dtype = torch.float64
    attention: str = "auto"
    overlap: bool = True
    graph_batch: int | None = None
    capture_stages: bool = False
    tied: bool = False
    device: torch.device = GPU

    @property
    def paths(self) -> tuple[Path, Path]:
        return files(self.family, self.seed, self.window, self.draft_vocab, self.tied)

    @property
    def backend(self) -> str:
        return default_backend(self.device.type, self.dtype) if self.attention == "auto" else self.attention

    def models(self, position_rows: int = MAX_POSITIONS) -> tuple[CausalLM, DraftModel | None]:
        return loaded(self.paths, self.has_draft, self.dtype, self.device, position_rows, self.model_impl)

    @property
    def has_draft(self) -> bool:
        return drafter_without_files(self.algorithm) is None

    def engine(self) -> Engine:
        return assemble_engine(self.loaded(), capture_stages=self.capture_stages)

    def loaded(self) -> LoadedModels:
        most = self.layout.max_batch
        graph_batch = most if self.graph_batch is None else min(self.graph_batch, most)
        chosen = replace(self, attention=self.backend)
        config = chosen.config(self.dtype, self.device, graph_batch=graph_batch)
        return LoadedModels(config, *self.models(self.layout.position_rows))

    @property
    def reference(self) -> Reference:
        """The oracle: these weights in float64, on the CPU, in plain torch.  Rows in FP8 have the scale 1."""
        in_fp8 = self.kv_dtype == FP8_KV, self.draft_kv_dtype == FP8_KV
        return _reference(self.paths, self.has_draft, *in_fp8)


@lru_cache
def _reference(paths: tuple[Path, Path], speculative: bool, target_fp8: bool, draft_fp8: bool) -> Reference:
    models = loaded(paths, speculative, torch.float64, torch.device("cpu"), MAX_POSITIONS)
    scales, draft_scales = (
        [ones(spec.cache_spec.kv_heads, len(spec.cache_spec.planes)) for spec in model.layer_specs]
        if in_fp8 and model
        else None
        for model, in_fp8 in zip(models, (target_fp8, draft_fp8), strict=True)
    )
    return Reference(*models, scales=scales, draft_scales=draft_scales)


def make_executor(engine: Engine) -> CudaExecutor:
    assert isinstance(engine.executor, CudaExecutor)
    return engine.executor
