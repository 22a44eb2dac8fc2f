"""Synthetic checkpoints: models of production shape whose text and accept length are known.

`write_checkpoint` makes two Hugging Face directories; `build_models` makes the same models on a device, without files.
target.py and draft.py say how the chain is built into the weights; chain.py has the chain and the predicted accept
length.  There is no tokenizer: prompts are token ids.  The draft is an EAGLE-3 head or, with `mtp_layers`, an MTP head
(mtp.py) or, with `block_size`, a block draft (block.py).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from espalier.bench.shapes import Shape
from espalier.errors import EspalierError
from espalier.kernels.layers.linear_plans import DENSE
from espalier.models import CausalLM, DraftModel
from espalier.models.draft import DraftConfig
from espalier.models.from_transformers.probe import read_by_transformers
from espalier.models.from_transformers.target import load_by_transformers
from espalier.models.loading import make_target
from espalier.models.weight_files import INDEX_FILE, write_weights
from espalier.models.weight_formats import all_dense
from espalier.models.weights import Weights
from espalier.shards import SINGLE_RANK, Shards
from espalier.speculate.drafters.base import DraftFormat
from espalier.speculate.drafters.registry import draft_shards, format_of
from lab.synthetic.block import BlockTensors
from lab.synthetic.chain import MAX_SKILL, MIN_SKILL, Chain, make_chain, predicted_accept_length
from lab.synthetic.draft import DraftTensors
from lab.synthetic.draft_json import block_json, mtp_json
from lab.synthetic.eagle3 import Eagle3Tensors
from lab.synthetic.mtp import MtpTensors
from lab.synthetic.quantised import NamedTensors, QuantisedTensors
from lab.synthetic.routing import check_correlation
from lab.synthetic.target import TargetTensors

# Saving needs twice this memory: a shard as tensors and as bytes.
SHARD_BYTES = 2_000_000_000


@dataclass(frozen=True)
class Recipe:
    """Everything that determines a synthetic checkpoint.

    mode: "chain" or "copy".  In copy mode the kind of a token up to `reach` positions back decides which successor
    follows, so that a wrong K/V row of any layer changes the text.  Prompts must be longer than `reach`.
    skill: how often the draft's first guess is right; in chain mode only.
    routing_correlation: 0 to 1, how much the experts of neighbouring tokens agree (routing.py).
    stretches: (tokens, skill), in place of `skill`: greedy text runs through them again and again.  Not for MTP heads.
    mtp_layers: layers of an MTP head; 0 is an EAGLE-3 head.  mtp_form: "chain" or "target".
    block_size: tokens that one pass of a block draft proposes; 0: the draft is not a block draft.
    block_fade: the block draft's skill at each depth, divided by its skill at the depth before; depth 1 has `skill`.
    block_skills: the block draft's skill at each depth, in place of block_fade; () for none.
    weights, draft_weights: how target and draft store their matrices: "dense", or a name of
    espalier/models/quantisers.py:QUANTISERS.  `skill` is that of a dense draft; a quantised one is about as good.
    model_impl: what runs the target, as of EngineConfig.
    """

    shape: Shape
    seed: int = 0
    mode: str = "chain"
    skill: float = 0.8
    stretches: tuple[tuple[int, float], ...] = ()
    reach: int = 256
    routing_correlation: float = 0.0
    mtp_layers: int = 0
    mtp_form: str = "chain"
    block_size: int = 0
    block_fade: float = 1.0
    block_skills: tuple[float, ...] = ()
    weights: str = DENSE
    draft_weights: str = DENSE
    model_impl: str = "native"

    def __post_init__(self) -> None:
        if self.model_impl == "transformers" and self.weights != DENSE:
            raise EspalierError("--model-impl transformers has no quantised weights; leave --weights out")

    @property
    def draft_json(self) -> dict[str, Any]:
        if self.block_size:
            return block_json(self.shape, self.block_size)
        return mtp_json(self.shape, self.mtp_layers, self.mtp_form) if self.mtp_layers else self.shape.draft_json

    @property
    def draft_name(self) -> str:
        stored = "" if self.draft_weights == DENSE else f" in {self.draft_weights}"
        if self.block_size:
            fade = self.block_skills or f"fade {self.block_fade}"
            return f"a block draft{stored} of {self.block_size}, {fade},"
        return f"an MTP head{stored}, {self.mtp_layers} x {self.mtp_form}," if self.mtp_layers else f"a draft{stored}"

    @property
    def draft_format(self) -> DraftFormat:
        return format_of(self.draft_json, Path(f"{self.shape.name} draft"))

    @property
    def draft_config(self) -> DraftConfig:
        return self.draft_format.read(Path(f"{self.shape.name} draft"), self.draft_json, self.shape.target)

    def chain(self) -> Chain:
        config = self.shape.target
        check_correlation(self.routing_correlation, config, self.shape.name)
        return make_chain(
            config.vocab_size,
            range(self.shape.first_emitted_id, self.shape.end_emitted_id),
            self.shape.draft_vocab_size,
            config.num_layers,
            seed=self.seed,
            mode=self.mode,
            skill=self.skill,
            reach=self.reach,
            has_topics=self.routing_correlation > 0,
            is_nudged=self.mtp_layers > 0,
            block_size=self.block_size,
            fade=self.block_fade,
            skills=self.block_skills,
            stretches=self.stretches,
        )

    def tensors(self, dtype: torch.dtype, device: torch.device | str) -> tuple[NamedTensors, NamedTensors]:
        """Of the target and of the draft, as their checkpoints store them."""
        drawn = self.shape, self.chain(), self.seed, dtype, torch.device(device)
        target = TargetTensors(*drawn, self.routing_correlation, self.weights != DENSE)
        draft = self._draft(target)
        return (
            target if self.weights == DENSE else QuantisedTensors(target, self.weights),
            draft if self.draft_weights == DENSE else QuantisedTensors(draft, self.draft_weights, is_draft=True),
        )

    def _draft(self, target: TargetTensors) -> DraftTensors:
        if self.block_size:
            return BlockTensors(self.shape, target, self.block_size)
        if self.mtp_layers:
            return MtpTensors(self.shape, target, self.mtp_layers, self.mtp_form)
        return Eagle3Tensors(self.shape, target)

    def with_acceptance(self, by_depth: Sequence[float]) -> "Recipe":
        """This recipe with a draft whose first guess is right at the rates `by_depth`, if the guess above is right.

        A block draft gets the rate of each depth.  Other drafts are equally good at all depths.  Their rate is the
        one at which a chain of as many guesses accepts as many tokens a round.  Raises EspalierError."""
        steps = len(by_depth)
        if not self.block_size:
            return self.with_accept_length(1 + sum(accumulate(by_depth, mul)), steps, 1, steps + 1)
        if self.mode != "chain":
            raise EspalierError("copy mode's acceptance follows from the tree alone; use mode 'chain'")
        if steps < self.block_size:
            raise EspalierError(f"--accept-lengths has {steps} depths, and --block-size={self.block_size}; lower it")
        return replace(self, skill=by_depth[0], block_skills=tuple(by_depth[: self.block_size]))

    def with_accept_length(self, wanted: float, steps: int, topk: int, num_draft_tokens: int) -> "Recipe":
        """This recipe with the skill at which greedy decoding accepts `wanted` tokens a round.

        Raises EspalierError if no skill reaches that with this tree.
        """
        if self.mode != "chain":
            raise EspalierError("copy mode's accept length follows from the tree alone; use mode 'chain'")

        def length(skill: float) -> float:
            return predicted_accept_length(replace(self, skill=skill).chain(), steps, topk, num_draft_tokens)

        low, high = MIN_SKILL, MAX_SKILL
        least, most = length(low), length(high)
        if not least <= wanted <= most:
            raise EspalierError(
                f"accept length {wanted} is out of reach of steps {steps}, topk {topk}, num_draft_tokens "
                f"{num_draft_tokens}; use {least:.2f} to {most:.2f}"
            )
        while high - low > 4e-3:
            middle = (low + high) / 2
            low, high = (middle, high) if length(middle) < wanted else (low, middle)
        return replace(self, skill=round((low + high) / 2, 4))


def write_checkpoint(
    recipe: Recipe, out: Path, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> tuple[Path, Path]:
    """Write out/target, out/draft and out/foundry.json; returns the two directories.

    Memory: twice SHARD_BYTES, and the embedding.  Raises EspalierError for a directory that already holds weights.
    """
    target, draft = recipe.tensors(dtype, device)
    stored = str(dtype).removeprefix("torch.")
    fields = recipe.shape.config_fields
    # Check both directories before making the first model, which may take long.
    for name in ("target", "draft"):
        _make_weightless_folder(out / name)
    _write_model(out / "target", {**recipe.shape.config_json, "torch_dtype": stored}, target)
    generation = {name: fields[name] for name in ("bos_token_id", "eos_token_id") if fields.get(name) is not None}
    _write_json(out / "target" / "generation_config.json", {**generation, "do_sample": False})
    _write_model(out / "draft", {**recipe.draft_json, "torch_dtype": stored}, draft)
    about = {**asdict(recipe), "shape": recipe.shape.name, "source": recipe.shape.hugging_face_id, "dtype": stored}
    _write_json(out / "foundry.json", about)
    return out / "target", out / "draft"


def _make_weightless_folder(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)
    if stale := sorted(path.glob("*.safetensors*")):
        raise EspalierError(f"{path} already holds {stale[0].name}; name an empty directory")


def _write_model(path: Path, config: Mapping[str, Any], tensors: NamedTensors) -> None:
    quantised = {"quantization_config": tensors.quantisation} if isinstance(tensors, QuantisedTensors) else {}
    _write_json(path / "config.json", {**config, **quantised})
    shards = _split_into_shards(tensors, SHARD_BYTES)
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = ["model.safetensors"]
    for file, shard in zip(names, shards, strict=True):
        write_weights(path / file, {name: tensors.tensor(name).cpu().contiguous() for name in shard})
    if len(shards) > 1:
        places = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        total = total_bytes(tensors)
        _write_json(path / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": places})


def _split_into_shards(tensors: NamedTensors, max_bytes: int) -> list[list[str]]:
    """The names in order, split into shards of at most `max_bytes` bytes, or of one tensor."""
    shards: list[list[str]] = [[]]
    held = 0
    for name in tensors.shapes:
        size = _tensor_bytes(tensors, name)
        if shards[-1] and held + size > max_bytes:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += size
    return shards


def total_bytes(tensors: NamedTensors) -> int:
    return sum(_tensor_bytes(tensors, name) for name in tensors.shapes)


def _tensor_bytes(tensors: NamedTensors, name: str) -> int:
    itemsize = tensors.itemsize(name) if isinstance(tensors, QuantisedTensors) else tensors.dtype.itemsize
    return torch.Size(tensors.shapes[name]).numel() * itemsize


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _target_by_transformers(recipe: Recipe, tensors: NamedTensors, captured_layers: tuple[int, ...]) -> CausalLM:
    config = read_by_transformers(recipe.shape.config_json, Path("synthetic checkpoint"))
    state = {name: tensors.tensor(name) for name in tensors.shapes}
    return load_by_transformers(config, tensors.dtype, tensors.device, captured_layers, state)


class SyntheticWeights(Weights):
    """The weights of a checkpoint that is not on disk: each tensor is made when it is read."""

    def __init__(self, tensors: NamedTensors, shards: Shards = SINGLE_RANK) -> None:
        self.path = Path("synthetic checkpoint")
        self.shards = shards
        self.tensors = tensors
        self.dtype = tensors.dtype
        self.device = tensors.device
        self.formats = tensors.formats if isinstance(tensors, QuantisedTensors) else all_dense
        self._loaded: Mapping[str, Tensor] = {}
        self._names = frozenset(tensors.shapes)
        self._unused = set(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors.shapes[name]

    def _read_tensor(self, name: str) -> Tensor:
        return self.tensors.tensor(name)


def build_models(
    recipe: Recipe, dtype: torch.dtype, device: torch.device | str, position_rows: int, shards: Shards = SINGLE_RANK
) -> tuple[CausalLM, DraftModel]:
    """(target, draft): the models that loading the directories of `write_checkpoint` gives.

    shards: the part of the target that a rank holds, and the part of a draft that is divided too."""
    tensors, draft_tensors = recipe.tensors(dtype, device)
    draft_config = recipe.draft_config
    capture, target = draft_config.spec.captured_layers, None
    if recipe.model_impl == "transformers":
        target = _target_by_transformers(recipe, tensors, capture)
    else:
        target = make_target(SyntheticWeights(tensors, shards), tensors.config, capture, position_rows)
    own = draft_shards(draft_config, shards)
    draft = recipe.draft_format.make(SyntheticWeights(draft_tensors, own), draft_config, target, position_rows)
    if tensors.device.type == "cuda":
        torch.cuda.empty_cache()  # temporary memory becomes room for pages
    return target, draft
