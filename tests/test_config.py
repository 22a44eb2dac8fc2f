"""What may be set, what "auto" comes to, and what is refused before anything is loaded."""

import logging
from dataclasses import asdict, fields, replace
from itertools import product

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from hypothesis import given
from hypothesis import strategies as st

from espalier.cache.layer_spec import KVHeads, LayerSpec, RecurrentState
from espalier.cache.states import bytes_per_state
from espalier.config import EngineConfig, SpeculationConfig, is_unresolved
from espalier.errors import EspalierError, one_line
from espalier.layout import PLAIN_TREE, TreeShape, max_draft_tokens
from espalier.models import DraftSpec
from espalier.models.block import MASK_EMBEDDING
from espalier.models.weight_files import WeightSize
from espalier.startup import load, resolve
from espalier.startup.measure_memory import choose_max_batch
from espalier.startup.resolve import StartupInfo, choose_algorithm, choose_device
from espalier.startup.threads import CpuThreadInfo
from espalier.startup.tree_cost import PassWeights
from tests.harness import directories

CPU = torch.device("cpu")
FACTS = StartupInfo(
    free_bytes=4 * 2**30,
    weights=WeightSize(num_cast_values=10**7),
    stored_dtype="bfloat16",
    max_position=2048,
    layer_specs=(LayerSpec(4, KVHeads(2, 64, 64)),) * 17,
    hidden_size=256,
    num_layers=16,
    chip=None,
    threads=CpuThreadInfo(num_cores=4, num_torch_threads=4, is_set_by_environment=False),
    pass_weights=PassWeights(dense=10**6, draft=10**5),
)
HEAD = DraftSpec("eagle3", FACTS.layer_specs[-1:], num_modules=1)
TOKEN_BYTES = 17 * 2 * 128 * 4


def resolved(facts=FACTS, device=CPU, has_draft=True, **settings):
    config = EngineConfig(**settings)
    algorithm = choose_algorithm(config, HEAD.algorithm if has_draft else None)
    spec = HEAD if algorithm == HEAD.algorithm else DraftSpec(algorithm)
    return resolve.resolve(config, "target", "draft", spec, device, facts)


REFUSED = [
    ({"page_size": 0}, "page_size=0"),
    ({"page_size": 513}, "page_size=513"),
    ({"page_size": True}, "page_size=True"),
    ({"page_size": "16"}, "page_size='16'"),
    ({"num_pages": 1}, "num_pages=1"),
    ({"max_batch": 0}, "max_batch=0"),
    ({"threads": 1025}, "threads=1025 is not supported; use a whole number, 1 to 1024"),
    ({"max_context": 1}, "max_context=1"),
    ({"chunk_size": 8}, "chunk_size=8"),
    ({"dtype": "int8"}, "dtype='int8'"),
    ({"overlap": 1}, "overlap=1"),
    ({"prefix_cache": "yes"}, "prefix_cache='yes'"),
    ({"model": 3}, "model=3"),
    ({"model": ""}, "model=''"),
    ({"speculation": "eagle3"}, "speculation='eagle3'"),
    ({"speculation": {"steps": 3}}, "speculation={'steps': 3}"),
    ({"model_overrides": [1]}, "model_overrides=[1]"),
    ({"seed": -1}, "seed=-1"),
    ({"max_contxt": 5}, "'max_contxt'; did you mean 'max_context'"),
    ({"max_model_len": 5}, "'max_model_len'; use max_context"),
    ({"speculative_num_steps": 5}, "use SpeculationConfig(steps=...)"),
    ({"steps": 5}, "use SpeculationConfig(steps=...)"),
    ({"kv_dtype": "fp8_e5m2"}, "kv_dtype='fp8_e5m2' is not supported; use fp8_e4m3,"),
    ({"kv_cache_dtype": "fp8"}, "'kv_cache_dtype'; use kv_dtype"),
    ({"tensor_parallel_size": 2}, "'tensor_parallel_size'; use tensor_parallel"),
    ({"pipeline_parallel_size": 2}, "several GPUs share a model by tensor_parallel alone; leave it out"),
    ({"tensor_parallel": 0}, "tensor_parallel=0 is not supported; use a whole number, 1 to 64"),
]


def test_what_is_cut_of_another_librarys_error_is_seen():
    assert one_line(ValueError("a\nb")) == "a b" and one_line(ValueError()) == "ValueError"
    assert one_line(ValueError("x" * 201)) == "x" * 196 + " ..."


@pytest.mark.parametrize(("settings", "named"), REFUSED, ids=[named for _, named in REFUSED])
def test_bad_settings_are_refused_in_one_line(settings, named):
    with pytest.raises(EspalierError) as refused:
        EngineConfig(**settings)
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"steps": -1}, "steps=-1"),
        ({"topk": 0}, "topk=0"),
        ({"step": 3}, "did you mean 'steps'"),
    ],
)
def test_bad_trees_are_refused_in_one_line(settings, named):
    with pytest.raises(EspalierError, match=named):
        SpeculationConfig(**settings)


