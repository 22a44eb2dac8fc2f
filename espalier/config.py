"""The engine's configuration.

A field that is "auto" gets its value at startup: startup/resolve.py builds a ResolvedConfig from the configuration, the
device and the model.  The command line's flags are generated from the fields.
"""

import json
import math
import types
from collections.abc import Callable, Mapping
from dataclasses import Field, asdict, dataclass, field, fields
from os import PathLike
from typing import Any, Literal, Protocol, Union, get_args, get_origin

from espalier.errors import EspalierError, refuse_unknown_fields, shown
from espalier.layout import RoundLayout, TreeShape

DTYPES = ("float64", "float32", "bfloat16", "float16")
# The only value of `kv_dtype` that `dtype` does not accept.
FP8_KV = "fp8_e4m3"
KV_DTYPES = (FP8_KV, *DTYPES)


def option(help_text: str, default: Any = "auto", **limits: Any) -> Any:
    """Returns a dataclass field with a help text and a default.  limits: the bounds of its values: low and high (both
    included) or above (excluded); or choices, the allowed values."""
    return field(default=default, metadata={"help": help_text, **limits})


@refuse_unknown_fields
@dataclass(frozen=True)
class SpeculationConfig:
    """The draft tree.  SafeAILab's EAGLE calls the same sizes depth = steps - 1 and total_token = num_draft_tokens."""

    algorithm: str = option(
        "the draft model's format, such as eagle3 or mtp; 'ngram' (lookup in the text so far); or 'none'. By default "
        "that of the draft, without a draft 'ngram'"
    )
    steps: int | Literal["auto"] = option("depth of the tree; 0 is plain decoding", low=0, high=256)
    topk: int | Literal["auto"] = option("branches kept at each level; 1 is a chain", low=1, high=256)
    num_draft_tokens: int | Literal["auto"] = option("nodes verified per round, including the root", low=1)
    by_batch: Mapping[Any, Any] | str | PathLike[str] = field(
        default="auto",
        metadata={
            "help": "smaller trees for larger batches: a file that `bench choose` wrote, or JSON like "
            '{"8": {"steps": 3, "topk": 2, "num_draft_tokens": 8}, "64": {"steps": 0}}, where each tree applies from '
            "that batch size on; by default trees are chosen while the engine runs, {} keeps the one that is configured"
        },
    )

    sources: str = option(
        "what proposes tokens beside the draft, separated by commas: text (what followed the same tokens in the "
        "request before), prediction (what requests bring as such), index (texts that the engine has served, of the "
        "same client); or none; by default prediction on a CPU, none on a GPU"
    )
    index_bytes: int | Literal["auto"] = option("memory of the index; by default 64 MiB", low=4096)

    def __post_init__(self) -> None:
        check_fields(self)
        if isinstance(self.by_batch, Mapping):
            object.__setattr__(self, "by_batch", dict(self.by_batch))


