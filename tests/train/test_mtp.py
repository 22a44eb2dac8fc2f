"""MTP heads: every depth against rows run one by one, what each layer learns from, the file, and a text that is learnt.

The plain rows are written from the form's description alone: a row is filed under its token q, layer k reads the
target's hidden state at q - k or layer k - 1's output at q - 1.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from espalier.train.command import make_parser
from espalier.train.configs import read_draft_kind
from espalier.train.data import UserText
from espalier.train.kinds import MTP, measure, train
from espalier.train.llama import LlamaShape, rope_tables, rotate
from espalier.train.mtp import agreement_by_depth, matches_by_depth
from espalier.train.mtp_checkpoint import load_mtp, save_mtp
from espalier.train.mtp_head import MtpHead, MtpLayer, mtp_loss
from espalier.train.settings import MtpConfig
from espalier.train.target import FrozenTarget
from lab.bundle.llama import Llama, save_llama

SHAPE = LlamaShape(
    vocab_size=24,
    hidden_size=12,
    intermediate_size=20,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
)
TOKENS = 13

forms = pytest.mark.parametrize("form", ["chain", "target"])


def a_head(form: str, num_layers: int = 3) -> MtpHead:
    torch.manual_seed(0)
    head = MtpHead(replace(SHAPE, num_hidden_layers=num_layers), form).double()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return head


def inputs() -> tuple[Tensor, Tensor]:
    """(embeddings, the target's hidden states) of tokens 0 .. TOKENS - 1: [TOKENS, H]."""
    torch.manual_seed(1)
    return torch.randn(TOKENS, 12).double(), torch.randn(TOKENS, 12).double()


def plain_row(layer: MtpLayer, rows: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The output of the last of a layer's rows, each (embedding, hidden state), with every key from scratch."""
    keys, values, attention = [], [], layer.self_attn
    for position, (embed, hidden) in enumerate(rows):
        x = layer.input_proj(torch.cat((layer.token_layernorm(embed), layer.hidden_layernorm(hidden))))
        normed = layer.input_layernorm(x)
        tables = rope_tables(torch.tensor([position]), 6, SHAPE.rope_theta)
        q = rotate(attention.q_proj(normed).view(4, 6), *tables)
        keys.append(rotate(attention.k_proj(normed).view(2, 6), *tables))
        values.append(attention.v_proj(normed).view(2, 6))
    heads = []
    for head in range(4):
        k, v = torch.stack(keys)[:, head // 2], torch.stack(values)[:, head // 2]
        heads.append(((k @ q[head]) / 6**0.5).softmax(0) @ v)
    x = x + attention.o_proj(torch.cat(heads))
    return layer.final_layernorm(x + layer.mlp(layer.post_attention_layernorm(x)))


def plain_outputs(head: MtpHead, embeds: Tensor, hidden: Tensor) -> list[dict[int, Tensor]]:
    """The rows of each layer by their token q; layer k has rows from q = k."""
    outputs: list[dict[int, Tensor]] = []
    before = dict(enumerate(hidden))
    for k, layer in enumerate(head.layers, 1):
        reads = {q: hidden[q - k] if head.form == "target" else before[q - 1] for q in range(k, TOKENS)}
        rows = [(embeds[q], reads[q]) for q in reads]
        outputs.append({q: plain_row(layer, rows[: i + 1]) for i, q in enumerate(reads)})
        before = outputs[-1]
    return outputs


@forms
def test_every_depth_equals_rows_run_one_by_one(form: str) -> None:
    head, (embeds, hidden) = a_head(form), inputs()
    unrolled = head.unroll(embeds[None, 1:], hidden[None, :-1], 3)
    for k, (output, plain) in enumerate(zip(unrolled, plain_outputs(head, embeds, hidden), strict=True), 1):
        assert output.shape == (1, TOKENS - k, 12)
        torch.testing.assert_close(output[0], torch.stack([plain[q] for q in range(k, TOKENS)]), rtol=1e-5, atol=1e-5)


@forms
@pytest.mark.parametrize("num_layers", [1, 2])
def test_depths_beyond_the_layers_run_the_last_one_on_its_own_output(form: str, num_layers: int) -> None:
    head, (embeds, hidden) = a_head(form, num_layers), inputs()
    unrolled = head.unroll(embeds[None, 1:], hidden[None, :-1], num_layers + 3)
    plain = plain_outputs(head, embeds, hidden)[-1]
    before = dict(enumerate(hidden)) if num_layers == 1 else plain_outputs(head, embeds, hidden)[-2]
    reads = {q: before[q - 1] if form == "chain" else hidden[q - num_layers] for q in range(num_layers, TOKENS)}
    for start in range(num_layers, TOKENS - 3):
        rows = [(embeds[q], reads[q]) for q in range(num_layers, start + 1)]
        output = plain[start]
        for more in range(1, 4):
            rows.append((embeds[start + more], output))
            output = plain_row(head.layers[-1], rows)
            got = unrolled[num_layers - 1 + more][0, start - num_layers]
            torch.testing.assert_close(got, output, rtol=1e-5, atol=1e-5)


@forms
def test_a_loss_at_one_depth_reaches_the_layers_that_feed_it(form: str) -> None:
    """In a chain all layers up to that depth; in the target form that layer alone."""
    for depth in (1, 2, 3):
        head, (embeds, hidden) = a_head(form), inputs()
        head.unroll(embeds[None, 1:], hidden[None, :-1], 3)[depth - 1].square().sum().backward()
        learns = [all(p.grad is not None and p.grad.any() for p in layer.parameters()) for layer in head.layers]
        none = [all(p.grad is None for p in layer.parameters()) for layer in head.layers]
        assert learns == [i < depth if form == "chain" else i == depth - 1 for i in range(3)]
        assert none == [not learn for learn in learns]


@forms
def test_the_loss_is_that_of_the_token_after_each_row(form: str) -> None:
    """Layer k's row of token q learns the target's distribution at q, so a target whose pick at q is that row's own
    agrees at every depth."""
    head, (embeds, hidden) = a_head(form), inputs()
    lm_head = torch.randn(24, 12).double()
    for depth, plain in enumerate(plain_outputs(head, embeds, hidden), 1):
        logits = torch.zeros(TOKENS, 24).double()
        for q, output in plain.items():
            logits[q] = lm_head @ output
        loss, agreement = mtp_loss(
            head,
            lm_head,
            embeds[None, 1:],
            hidden[None, :-1],
            logits[None, 1:],
            torch.ones(1, TOKENS - 1).bool(),
            3,
            0.5,
        )
        assert agreement[depth - 1] == 1
        assert agreement.lt(1).sum() == 2
        assert loss > 0


TINY = replace(SHAPE, vocab_size=16, hidden_size=32, intermediate_size=32, head_dim=8, num_hidden_layers=1)
CONFIG = MtpConfig(
    length=24,
    batch=8,
    num_tokens=45 * 8 * 24,
    own_share=0.0,
    continuations=4,
    continuation_tokens=4,
    generate_batch=4,
    log_every=15,
    layers=2,
    ttt_steps=3,
    matrix_lr=0.02,
)


def cycle(length: int, start: int = 0) -> np.ndarray:
    """Text in which t is followed by t + 5: a ring through all 16 tokens."""
    return ((np.arange(length) * 5 + start) % 16).astype(np.uint16)


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of one layer that has learnt to continue every token t by t + 5."""
    torch.manual_seed(0)
    model = Llama(TINY)
    directory = tmp_path_factory.mktemp("mtp") / "target"
    batch = torch.from_numpy(cycle(33 * 8).astype(np.int64)).view(8, 33)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        loss = model(batch[:, :-1], batch[:, 1:]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    save_llama(model, directory, [0])
    return directory


@forms
def test_a_trained_head_predicts_a_chain_text_at_every_depth(form: str, target_dir: Path, tmp_path: Path) -> None:
    config = replace(CONFIG, form=form)
    train("mtp", target_dir, UserText(cycle(3000)), tmp_path / "head", tmp_path / "work", config)
    head, target = load_mtp(tmp_path / "head"), FrozenTarget(target_dir, torch.device("cpu"))
    text = cycle(40, start=3)
    found = matches_by_depth(head, target, torch.from_numpy(text.astype(np.int64)), 4, 3)
    assert found.shape == (3, 33) and found.all()
    assert agreement_by_depth(head, target, [text], [4], 3) == [1.0, 1.0, 1.0]
    assert measure(MTP, head, target, [text], [4], (3, 1, 4)).every_root == 4.0


@pytest.mark.parametrize("num_layers", [1, 3])
def test_the_file_has_exactly_the_names_of_the_form(num_layers: int, target_dir: Path, tmp_path: Path) -> None:
    head = a_head("target", num_layers).float()
    save_mtp(head, target_dir, tmp_path)
    names = ["token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", "input_layernorm"]
    names += ["post_attention_layernorm", *(f"self_attn.{p}_proj" for p in "qkvo")]
    names += [f"mlp.{p}_proj" for p in ("gate", "up", "down")]
    with safe_open(tmp_path / "model.safetensors", "pt") as weights:
        assert set(weights.keys()) == {f"mtp_layers.{i}.{n}.weight" for i in range(num_layers) for n in names}
        assert weights.get_tensor("mtp_layers.0.input_proj.weight").shape == (12, 24)
        assert weights.get_tensor("mtp_layers.0.self_attn.q_proj.weight").shape == (24, 12)
    config = json.loads((tmp_path / "config.json").read_text())
    layer = config.pop("transformer_layer_config")
    assert (config["speculators_model_type"], config["num_nextn_predict_layers"]) == ("mtp", num_layers)
    assert config["mtp_form"] == "target"
    verifier = {"architectures": ["LlamaForCausalLM"], "name_or_path": str(target_dir)}
    assert config["speculators_config"]["verifier"] == verifier
    assert (layer["model_type"], layer["hidden_size"], layer["vocab_size"]) == ("llama", 12, 24)
    assert layer["rope_parameters"] == {"rope_theta": 10000.0, "rope_type": "default"} and "rope_theta" not in layer
    again = load_mtp(tmp_path)
    assert read_draft_kind(tmp_path) == "mtp" and again.form == "target" and again.shape == head.shape
    for one, two in zip(again.parameters(), head.parameters(), strict=True):
        assert torch.equal(one, two.bfloat16().float())


def test_settings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="--layers=4 is more than --ttt-steps 3"):
        MtpConfig(layers=4)
    with pytest.raises(ValueError, match="--form='tree' is not supported; use chain or target"):
        MtpConfig(form="tree")  # type: ignore[arg-type]


def test_the_command_has_a_flag_for_each_setting(capsys: pytest.CaptureFixture[str]) -> None:
    paths = ["mtp", "--target", "t", "--data", "d", "--out", "o"]
    arguments = make_parser().parse_args([*paths, "--layers", "3", "--form", "target"])
    assert (arguments.layers, arguments.form, arguments.ttt_steps) == (3, "target", 3)
    with pytest.raises(SystemExit):
        make_parser().parse_args([*paths, "--form", "tree"])
    assert "invalid choice: 'tree'" in capsys.readouterr().err