def test_an_unknown_field_is_told_all_there_are():
    with pytest.raises(EspalierError, match=r"has no 'foo'; use one of model, draft, .*, seed$"):
        EngineConfig(foo=1)


def test_every_field_says_what_it_is():
    for config in (EngineConfig, SpeculationConfig):
        assert all(f.metadata["help"] for f in fields(config))


def test_every_default_is_open_but_ranks_and_overrides():
    config = EngineConfig()
    set_already = [f.name for f in fields(config) if not is_unresolved(getattr(config, f.name))]
    assert set_already == ["tensor_parallel", "model_overrides"]


def test_a_seed_is_random_unless_it_is_given():
    """Engines without one draw apart, and each says its own; --seed fixes it."""
    assert len({resolved().seed for _ in range(8)}) == 8
    assert {resolved(seed=7).seed for _ in range(2)} == {7} and "seed" in resolved().as_text()


def test_nothing_is_left_open():
    config = resolved()
    values = config.as_dict()
    assert not [name for name, value in values.items() if is_unresolved(value)]
    layout = config.layout
    assert layout.max_context == 2048
    assert (config.algorithm, layout.tree) == ("eagle3", TreeShape(5, 4, 16))
    assert (config.device, config.dtype, config.overlap) == ("cpu", "float32", False)
    # What is logged, sent and written names the sizes as EngineConfig does.  max_pause_ms becomes busy_chunk_size.
    assert {f.name for f in fields(EngineConfig)} - {"speculation", "max_pause_ms"} <= set(values)
    assert {"algorithm", "by_batch", "num_recomputed_tokens", "block_rows", *asdict(layout.tree)} <= set(values)
    assert [line.split()[0] for line in config.as_text().splitlines()] == list(values)


def test_what_is_set_stays_and_the_rest_follows():
    config = resolved(
        page_size=64, max_batch=3, max_context=100, chunk_size=16, overlap=True, prefix_cache=False, num_pages=9, seed=4
    )
    layout = config.layout
    assert (layout.page_size, layout.max_batch, layout.max_context, layout.chunk_size) == (64, 3, 100, 16)
    assert (config.overlap, config.prefix_cache, config.num_pages, config.seed) == (True, False, 9, 4)


def a_gpu(monkeypatch, capability):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "Some GPU")


def test_a_gpu_that_is_too_old_is_refused_by_name_and_never_chosen(monkeypatch, caplog):
    a_gpu(monkeypatch, (7, 5))
    with pytest.raises(EspalierError, match=r"Some GPU has compute capability 7\.5, and 8\.0 .* use device=cpu"):
        choose_device(EngineConfig(device="cuda:0"))
    assert choose_device(EngineConfig()) == torch.device("cpu")
    assert "7.5" in caplog.text and "running on the CPU" in caplog.text
    for capability in ((8, 0), (8, 9), (12, 0)):
        a_gpu(monkeypatch, capability)
        assert choose_device(EngineConfig()) == torch.device("cuda")


def test_cuda_has_the_models_dtype_and_overlap(monkeypatch):
    monkeypatch.setattr("espalier.startup.resolve.require_triton", lambda: None)
    a_gpu(monkeypatch, (9, 0))
    config = resolved(device=torch.device("cuda"))
    assert (config.dtype, config.overlap, config.layout.max_batch) == ("bfloat16", True, 128)


@pytest.mark.parametrize(("steps", "topk"), [(0, 1), *product((1, 3, 5), (1, 4))])
def test_an_open_number_of_nodes_never_exceeds_its_bound(steps, topk):
    config = resolved(speculation=SpeculationConfig(steps=steps, topk=topk))
    assert config.layout.num_draft_tokens == min(16, max_draft_tokens(steps, topk))


def test_more_nodes_than_the_bound_are_refused_with_the_bound():
    with pytest.raises(EspalierError, match=r"num_draft_tokens=70 .* 1 to 69 at steps=5, topk=4"):
        resolved(speculation=SpeculationConfig(steps=5, topk=4, num_draft_tokens=70))


def test_without_speculation_the_tree_is_its_root():
    for plain in (None, SpeculationConfig(algorithm="none")):
        config = resolved(speculation=plain)
        assert (config.algorithm, config.layout.tree) == ("none", PLAIN_TREE)
    with pytest.raises(EspalierError, match="steps=3"):
        resolved(speculation=SpeculationConfig(algorithm="none", steps=3))
    with pytest.raises(EspalierError, match="steps=0 is plain decoding, but topk=4 is set"):
        resolved(speculation=SpeculationConfig(steps=0, topk=4))