@refuse_unknown_fields
@dataclass(frozen=True)
class EngineConfig:
    """The settings of LLM.

    A field that is None or "auto" gets its value at startup, except that speculation=None is plain decoding."""

    model: str | PathLike[str] = field(
        default="auto",
        metadata={"help": "a directory, a Hugging Face id, or 'bundled'; by default the draft's target, or 'bundled'"},
    )
    draft: str | PathLike[str] | None = field(
        default=None, metadata={"help": "the draft's directory or Hugging Face id; 'bundled' includes a draft"}
    )
    speculation: SpeculationConfig | Literal["auto"] | None = field(default="auto", metadata={"help": "the draft tree"})
    device: str = option("cpu, cuda or cuda:N")
    tensor_parallel: int = option(
        "GPUs of this machine that share the model, each with a part of every layer; on a CPU, processes",
        1,
        low=1,
        high=64,
    )
    dtype: str = option("dtype of the weights, and of the KV cache unless kv_dtype is given", choices=DTYPES)
    kv_dtype: str = option(
        "dtype of the KV cache: fp8_e4m3, or the same as dtype; by default the one that the checkpoint's "
        "kv_cache_scheme declares, else the same as dtype",
        choices=KV_DTYPES,
    )
    draft_kv_dtype: str = option("dtype of the draft's KV cache; by default the target's kv_dtype", choices=KV_DTYPES)
    threads: int | Literal["auto"] = option(
        "CPU threads of PyTorch, for the whole process; by default OMP_NUM_THREADS if it is set, else from the model's "
        "size: 1 for a small model, all physical cores for a large one",
        low=1,
        high=1024,  # with tens of thousands the process crashes
    )
    attention: str = option("attention backend, such as triton or sdpa; `espalier doctor --matrix` lists them")
    draft_attention: str = option("attention backend of the draft's layers; by default the target's")
    page_size: int | Literal["auto"] = option("tokens per page of the KV cache", low=1, high=512)
    num_pages: int | Literal["auto"] | None = option(
        "pages of the KV cache; by default as many as fit a share of the free memory", low=2
    )
    num_snapshots: int | Literal["auto"] = option(
        "snapshots of recurrent states for the prefix cache, of models that have such states; by default four for each "
        "request of the batch, if they fit a quarter of the memory of pages",
        low=0,
    )
    max_batch: int | Literal["auto"] = option(
        "requests that run at the same time; by default 128 on a GPU and 8 on a CPU, or fewer where the recurrent "
        "states of so many would take more than a fourth of the memory that weights leave",
        low=1,
    )
    max_context: int | Literal["auto"] = option("tokens of one request, prompt and output", low=2)
    chunk_size: int | Literal["auto"] = option("tokens of one prefill pass", low=16)
    max_pause_ms: float | Literal["auto"] = option(
        "longest predicted time of a prefill pass that streams wait for, on a GPU; by default 20, or twice the time of "
        "the smallest pass",
        above=0,
    )
    busy_chunk_size: int | Literal["auto"] = option(
        "tokens of one prefill pass that streams wait for, in place of max_pause_ms", low=16
    )
    prefix_cache: bool | Literal["auto"] = option("share pages between requests with equal prompt prefixes")
    overlap: bool | Literal["auto"] = option("launch a round before the previous one's result is read")
    graph_batch: int | Literal["auto"] = option("largest batch whose rounds run as CUDA graphs; 0 for none", low=0)
    model_impl: str = option(
        "what runs the model: native for Espalier's own layers, transformers for the class of that library; by default "
        "native if there is a family for the architecture",
        choices=("native", "transformers"),
    )
    model_overrides: Mapping[str, Any] = field(
        default_factory=dict, metadata={"help": "fields of the model's config.json to replace, as JSON"}
    )
    seed: int | Literal["auto"] = option(
        "from it come the seeds of requests that have none; by default random at each start, and logged",
        low=0,
        high=2**63 - 1,
    )

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "model_overrides", dict(self.model_overrides))


class RoundCosts(Protocol):
    """Predicts the time of a round: drafting a tree for each request, and verifying it.  tree: the shape of a tree.

    The object is a plain value, so that it can be sent to another process.
    uses_clock: whether measured times correct the predictions, which must then be in seconds."""

    @property
    def uses_clock(self) -> bool: ...

    def seconds(self, tree: TreeShape, batch: int, context: float) -> float:
        """Returns the time of a round of `batch` requests.  context: the mean number of tokens that a request has."""
        ...

    def seconds_for_rows(self, tree: TreeShape, batch: int, rows: int) -> float:
        """Returns the time of a round that verifies `rows` nodes in total.  Only called if uses_clock is False."""
        ...


@dataclass(frozen=True)
class ResolvedConfig:
    """An EngineConfig without "auto": the values with which the engine runs.  For most fields, see EngineConfig.

    layout: the sizes of trees and passes.  num_pages: pages of the KV cache, including the dummy page for padding.
    num_snapshots: the most snapshots of recurrent states; 0 for a model without such states, or without a prefix cache.
    graph_batch: the largest batch whose rounds run as CUDA graphs.
    round_costs: predicts the times of rounds; None if the engine chooses no trees while it runs (tree_choice.py).
    sources: names of the sources that propose tokens beside the draft.  index_bytes: memory of the source "index"."""

    model: str
    draft: str | None
    algorithm: str
    layout: RoundLayout
    device: str
    dtype: str
    kv_dtype: str
    draft_kv_dtype: str
    threads: int
    attention: str
    draft_attention: str
    num_pages: int
    num_snapshots: int
    prefix_cache: bool
    overlap: bool
    graph_batch: int
    model_impl: str
    model_overrides: dict[str, Any]
    seed: int
    round_costs: RoundCosts | None = None
    sources: tuple[str, ...] = ()
    index_bytes: int = 0
    tensor_parallel: int = 1

    def as_dict(self) -> dict[str, Any]:
        """Returns all fields and all fields of the layout, by name, except round_costs.

        `by_batch` maps a batch size to the tree of rounds from this size on.  `choices` maps a batch size to the trees
        from which the engine chooses from this size on."""
        sizes = asdict(self.layout)
        del sizes["trees"]
        sizes["by_batch"] = {min_batch: shape.sizes for min_batch, shape in self.layout.trees}
        sizes["choices"] = dict(sizes.pop("choices"))
        values: dict[str, Any] = {}
        for f in fields(self):
            if f.name == "round_costs":
                continue
            values |= sizes if f.name == "layout" else {f.name: getattr(self, f.name)}
        return values

    def as_text(self) -> str:
        """Returns all fields as text, one per line."""
        values = self.as_dict()
        width = max(map(len, values))
        return "\n".join(f"  {name:<{width}}  {_value_text(value)}" for name, value in values.items())


