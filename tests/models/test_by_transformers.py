"""Models that classes of transformers run: the logits of plain transformers, and refusals by what a class does."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    Gemma3nTextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextMLP
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.phi3.modeling_phi3 import Phi3MLP, Phi3RMSNorm

from espalier.errors import EspalierError
from espalier.models import load_target, read_config
from espalier.models.from_transformers import probe as probe_module
from espalier.models.from_transformers.probe import probe_tiny_model, tiny_config, tiny_model
from espalier.models.from_transformers.target import StackedLinears, TransformersTarget
from scripts.any_model import ClassResult, compare, make_model
from scripts.any_model import main as any_model
from tests.builders import make_target
from tests.checkpoints import edit_config
from tests.harness import directories
from tests.models.reference import load_reference, reference_logits
from tests.oracles.dense import DensePass
from tests.pairwise import in_turn_params

LENGTH = 12
LOADING: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "position_rows": 64, "model_impl": "transformers"}
# Of different make: learned positions and matrices the other way round; keys wider than values.
SAMPLE = ("gpt2", "deepseek_v3")
# Parallel blocks and a factor of the logits; experts; windows and shared rows by layer; sinks.  Other tests here
# run the second and the third, and those of layouts the fourth.
MORE = ("cohere2", "mixtral", "gemma3n_text", "gpt_oss")
# It has what may differ by class: rounds of a tree with captured layers, and prefixes behind preemption.
ONE_RUN = {"preempted": (3,)}


@pytest.mark.parametrize("name", [*SAMPLE, *(pytest.param(name, marks=pytest.mark.full) for name in MORE)])
def test_a_class_runs_as_transformers_runs_it(name: str, tmp_path: Path) -> None:
    make_model(tmp_path / name, name)
    result = compare(ClassResult(name, name, "transformers"), tmp_path / name, tmp_path, ONE_RUN)
    assert result.compared_tokens.total() and result.is_correct, result.describe()


@pytest.mark.full
def test_every_class(capsys: pytest.CaptureFixture[str]) -> None:
    assert any_model([]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert int(last.split(" by transformers")[0].split()[-1]) >= 60


def made(path: Path, kind: str, **fields: Any) -> Path:
    """A config.json alone, of a tiny model: refusals come before weights are read."""
    config = tiny_config(CONFIG_MAPPING[kind]())
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({**config.to_dict(), "architectures": None, **fields}))
    return path


@pytest.mark.parametrize(
    ("kind", "fields", "says"),
    [
        ("recurrent_gemma", {}, "keeps recurrent state"),
        ("minimax", {}, "its layer 1 (MiniMaxDecoderLayer) keeps no K and V: it has recurrent state or no attention"),
        ("bloom", {}, "its attention does not go through transformers' AttentionInterface"),
        ("bart", {"is_encoder_decoder": True}, "it is half of an encoder-decoder"),
        ("doge", {}, "its attention has a mask of its own, which may be not causal"),
        ("diffllama", {}, "its layers do not attend once each, in the order of one list"),
        ("llama4_text", {}, "its rows do not see just the rows before them"),
        ("bert", {}, "its rows do not see just the rows before them"),
        ("jetmoe", {}, "it reads values on the host, which no captured pass can"),
        ("phi3", {"num_hidden_layers": 10**9}, "it has 1000000000 layers; 1 to 1024 are supported"),
        ("phi3", {"hidden_size": 63}, "with this config it does not run"),
        ("phi3", {"max_position_embeddings": None}, "its config is refused"),
        ("phi3", {"quantization_config": {"quant_method": "fp8"}}, "quantised weights are not supported"),
        ("phi3", {"architectures": ["Other"]}, "'Other' is not transformers' causal model of model_type 'phi3'"),
        ("nobody", {}, "'nobody' is not transformers' causal model of model_type 'nobody'"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_what_cannot_run_is_refused_before_weights_are_read(
    kind: str, fields: Mapping[str, Any], says: str, tmp_path: Path
) -> None:
    if kind == "nobody":
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    else:
        made(tmp_path, kind, **fields)
    with pytest.raises(EspalierError) as caught:
        read_config(tmp_path, model_impl="transformers")
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_auto_prefers_a_native_family(tmp_path: Path) -> None:
    llama, starcoder2 = directories("llama")[0], directories("starcoder2")[0]
    assert read_config(llama).probe_result is None
    assert read_config(llama, model_impl="transformers").probe_result is not None
    assert read_config(starcoder2).probe_result is not None
    with pytest.raises(EspalierError, match=r"'Starcoder2ForCausalLM' is not supported; supported are Llama"):
        read_config(starcoder2, model_impl="native")


@pytest.mark.parametrize(
    ("kind", "heads", "kv_heads", "size"),
    [
        ("olmo", 1, 1, 8),
        pytest.param("olmo", 2, 2, 20, marks=pytest.mark.full),
        ("olmo", 3, 3, 10),
        # A class that computes a head's size from the config's other sizes, and one that rotates half of a head.
        ("helium", 5, 1, 6),
        ("arcee", 5, 1, 10),
        ("phi", 4, 2, 10),
        pytest.param("biogpt", 5, 5, 10, marks=pytest.mark.full),
    ],
)
def test_few_heads_and_small_ones_are_no_reason_to_refuse(kind: str, heads: int, kv_heads: int, size: int) -> None:
    """What a class derives from several sizes fits in the small model too."""
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": heads * size}
    config = CONFIG_MAPPING[kind](**sizes, **({"head_dim": size} if kind == "helium" else {}))
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    probe_tiny_model(tiny_model(model_class, tiny_config(config)))


@pytest.mark.parametrize(
    ("family", "captures_last"), in_turn_params(["llama", "gemma3", "phi3", "starcoder2"], [False, True])
)
def test_logits_and_captured_inputs(family: str, captures_last: bool) -> None:
    path, _ = directories(family)
    capture = (3, 0) if captures_last else (2, 0)
    model = load_target(path, captured_layers=capture, **LOADING)
    tokens = torch.randint(0, 16, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(LENGTH).expand(2, -1)
    out = model(DensePass(tokens, model.layer_specs, positions))
    assert out.captured is not None
    logits, inputs = reference_logits(load_reference(path, torch.float32), tokens)
    torch.testing.assert_close(model.logits(out.hidden), logits, rtol=1e-4, atol=1e-4)
    # The last that transformers gives is behind the norm, where ours is before it.
    for i, ours in zip(capture, out.captured_inputs, strict=True):
        if i < 3:
            torch.testing.assert_close(ours, inputs[i], rtol=1e-4, atol=1e-4)
        else:
            normed = model.model.model.norm(ours)  # type: ignore[attr-defined]
            torch.testing.assert_close(normed, out.hidden, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "phi3", "starcoder2"])
def test_void_rows_run_as_the_first_of_their_request(family: str) -> None:
    model = load_target(directories(family)[0], **LOADING)
    tokens = torch.tensor([[5, -1, 7], [-1, 3, -1]])
    filled = torch.tensor([[5, 5, 7], [0, 3, 0]])
    void, plain = (model(DensePass(each, model.layer_specs)) for each in (tokens, filled))
    assert torch.equal(void.hidden, plain.hidden)


def test_void_rows_go_to_no_expert(tmp_path: Path) -> None:
    make_model(tmp_path, "mixtral")
    model = load_target(tmp_path, **LOADING)
    rows: list[int] = []
    for module in model.model.modules():  # type: ignore[attr-defined]
        if isinstance(module, MixtralExperts):
            module.register_forward_hook(lambda module, args, out: rows.append(int((out != 0).any(-1).sum())))
    model(DensePass(torch.tensor([[5, -1, 7], [-1, 3, -1]]), model.layer_specs))
    assert rows == [3] * 4


def test_positions_that_a_model_does_not_have_are_its_last(tmp_path: Path) -> None:
    """Of nodes behind the end of a context, which are never accepted.  Learned positions end there."""
    make_model(tmp_path, "gpt2")
    model = load_target(tmp_path, **LOADING)
    last = model.config.max_position - 1
    tokens = torch.tensor([[3, 4]])
    behind, at = (model(DensePass(tokens, model.layer_specs, torch.tensor([[last, n]]))) for n in (last + 9, last))
    assert torch.equal(behind.hidden, at.hidden)


@pytest.mark.parametrize(
    ("family", "rope", "longest"),
    [
        ("llama", {"rope_type": "dynamic", "factor": 2.0}, 40),
        ("phi3", {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0] * 4}, 20),
        ("phi3", {"rope_type": "default"}, 40),
    ],
)
def test_a_rope_does_not_change_with_the_longest_position(
    family: str, rope: dict[str, Any], longest: int, tmp_path: Path
) -> None:
    given = {**rope, "rope_theta": 100.0, "original_max_position_embeddings": 20, "partial_rotary_factor": 1.0}
    path = make_target(
        tmp_path, family, max_position_embeddings=40, original_max_position_embeddings=20, rope_parameters=given
    )
    model = load_target(path, **LOADING)
    assert model.config.max_position == longest
    tokens = torch.tensor([[3, 4, 5]])
    near, far = (model(DensePass(tokens, model.layer_specs, torch.tensor([[0, 1, n]]))).hidden[:, :2] for n in (5, 60))
    assert torch.equal(near, far)


def test_code_of_a_checkpoint_never_runs(tmp_path: Path) -> None:
    path = make_target(tmp_path / "model", "starcoder2")
    ran = tmp_path / "ran"
    (path / "own.py").write_text(f"open({str(ran)!r}, 'w')\nclass Own: pass\n")
    raw = json.loads((path / "config.json").read_text())
    own = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}
    (path / "config.json").write_text(json.dumps({**raw, "auto_map": own, "_attn_implementation": "own/kernel"}))
    load_target(path, **LOADING)
    (path / "config.json").write_text(json.dumps({**raw, "auto_map": own, "model_type": "own"}))
    for impl in ("auto", "transformers"):
        with pytest.raises(EspalierError):
            read_config(path, model_impl=impl)
    assert not ran.exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda weights: weights.pop("model.norm.weight"), "weight 'model.norm.weight' is missing from it"),
        (lambda weights: weights.update({"model.own.weight": torch.ones(3)}), "'model.own.weight' belongs to no param"),
        (lambda weights: weights.update({"model.norm.weight": torch.ones(3)}), "transformers cannot load the model"),
    ],
    ids=["missing", "not used", "misshapen"],
)
def test_weights_that_do_not_fit_are_named(change: Any, says: str, tmp_path: Path) -> None:
    path = make_target(tmp_path, "phi3")
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EspalierError) as caught:
        load_target(path, **LOADING)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_config_of_a_larger_model_takes_no_memory(tmp_path: Path) -> None:
    path = make_target(tmp_path, "phi3")
    edit_config(path, intermediate_size=10**9)
    with pytest.raises(EspalierError, match=r"describes \d{12} weights, and the files hold \d{5};"):
        load_target(path, **LOADING)


def test_a_capture_that_layers_do_not_allow(tmp_path: Path) -> None:
    """Gemma 3n's layers pass on four rows for each token; its last ones are given the K and V of earlier ones."""
    make_model(tmp_path, "gemma3n_text")
    shares = [spec.shares_with for spec in load_target(tmp_path, **LOADING).layer_specs]
    assert shares == [None] * 5 + [3, 4]
    with pytest.raises(EspalierError, match="do not pass on one row for each token"):
        load_target(tmp_path, captured_layers=(1,), **LOADING)