def test_the_algorithm_follows_from_the_draft():
    assert resolved(has_draft=True).algorithm == "eagle3"
    assert resolved(has_draft=False).algorithm == "ngram"
    with pytest.raises(EspalierError, match="needs a draft"):
        resolved(has_draft=False, speculation=SpeculationConfig(algorithm="eagle3"))
    with pytest.raises(
        EspalierError, match=r"'eagle' is not supported; use eagle3, .*, dflash2, assistant, ngram, none or 'auto'"
    ):
        load.find_checkpoint(EngineConfig(model="/no/such/place", speculation=SpeculationConfig(algorithm="eagle")))
    with pytest.raises(EspalierError, match="takes no draft"):
        resolved(draft="somewhere", speculation=SpeculationConfig(algorithm="ngram"))


def test_the_context_is_the_models_at_most():
    with pytest.raises(EspalierError, match="max_context=2049 is above the model's 2048"):
        resolved(max_context=2049)


def test_pages_are_a_share_of_free_memory_and_no_more_than_can_be_used():
    plenty = resolved()
    layout = plenty.layout
    assert plenty.num_pages == 1 + layout.max_batch * layout.table_width
    one_context = (1 + layout.table_width) * layout.page_size * TOKEN_BYTES
    little = replace(FACTS, free_bytes=FACTS.weights.nbytes(torch.float32) + 16 * 8 * TOKEN_BYTES + 3 * one_context)
    scarce = resolved(little)
    assert 1 + layout.table_width <= scarce.num_pages < plenty.num_pages


def test_memory_that_holds_no_context_is_refused():
    with pytest.raises(EspalierError, match=r"max_context=2048 needs \d+ pages .* lower max_context"):
        resolved(replace(FACTS, free_bytes=2**26))
    assert resolved(replace(FACTS, free_bytes=2**26), num_pages=4).num_pages == 4


@given(left=st.integers(0, 2**36), dtype=st.sampled_from(["float32", "bfloat16"]))
def test_states_of_slots_take_a_share_of_memory_by_default(left, dtype):
    """What the user sets is taken as it is."""
    state = RecurrentState(taps=4, heads=32, k_heads=16, k_size=128, v_size=128)
    facts = replace(FACTS, layer_specs=(LayerSpec(32, state),) * 3, weights=WeightSize(0), free_bytes=left)
    each = bytes_per_state(facts.layer_specs, getattr(torch, dtype))
    chosen = choose_max_batch(EngineConfig(), facts, getattr(torch, dtype), 128)
    assert 1 <= chosen <= 128 and (chosen == 1 or chosen * each <= left / 4)
    assert chosen == 128 or (chosen + 1) * each > left / 4
    assert choose_max_batch(EngineConfig(max_batch=77), facts, getattr(torch, dtype), 128) == 77
    assert choose_max_batch(EngineConfig(), replace(facts, layer_specs=FACTS.layer_specs), torch.float32, 128) == 128


def test_weights_that_do_not_fit_are_named():
    """A smaller max_context would not help."""
    facts = replace(FACTS, free_bytes=16 * 2**30, weights=WeightSize(num_cast_values=8 * 10**9))
    with pytest.raises(
        EspalierError, match=r"weights in float32 \(29.8 GiB\) .* free memory \(16.0 GiB\); use a smaller dtype"
    ):
        resolved(facts, dtype="float32")
    with pytest.raises(EspalierError, match="do not fit"):
        resolved(facts, dtype="float32", num_pages=4)
    assert resolved(facts, dtype="bfloat16", max_batch=1).num_pages > 1


@pytest.mark.parametrize("device", ["tpu", "meta", "cuda:99"])
def test_devices_that_are_not_there_are_refused(device):
    with pytest.raises(EspalierError, match=device):
        choose_device(EngineConfig(device=device))


def test_free_memory_is_measured():
    assert 2**20 < resolve.free_memory(CPU) < 2**50


def test_a_control_groups_limit_bounds_memory(monkeypatch, tmp_path):
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("400\n")
    monkeypatch.setattr(resolve, "CGROUP_FOLDER", tmp_path)
    assert resolve.free_memory(CPU) == 600
    (tmp_path / "memory.stat").write_text("anon 100\ninactive_file 250\nactive_file 50\n")
    assert resolve.free_memory(CPU) == 850, "cached files make way"


def test_a_models_own_fields_reach_the_configuration():
    target, draft = directories()
    config = EngineConfig(model=target, draft=draft, max_context=64, model_overrides={"max_position_embeddings": 80})
    found = load.find_checkpoint(config)
    assert found.target.max_position == 80
    assert load.resolve_config(config, found).algorithm == "eagle3"