def is_unresolved(value: Any) -> bool:
    """Whether startup still has to choose the value."""
    return value is None or (isinstance(value, str) and value == "auto")


def check_fields(config: Any, public_name: Callable[[str], str] = str) -> None:
    """Check every field's type and limits.  Raises EspalierError, which names field, value and supported values.

    config: an instance of a dataclass whose fields `option` made.
    public_name: returns the name of a field as the user knows it, such as the flag."""
    for f in fields(config):
        value = getattr(config, f.name)
        if not (_fits_type(value, f.type) and _is_within_limits(value, f.metadata)):
            raise EspalierError(f"{public_name(f.name)}={shown(value)} is not supported; use {supported_values(f)}")


def supported_values(f: Field) -> str:
    """Returns the supported values of a field, in words."""
    kinds = annotation_kinds(f.type)
    words = list(f.metadata.get("choices", ()))
    if not words and kinds & {int, float}:
        words.append(("a whole number" if int in kinds else "a number") + _range_text(f.metadata))
    if bool in kinds:
        words += ["True", "False"]
    if SpeculationConfig in kinds:
        words.append("a SpeculationConfig")
    if Mapping in kinds:
        words.append("a dict")
    if str in kinds and not f.metadata.get("choices"):
        words.append("text")
    if f.default == "auto":
        words.append("'auto'")
    if type(None) in kinds and int not in kinds:
        words.append("None")
    return ", ".join(words[:-1]) + " or " + words[-1] if len(words) > 1 else words[0]


def _range_text(limits: Mapping[str, Any]) -> str:
    """Returns a range in words.  limits: the keywords of `option`."""
    low, high = limits.get("low"), limits.get("high")
    if low is None:
        return f" above {limits['above']}" + ("" if high is None else f", up to {high}")
    return f", {low} or more" if high is None else f", {low} to {high}"


def annotation_kinds(annotation: Any) -> set[Any]:
    """Returns the classes and literal values of an annotation, such as {int, "auto"} for int | Literal["auto"]."""
    if get_origin(annotation) in (Union, types.UnionType):
        return set().union(*(annotation_kinds(part) for part in get_args(annotation)))
    if get_origin(annotation) is Literal:
        return set(get_args(annotation))
    return {get_origin(annotation) or annotation}


def _fits_type(value: Any, annotation: Any) -> bool:
    """Whether a field's value has the type of its annotation, such as int | Literal["auto"]."""
    kinds = annotation_kinds(annotation)
    if isinstance(value, bool):
        return bool in kinds
    if isinstance(value, str):
        return str in kinds or value in kinds
    if isinstance(value, int) and float in kinds:
        return True
    return any(isinstance(value, kind) for kind in kinds if isinstance(kind, type))


def _is_within_limits(value: Any, limits: Mapping[str, Any]) -> bool:
    """Whether a field's value is within the limits that `option` describes."""
    if is_unresolved(value):
        return True
    if "choices" in limits:
        return value in limits["choices"]
    if isinstance(value, int | float):
        inside = limits.get("low", value) <= value <= limits.get("high", value)
        return inside and limits.get("above", -math.inf) < value < math.inf
    return value != ""


def _value_text(value: Any) -> str:
    if isinstance(value, dict):
        return json.dumps(value) if value else "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ", ".join(value) or "none"
    return "none" if value is None else str(value)
