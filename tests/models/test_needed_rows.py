"""A model that is asked for some rows returns what it returns for them among all rows, and keeps what it keeps."""

from typing import Any

import pytest
import torch
from torch import Tensor

from espalier.models import load_target, read_config
from espalier.speculate.drafters.registry import load_draft
from tests.harness import directories, models
from tests.mtp import mtp_directories
from tests.oracles.dense import DensePass
from tests.pairwise import in_turn_params

BATCH, WIDTH = 3, 7
# Of each request.
NEEDED = torch.tensor([6, 0, 3])
LOADING: dict[str, Any] = {"dtype": torch.float64, "device": "cpu", "position_rows": WIDTH}
FAMILIES = ("llama", "gpt_oss", "qwen3_moe", "deepseek_v3", "glm_moe_dsa", "gemma4_moe", "gemma4_e")
HOSTED = [(family, "transformers") for family in ("llama", "gpt_oss", "phi3")]


def rows_of_input() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 16, (BATCH, WIDTH), generator=torch.Generator().manual_seed(0))
    return tokens, torch.arange(WIDTH).repeat(BATCH, 1)


def require_same(some: Tensor, whole: Tensor) -> None:
    torch.testing.assert_close(some, whole[torch.arange(BATCH), NEEDED][:, None], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("cell", "captures_last"),
    in_turn_params([*((family, "native") for family in FAMILIES), *HOSTED], [False, True]),
)
def test_a_target(cell: tuple[str, str], captures_last: bool) -> None:
    family, model_impl = cell
    path, _ = directories(family)
    capture = 1, read_config(path).num_layers if captures_last else 2
    target = load_target(path, captured_layers=capture, model_impl=model_impl, **LOADING)
    tokens, positions = rows_of_input()
    whole_pass = DensePass(tokens, target.layer_specs, positions)
    pass_of_some = DensePass(tokens, target.layer_specs, positions, needed=NEEDED)
    whole, some = target(whole_pass), target(pass_of_some)
    require_same(some.hidden, whole.hidden)
    assert torch.equal(some.captured_inputs[0], whole.captured_inputs[0])
    # The input of the final norm has the rows of the output.
    (require_same if captures_last else torch.testing.assert_close)(some.captured_inputs[1], whole.captured_inputs[1])
    for kept, expected in zip(pass_of_some.planes.values(), whole_pass.planes.values(), strict=True):
        assert all(torch.equal(plane, other) for plane, other in zip(kept, expected, strict=True))


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_an_eagle3_head(family: str) -> None:
    _, draft = models(family)
    assert draft is not None
    require_draft(draft, draft.modules[0])


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "deepseek_v32", "glm4_moe"])
def test_an_mtp_layer(family: str) -> None:
    target_path, draft_path = mtp_directories(family, 1)
    draft = load_draft(draft_path, load_target(target_path, **LOADING), **LOADING)
    require_draft(draft, draft.modules[0])


def require_draft(draft: Any, module: Any) -> None:
    tokens, positions = rows_of_input()
    size = (BATCH, WIDTH, draft.spec.hidden_size)
    hidden = torch.randn(size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    whole = module(DensePass(tokens, draft.layer_specs, positions), hidden)
    some = module(DensePass(tokens, draft.layer_specs, positions, needed=NEEDED), hidden)
    require_same(some.hidden, whole.hidden)
    require_same(some.normed, whole.normed)
