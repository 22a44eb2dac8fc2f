"""Block drafts give what the code that defines their forms gives (tests/fixtures/block); other forms are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.tree.edges import DepthRows, LowRankEdges
from espalier.models import read_config
from espalier.models.block import BlockDraft
from espalier.speculate.drafters.registry import read_draft
from tests.block import block_directories, make_block_draft
from tests.checkpoints import load_pair
from tests.oracles.dense import DensePass

FIXTURES = Path(__file__).parents[1] / "fixtures" / "block"
ORIGIN: dict[str, Any] = json.loads((FIXTURES / "origin.json").read_text())
LOADING = {"dtype": torch.float32, "device": "cpu", "position_rows": 64}
TOLERANCE = 1e-4


class OverContext(DensePass):
    """The rows of a block behind context rows.  causal: of each layer."""

    def __init__(
        self, draft: BlockDraft, tokens: Tensor, positions: Tensor, context: list[tuple[Tensor, Tensor]]
    ) -> None:
        super().__init__(tokens, draft.layer_specs, positions, past=context)
        self.causal, self.windows_end_at_root = draft.spec.is_causal_layer, draft.spec.windows_end_at_root

    def seen(self, layer: int, rows: int, columns: int) -> Tensor:
        behind, window = columns - rows, self.specs[layer].window
        seen = torch.ones(1, rows, columns, dtype=torch.bool)
        if window is not None:
            # Seen from the root, or from each row: the window holds it and the window - 1 rows before it.
            at = behind + torch.arange(rows) * (not self.windows_end_at_root)
            seen &= at[:, None] - torch.arange(columns) < window
        return seen.tril(behind) if self.causal[layer] else seen


def context_planes(draft: BlockDraft, captured: Tensor, first: int) -> list[tuple[Tensor, ...]]:
    """K and V of the context rows of tokens first, first + 1, ...: captured [1, n, F]."""
    positions = torch.arange(first, first + captured.shape[1])[None]
    p = DensePass(torch.zeros_like(positions), draft.layer_specs, positions)
    draft.write_context(captured, p)
    return [tuple(plane[0] for plane in planes) for planes in p.planes.values()]


def two_rounds(draft: BlockDraft, expected: dict[str, Tensor]) -> dict[str, Tensor]:
    made: dict[str, Tensor] = {}
    tokens, captured = expected["tokens"], expected["captured"]
    context: list[tuple[Tensor, Tensor]] = []
    for number, anchor in enumerate(ORIGIN["anchors"]):
        seen = context[0][0].shape[0] if context else 0
        added = context_planes(draft, captured[:, seen:anchor], seen)
        context = [
            tuple(torch.cat(pair) for pair in zip(old, new, strict=True))  # type: ignore[misc]
            for old, new in zip(context or [(k[:0], v[:0]) for k, v in added], added, strict=True)
        ]
        block = torch.full((1, draft.spec.block_rows), draft.spec.mask_token_id)
        block[0, 0] = tokens[0, anchor]
        positions = anchor + torch.arange(draft.spec.block_rows)[None]
        hidden = draft(OverContext(draft, block, positions, context))[:, draft.spec.first_proposing_row :]
        logits = draft.block_logits(hidden)
        made[f"logits.{number}"] = logits[0]
        if draft.edge_scorer is not None:
            made[f"edged.{number}"] = along(draft.edge_scorer.score_edges(logits, hidden), expected[f"before.{number}"])
    return made


def along(edges: LowRankEdges, before: Tensor) -> Tensor:
    """[S, draft vocabulary]: the logits with edges along one path.  before: [S], the token before each depth."""
    rows, logits = DepthRows.for_roots(before[:1]), []
    for depth, token in enumerate(before):
        factors, states = edges.factors(depth, rows._replace(tokens=token.view(1, 1)))
        logits.append(edges.logits(depth, factors)[0, 0])
        rows = rows._replace(parents=torch.zeros(1, 1, dtype=torch.int64), states=states)
    return torch.stack(logits)


def difference(ours: Tensor, expected: Tensor) -> float:
    """The largest; nowhere, if other tokens than expected have no score."""
    finite = expected.isfinite()
    return (ours - expected)[finite].abs().max().item() if torch.equal(finite, ours.isfinite()) else torch.inf


def load(path: Path) -> tuple[Any, Any]:
    return load_pair(FIXTURES / "target", path, **LOADING)


def test_every_case_agrees(record_property: Any) -> None:
    worst = {}
    for name in ORIGIN["cases"]:
        target, draft = load(FIXTURES / name)
        expected = load_file(FIXTURES / name / "expected.safetensors")
        assert list(draft.spec.captured_layers) == expected["ids"].tolist()
        positions = torch.arange(expected["tokens"].shape[1])[None]
        captured = target(DensePass(expected["tokens"], target.layer_specs, positions)).captured
        torch.testing.assert_close(captured, expected["captured"], rtol=TOLERANCE, atol=TOLERANCE)
        ours = two_rounds(draft, expected)
        assert ours.keys() == {key for key in expected if key.startswith(("logits", "edged"))}
        # z-lab's selector says probabilities of its candidates only.
        scores = {key: value.log_softmax(-1) if "edged" in key else value for key, value in expected.items()}
        worst[name] = max(
            difference(value.log_softmax(-1) if "edged" in key else value, scores[key]) for key, value in ours.items()
        )
    print(f"\n{len(worst)} cases of two rounds, largest difference {max(worst.values()):.1e}")
    record_property("largest_difference", max(worst.values()))
    assert len(worst) == 26
    assert max(worst.values()) < TOLERANCE, worst


def test_fields_of_dflash2_may_stand_at_the_top_level(tmp_path: Path) -> None:
    target_path, path = block_directories("llama", "dflash2", 8)
    target, config = read_config(target_path), json.loads((path / "config.json").read_text())
    own = config.pop("dflash_config")
    assert own["final_logit_softcapping"] == 6.0
    (tmp_path / "config.json").write_text(json.dumps({**config, **own}))
    assert read_draft(tmp_path, target).logit_cap == read_draft(path, target).logit_cap == 6.0
    assert read_draft(tmp_path, target).spec == read_draft(path, target).spec
    without = {**config, **own, "input_embedding_scale": None, "output_multiplier": None}
    (tmp_path / "config.json").write_text(json.dumps(without))
    assert (read_draft(tmp_path, target).embedding_scale, read_draft(tmp_path, target).logit_scale) == (1, 1)


def test_a_confidence_head_is_named_as_not_used(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    load(FIXTURES / "deepspec_confidence")
    assert "its confidence head is not used" in caplog.text


def of_dflash2(**fields: Any) -> dict[str, Any]:
    own = {"target_layer_ids": [0, 1], "mask_token_id": 3, "block_size": 4, "conv_kernel_size": 2}
    return {"dflash_config": {**own, "conv_group_size": 8, "selector_rank": 5, "selector_top_k": 6, **fields}}


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "XPress": ("speculators", {"speculators_model_type": "xpress"}, "XPress. is not supported yet"),
    "Gemma 4": ("dspark", {"architectures": ["Gemma4DSparkModel"]}, "DSpark with Gemma 4's layers. is not supported"),
    "edges of another kind": (
        "dspark",
        {"markov_head_type": "fir"},
        "markov_head_type = 'fir' is not supported; use a draft whose Markov head is one of vanilla, gated, rnn",
    ),
    "a state from before depth 1": (
        "speculators",
        {"markov_head_type": "rnn", "sample_from_anchor": False},
        "markov_head_type = 'rnn' with sample_from_anchor = False is not supported",
    ),
    "z-lab's window": (
        "dflash",
        {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True, "sliding_window": 8},
        "in speculators' form only",
    ),
    "z-lab's causality": ("dflash", {"is_causal": True}, "is_causal = True is not supported in this form"),
    "a field of dflash_config": (
        "dflash",
        {"dflash_config": {"target_layer_ids": [0], "mask_token_id": 3, "use_swa": True}},
        "dflash_config has use_swa = True, which is not supported; supported fields are target_layer_ids",
    ),
    "shifted slots": (
        "jetspec",
        {"dflash_config": {"target_layer_ids": [0], "mask_token_id": 3, "draft_shift": True}},
        "draft_shift = True",
    ),
    "another hidden size": (
        "jetspec",
        {"dflash_config": {"target_layer_ids": [0], "mask_token_id": 3, "target_hidden_size": 64}},
        "target_hidden_size = 64 differs",
    ),
    "other layers": ("dflash", {"model_type": "llama"}, "layers of model_type 'llama' are not supported"),
    "no mask": ("dspark", {"mask_token_id": None}, "mask_token_id = None; a token of the vocabulary"),
    "a mask outside": ("dspark", {"mask_token_id": 16}, "mask_token_id = 16"),
    "no layers named": ("dspark", {"target_layer_ids": None}, "target_layer_ids = None; a list"),
    "the last layer": ("dspark", {"target_layer_ids": [0, 2]}, "fuses the input of layer 3"),
    "no block": ("dflash", {"block_size": 1}, "block_size = 1; an integer of at least 2"),
    "DFlash 2's other fields": ("dflash2", of_dflash2(use_swa=True), "has use_swa = True, which is not supported"),
    "DFlash 2 without a size": (
        "dflash2",
        of_dflash2(selector_rank=None),
        "selector_rank = None; an integer of at least 1",
    ),
    "groups that do not divide": ("dflash2", of_dflash2(conv_group_size=5), "conv_group_size = 5 does not divide"),
    "taps behind the block": (
        "dflash2",
        of_dflash2(conv_kernel_size=5),
        "conv_kernel_size = 5 is above block_size = 4",
    ),
    "more candidates than tokens": ("dflash2", of_dflash2(selector_top_k=17), "selector_top_k = 17 is above"),
    "a window within the block": ("dflash2", {"sliding_window": 3}, "sliding_window = 3 is below block_size = 4"),
    "a scale that is no number": ("dflash2", of_dflash2(output_multiplier="x"), "output_multiplier = 'x'; a number"),
    "layers that are no list": ("dspark", {"target_layer_ids": 3}, "target_layer_ids = 3; a list"),
    "fields that are no object": ("dflash", {"dflash_config": 3}, "dflash_config = 3; an object is needed"),
    "a rank that is no number": ("dspark", {"markov_rank": "x"}, "markov_rank = 'x'; an integer of at least 0"),
    "another vocabulary": ("dflash", {"vocab_size": 20}, "vocabulary 20, the target has 16"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_built_is_refused_by_name(name, tmp_path):
    form, fields, text = REFUSED[name]
    target, _ = block_directories("llama", "dflash", 4)
    draft = make_block_draft(tmp_path / "draft", target, form, **{"block_size": 4, **fields})
    with pytest.raises(EspalierError, match=text):
        read_draft(draft, read_config(target))


def read_changed(name: str, tmp_path: Path, **fields: Any) -> Any:
    """The config of a fixture with these fields; None: without the field."""
    raw = json.loads((FIXTURES / name / "config.json").read_text())
    kept = {key: value for key, value in {**raw, **fields}.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(kept))
    return read_draft(tmp_path, read_config(FIXTURES / "target"))


def test_dflash2_of_speculators_has_defaults_and_no_reduced_vocabulary(tmp_path):
    """Sliding layers are not causal, where DFlash's are; sizes are the package's."""
    unsaid = dict.fromkeys(("sliding_window_non_causal", "conv_group_size", "selector_top_k"))
    config = read_changed("speculators_dflash2_slides", tmp_path, **unsaid)
    assert (config.spec.is_causal_layer, config.conv_group, config.selector_topk) == ((False, False), 16, 16)
    assert read_changed("speculators_slides", tmp_path, sliding_window_non_causal=None).spec.is_causal_layer == (
        True,
        False,
    )
    with pytest.raises(EspalierError, match="draft_vocab_size = 10 is not the vocabulary of 24"):
        read_changed("speculators_dflash2", tmp_path, draft_vocab_size=10)


def test_a_mask_that_is_no_token_is_refused(tmp_path):
    target, _ = block_directories("llama", "dflash", 4)
    draft = make_block_draft(tmp_path / "draft", target, "dflash", 4)
    (draft / "mask_embedding.pt").touch()
    with pytest.raises(EspalierError, match="a mask that is no token"):
        read_draft(draft, read_config(target))


def test_k_and_v_projections_are_held_once():
    """Context rows and block rows are multiplied with the same memory."""
    target_path, draft_path = block_directories("llama", "dspark", 4)
    how = {**LOADING, "dtype": torch.float64}
    _, draft = load_pair(target_path, draft_path, **how)
    for layer, context in zip(draft.layers, draft.context_kv, strict=True):
        whole = layer.attention.qkv.weight.tensor
        assert context.weight.tensor.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        assert context.shape == (32, 32) and torch.equal(context.weight.tensor, whole[32:])


def test_a_draft_without_a_markov_head_may_have_any_type_of_it(tmp_path):
    target, _ = block_directories("llama", "dspark", 5)
    path = make_block_draft(tmp_path / "draft", target, "dspark", 5, markov_rank=0, markov_head_type=None)
    config = read_draft(path, read_config(target))
    assert (config.markov_rank, config.markov_head_type) == (0, "vanilla")