class OwnFirst(Phi3ForCausalLM):
    """Treats the first row of a pass in a way of its own, as no row of a tree may be."""

    def __init__(self, config: Phi3Config) -> None:
        super().__init__(config)
        self.model.embed_tokens.register_forward_hook(lambda module, args, x: torch.cat((2 * x[:, :1], x[:, 1:]), 1))


def test_a_class_that_knows_the_first_row_of_a_pass_is_refused() -> None:
    with pytest.raises(EspalierError, match="do not see just the rows before them"):
        probe_tiny_model(tiny_model(OwnFirst, tiny_config(Phi3Config())))


class OtherNorm(Phi3RMSNorm):
    """Looks like the norm that is ours, and is not."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states) + 1e-3


class OtherMLP(Phi3MLP):
    """Looks like an MLP of ours, and is not."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states) * 1.01


class LimitedMLP(Phi3MLP):
    """Differs only for large values."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states).clamp(-1e3, 1e3)


class NormWithoutWeight(Phi3RMSNorm):
    """Some of its modules have a weight."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(hidden_states, (64,), self._parameters.get("weight"), self.variance_epsilon)


@pytest.mark.parametrize("mlp", [Phi3MLP, OtherMLP, LimitedMLP])
def test_only_what_computes_the_same_is_replaced(mlp: type) -> None:
    tiny = tiny_model(Phi3ForCausalLM, tiny_config(Phi3Config()))
    tiny.model.norm = OtherNorm(64)
    for layer in tiny.model.layers:
        layer.mlp.__class__ = mlp
        layer.input_layernorm.__class__ = layer.post_attention_layernorm.__class__ = NormWithoutWeight
        del layer.post_attention_layernorm.weight
    replacements, stacked, _ = probe_tiny_model(tiny)
    assert set(replacements) == {nn.Linear, NormWithoutWeight, *([mlp] if mlp is Phi3MLP else [])}
    assert stacked == {}