@pytest.mark.parametrize("name", ["/no/such/place", "./here", "no-slash"])
def test_a_model_that_is_nowhere_is_refused(name):
    with pytest.raises(EspalierError, match=f"model='{name}' is not a directory"):
        load.find_checkpoint(EngineConfig(model=name))


@pytest.mark.parametrize("what", ["model", "draft"])
def test_a_path_that_is_no_checkpoint_is_told_as_what_it_was_given_for(what, tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    for path, why in ((tmp_path, "holds no config.json"), (file, "is a file")):
        with pytest.raises(EspalierError, match=f"^{what}='{path}' {why}; give the directory"):
            load.find_checkpoint(EngineConfig(**{what: path}))

    def forbidden(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.is_file", forbidden)
    with pytest.raises(EspalierError, match=rf"^{what}='{file}' cannot be read \(Permission denied\)"):
        load.find_checkpoint(EngineConfig(**{what: file}))


def test_the_hub_out_of_reach_is_one_line(monkeypatch):
    def offline(*_, **__):
        raise OSError("no route\nto host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(EspalierError, match=r"hub failed .no route to host.; check the name and the network"):
        load.find_checkpoint(EngineConfig(model="someone/something"))


def downloaded(monkeypatch, stored, **named):
    """Which of the files stored in a repository are wanted for the model that EngineConfig names."""
    wanted = []

    def download(name, **patterns):
        wanted.extend(filter_repo_objects(stored, **patterns))
        raise OSError("far enough")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(EspalierError, match="far enough"):
        load.find_checkpoint(EngineConfig(**named))
    return wanted


def test_weights_are_downloaded_once(monkeypatch):
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    stored = ["config.json", "consolidated.safetensors", "consolidated-00001.safetensors", *shards, "onnx/model.json"]
    assert downloaded(monkeypatch, stored, model="someone/something") == ["config.json", *shards]


def test_a_drafts_mask_is_downloaded_so_that_it_is_refused(monkeypatch):
    stored = ["config.json", "model.safetensors", MASK_EMBEDDING, "optimizer.pt"]
    assert downloaded(monkeypatch, stored, draft="someone/something") == stored[:3]


def test_a_draft_alone_needs_to_name_its_target():
    _, draft = directories()
    with pytest.raises(EspalierError, match="does not name its target"):
        load.find_checkpoint(EngineConfig(draft=draft))


@pytest.mark.parametrize(
    "speculation",
    [
        None,
        *(
            SpeculationConfig(**plain)
            for plain in ({"algorithm": "none"}, {"steps": 0}, {"algorithm": "eagle3", "steps": 0})
        ),
    ],
)
def test_a_draft_that_plain_decoding_leaves_out_is_said(speculation, caplog):
    """But not to a user who asks for plain decoding by speculation=None."""
    with caplog.at_level(logging.WARNING, "espalier"):
        assert load.find_checkpoint(EngineConfig(draft="bundled", speculation=speculation)).draft is None
    assert [" is not loaded: algorithm is none" in said for said in caplog.messages] == [True] * (
        speculation is not None
    )


def test_the_drafts_backend_is_the_targets_unless_it_is_named():
    assert (resolved().attention, resolved().draft_attention) == ("sdpa", "sdpa")
    assert resolved(attention="reference").draft_attention == "reference"
    chosen = resolved(attention="reference", draft_attention="sdpa")
    assert (chosen.attention, chosen.draft_attention) == ("reference", "sdpa")
    with pytest.raises(EspalierError, match="attention=triton does not support device=cpu"):
        resolved(draft_attention="triton")
    with pytest.raises(EspalierError, match="draft_attention='sdpa' is set, but the drafter has no layers"):
        resolved(replace(FACTS, layer_specs=FACTS.layer_specs[:16]), draft_attention="sdpa")


def test_kv_dtypes():
    """FP8 or the model's own; the draft's is the target's by default."""
    plain, fp8 = resolved(max_context=64), resolved(max_context=64, kv_dtype="fp8_e4m3")
    assert (plain.kv_dtype, plain.draft_kv_dtype) == ("float32", "float32")
    assert (fp8.kv_dtype, fp8.draft_kv_dtype) == ("fp8_e4m3", "fp8_e4m3")
    assert resolved(kv_dtype="fp8_e4m3", draft_kv_dtype="float32").draft_kv_dtype == "float32"
    with pytest.raises(EspalierError, match="kv_dtype='float16' differs from dtype='float32'; use float32, fp8_e4m3"):
        resolved(kv_dtype="float16")
    with pytest.raises(EspalierError, match="draft_kv_dtype='fp8_e4m3' is set, but the drafter has no layers"):
        resolved(replace(FACTS, layer_specs=FACTS.layer_specs[:16]), draft_kv_dtype="fp8_e4m3")
