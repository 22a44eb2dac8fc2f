"""Loads a model of transformers from its directory, with transformers' own loader.  A checkpoint's code never runs."""

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from espalier.errors import EspalierError, one_line
from espalier.models.config import ModelConfig
from espalier.models.from_transformers.attention import NAME
from espalier.models.from_transformers.target import Body, TransformersTarget
from espalier.models.weight_files import stored_weights
from espalier.models.weights import HARMLESS, Weights

log = logging.getLogger(__name__)


def load_by_transformers(
    path: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device | str, capture: tuple[int, ...]
) -> TransformersTarget:
    """Load a target whose config is `probed`.

    Raises EspalierError for files that are missing or cut short, weights that are missing, misshapen or not used, and
    layers that cannot be captured.
    """
    probed = config.probed
    assert probed is not None
    if capture and not probed.can_capture:
        raise EspalierError(
            f"{path}: the layers of {config.architecture} do not pass on one row for each token, so the draft cannot "
            "read them; use speculation algorithm 'ngram'"
        )
    Weights(path, dtype, "cpu")  # for its errors, which name file and remedy
    stored = stored_weights(path, config.formats).num_cast
    # Weights that are missing would take memory before they are found to be.
    if probed.num_weights > 2 * stored:
        raise EspalierError(
            f"{path}: config.json describes {probed.num_weights} weights, and the files hold {stored}; they do not "
            "belong together: download both again"
        )
    return made_by_transformers(config, dtype, torch.device(device), capture)


def made_by_transformers(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    capture: tuple[int, ...],
    state: Mapping[str, Tensor] | None = None,
) -> TransformersTarget:
    """state: the weights by name, which replace the weights in the config's directory."""
    probed = config.probed
    assert probed is not None
    # If accelerate is not installed, a model is loaded into host memory first and then moved to the GPU.
    direct = {"device_map": {"": device}} if device.type != "cpu" and find_spec("accelerate") else {}
    try:
        with _without_progress_bars():
            model, found = probed.model_class.from_pretrained(
                None if state else config.path,
                config=copy.deepcopy(probed.config),
                state_dict=state,
                dtype=dtype,
                attn_implementation=NAME,
                experts_implementation=experts_implementation(probed.model_class, device),
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
                trust_remote_code=False,
                **direct,
            )
    except Exception as error:  # any: it is another's code
        raise EspalierError(
            f"{config.path}: transformers cannot load the model ({one_line(error)}); download the checkpoint again"
        ) from None
    _require_all(found, config)
    body = Body(model.to(device).eval().requires_grad_(False), probed.layers, probed.equal, capture)
    log.info("%s runs by transformers; replaced by ours: %s", config.architecture, probed.in_words)
    return TransformersTarget(config, body, capture)


def _require_all(found: Mapping[str, Any], config: ModelConfig) -> None:
    """Raise EspalierError for weights that are missing or not used, by what from_pretrained found."""
    unused = [name for name in found["unexpected_keys"] if not HARMLESS.search(name)]
    for names, what in ((found["missing_keys"], "is missing from it"), (unused, "belongs to no parameter")):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise EspalierError(
                f"{config.path}: weight {min(names)!r}{more} {what} of {config.architecture}; config.json and weights "
                "do not belong together: download both again"
            )


def experts_implementation(model_class: Any, device: torch.device) -> str:
    """How transformers computes experts.  It refuses a choice for classes that have none."""
    # The plain loop reads the experts' rows on the host, which a captured pass cannot.
    on_device = device.type != "cpu" and model_class._can_set_experts_implementation()
    return "grouped_mm" if on_device else "eager"


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Turns transformers' progress bars off, which would disturb our log."""
    from transformers.utils import logging as bars

    was = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if was:
            bars.enable_progress_bar()