@pytest.mark.parametrize("is_sparse", [False, True])
def test_modules_that_the_tiny_model_lacks_are_not_replaced(is_sparse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 3n may have an MLP of another kind in a late layer.  The tiny model has that layer; here it is left out."""

    def config_of(sparsity: list[float]) -> Gemma3nTextConfig:
        sizes = {"num_hidden_layers": len(sparsity), "num_kv_shared_layers": 0, "vocab_size_per_layer_input": 64}
        return Gemma3nTextConfig(activation_sparsity_pattern=sparsity, vocab_size=64, **sizes)

    config = config_of([0.0] * 13 + [0.95 * is_sparse, 0.0, 0.0])
    tiny = tiny_config(config)
    assert (0.95 in tiny.activation_sparsity_pattern) == is_sparse and tiny.num_hidden_layers < 12
    dense = tiny_config(config_of([0.0] * 5))
    monkeypatch.setattr(probe_module, "tiny_config", lambda config: dense)
    replacements = probe_module.probe("gemma3n_text", json.dumps(config.to_dict())).replacements
    assert (Gemma3nTextMLP in replacements) == (not is_sparse)
    assert nn.Linear in replacements


class OwnInputs(LlamaMLP):
    """Its gate and up have different inputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x + 1))


@pytest.mark.parametrize("bias", [True, False])
def test_linear_layers_of_one_input_are_one_product(bias: bool) -> None:
    """The probe compares the logits of a target with its products with the plain model's."""
    tiny = tiny_model(LlamaForCausalLM, tiny_config(LlamaConfig(attention_bias=bias)))
    for layer in tiny.model.layers:
        layer.mlp.__class__ = OwnInputs
        layer.self_attn.k_proj.bias = None
    replacements, stacked, _ = probe_tiny_model(tiny)
    assert stacked == {LlamaAttention: ("q_proj", "k_proj", "v_proj")}
    attention: Any = TransformersTarget(tiny, replacements, stacked).layers[0].self_attn
    parts = [attention.q_proj, attention.k_proj, attention.v_proj]
    assert [part.weight.numel() for part in parts] == [0, 0, 0]
    assert len({part.forward.func for part in parts}) == 1


def test_a_layer_called_with_another_input_computes_that_input() -> None:
    layers, (x, y) = [nn.Linear(3, 2), nn.Linear(3, 4, bias=False)], torch.randn(2, 5, 3)
    stacked = StackedLinears(layers)
    for index, rows in ((0, x), (1, x), (1, y), (0, x), (1, y)):
        torch.testing.assert_close(stacked.output(index, rows), layers[index](rows))


@pytest.mark.parametrize(("family", "expected"), [("llama", "eager"), ("mixtral", "grouped_mm")])
def test_experts_on_a_gpu_are_computed_as_the_class_allows(family: str, expected: str, tmp_path: Path) -> None:
    """Loading leaves the choice to transformers there.  A loop that reads on the host would not be captured."""
    config = AutoConfig.for_model(family, num_hidden_layers=1)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with torch.device("meta"):
        assert model_class._from_config(config).config._experts_implementation == expected
