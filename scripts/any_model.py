"""Every causal class of the installed transformers, tiny and random, as a target: what runs it, and is it right?

For each class that runs: greedy tokens and log-probabilities against `generate`, with n-gram trees and with a random
EAGLE-3 head, over page sizes, with prefix hits and with preemption.  All in float32, on the CPU.
"""

import argparse
import json
import logging
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import transformers
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from espalier.errors import EspalierError, one_line
from espalier.models import ModelConfig, load_target, read_config
from espalier.models.families import FAMILIES
from espalier.models.from_transformers.shrink import tiny_config, tiny_model
from espalier.request import Request, SamplingParams
from espalier.speculate.drafters.registry import load_draft, read_draft
from espalier.startup.build import LoadedModels, assemble_engine
from tests.builders import make_eagle3
from tests.harness import VOCAB, Setup, prompts, request, run

# The kinds of runs, and their page sizes.
RUNS: dict[str, Sequence[int]] = {
    "plain": (16,),
    "ngram": (1, 3, 16, 64, 256),
    "eagle3": (1, 3, 16, 64, 256),
    "prefix": (1,),
    "preempted": (3,),
}
LENGTHS = (5, 19, 7, 12)
MAX_TOKENS = 20
# Of a log-probability; and how many times the difference between transformers' own two ways, if that is more.
TOLERANCE, TIMES_OWN = 1e-4, 3
# With few index heads many rows score exactly 0, and which of them a query chooses is nowhere defined.
NO_TIES = {"index_n_heads": 32}
# Fields without which a class does not run, and for which its own default is None; or without which it is no judge.
NEEDED: dict[str, dict[str, Any]] = {
    "deepseek_v32": NO_TIES,
    "glm_moe_dsa": NO_TIES,
    # Beyond its window, which published files make as long as a text, its layers see more rows than its cache keeps.
    "moshi": {"sliding_window": 64},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4, "head_dim": 16},
    "deepseek_v3": {"head_dim": 16},
    "dots1": {
        "num_experts_per_tok": 2,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 32,
    },
}


@dataclass
class Found:
    """What became of a class.

    compared: tokens by kind of run; differ: of them those that differ.  logprobs: the largest difference of a
    log-probability; own: that between `generate`, with its cache, and a plain pass over the whole text.
    """

    name: str
    class_name: str
    runs_by: str
    reason: str = ""
    compared: Counter[str] = field(default_factory=Counter)
    differ: Counter[str] = field(default_factory=Counter)
    logprobs: float = 0.0
    own: float = 0.0

    @property
    def is_right(self) -> bool:
        return not self.differ and self.logprobs <= max(TOLERANCE, TIMES_OWN * self.own)

    def line(self) -> str:
        what = f"{self.name:<28} {self.class_name:<34} {self.runs_by:<13}"
        if self.reason:
            return f"{what} {self.reason}"
        each = ", ".join(f"{kind} {count}" for kind, count in self.compared.items())
        return (
            f"{what} tokens: {each}; differ {self.differ.total()}; log-probabilities differ by {self.logprobs:.0e} "
            f"(transformers' own by {self.own:.0e})"
        )


def make_model(path: Path, name: str) -> None:
    """Write a tiny random model of a class, in float32.  Raises EspalierError if its default config makes none."""
    config_class = CONFIG_MAPPING[name]
    try:
        full = config_class()
    except Exception as error:
        raise EspalierError(f"its default config is none ({one_line(error)})") from None
    if not hasattr(full, "num_hidden_layers"):
        raise EspalierError("its config describes several models (text and images or sound), not one of text")
    if getattr(MODEL_FOR_CAUSAL_LM_MAPPING[config_class], "_is_stateful", False):
        raise EspalierError("it keeps recurrent state")
    config = tiny_config(full)
    for field_name, value in {"vocab_size": VOCAB, **NEEDED.get(name, {})}.items():
        setattr(config, field_name, value)
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if isinstance(getattr(config, token, None), int):
            setattr(config, token, getattr(config, token) % VOCAB)
    model = tiny_model(MODEL_FOR_CAUSAL_LM_MAPPING[config_class], config, seed=3)
    model.generation_config = transformers.GenerationConfig()
    model.save_pretrained(path)


def make_draft(path: Path, config: ModelConfig) -> Path:
    """A random EAGLE-3 head for a target."""
    shape = path / "shape"
    shape.mkdir(parents=True)
    sizes = {name: getattr(config, name) for name in ("vocab_size", "hidden_size")}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    layers = {"num_hidden_layers": config.num_layers, "max_position_embeddings": config.max_position}
    (shape / "config.json").write_text(json.dumps({**sizes, **heads, **layers}))
    return make_eagle3(path / "head", shape, seed=4)


def expected(path: Path) -> tuple[list[list[int]], list[list[float]], float]:
    """Greedy tokens after each prompt, and their log-probabilities, by `generate`; and Found.own."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="eager", experts_implementation="eager", trust_remote_code=False
    ).eval()
    tokens, logprobs, own = [], [], 0.0
    for prompt in prompts(7, LENGTHS):
        greedy = {"max_new_tokens": MAX_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        greedy |= {"output_logits": True, "return_dict_in_generate": True}
        made = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), **greedy)
        with torch.no_grad():
            whole = model(made.sequences, use_cache=False).logits[0, len(prompt) - 1 : -1]
        new = made.sequences[0, len(prompt) :]
        scores, again = (x.log_softmax(-1).gather(1, new[:, None])[:, 0] for x in (torch.cat(made.logits), whole))
        own = max(own, float((scores - again).abs().max()))
        tokens.append(new.tolist())
        logprobs.append(scores.tolist())
    return tokens, logprobs, own


def setup_of(kind: str, page_size: int, has_draft: bool) -> Setup:
    in_float32: dict[str, Any] = {"kv_dtype": "float32", "draft_kv_dtype": "float32"}
    algorithm = "eagle3" if has_draft and kind != "ngram" else "ngram"
    tree = Setup(page_size, topk=2, steps=3, num_draft_tokens=8, max_context=64, algorithm=algorithm, **in_float32)
    if kind == "preempted":
        return replace(tree, num_pages=26, max_context=40, overlap=True)
    return tree.plain() if kind == "plain" else tree


def compare(found: Found, path: Path, folder: Path, runs: Mapping[str, Sequence[int]] = RUNS) -> Found:
    """Run everything, and count what differs from transformers.  runs: as RUNS."""
    tokens, logprobs, found.own = expected(path)
    model_impl = found.runs_by
    config = read_config(path, model_impl=model_impl)
    can_capture = config.probe_result is None or config.probe_result.can_capture
    draft = make_draft(folder / f"draft-{model_impl}", config) if can_capture else None
    how: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "position_rows": 128}
    capture = () if draft is None else read_draft(draft, config).spec.captured_layers
    plain = load_target(path, model_impl=model_impl, **how)
    target = plain if draft is None else load_target(path, model_impl=model_impl, captured_layers=capture, **how)
    head = None if draft is None else load_draft(draft, target, **how)
    for kind, size in ((kind, size) for kind, sizes in runs.items() for size in sizes):
        if kind == "eagle3" and draft is None:
            continue
        setup = setup_of(kind, size, draft is not None)
        models = (target, head) if setup.algorithm == "eagle3" else (plain, None)
        engine = assemble_engine(LoadedModels(setup.config(torch.float32), *models))
        if kind == "prefix":
            for warming in asked():
                engine.add(warming)
            while engine.has_work:
                engine.step()
        requests = run(engine, asked()).requests
        if kind == "prefix":
            assert sum(each.cached_tokens for each in requests), "no prefix was hit"
        if kind == "preempted":
            assert engine.scheduler.num_preempted, "nothing was preempted"
        for each, wanted, scores in zip(requests, tokens, logprobs, strict=True):
            found.compared[kind] += len(wanted)
            if wrong := sum(one != other for one, other in zip(each.output, wanted, strict=True)):
                found.differ[kind] += wrong
            gaps = (abs(own.logprob - score) for own, score in zip(each.logprobs, scores, strict=True))
            found.logprobs = max(found.logprobs, *gaps)
    return found


def asked() -> list[Request]:
    wish = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, logprobs=0)
    return [request(i, prompt, wish) for i, prompt in enumerate(prompts(7, LENGTHS))]


def look_at(name: str, folder: Path) -> Iterator[Found]:
    """What becomes of a class: an entry for each way to run it, or for why there is none."""
    class_name, path = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name], folder / name
    probed = None
    try:
        make_model(path, name)
        probed = read_config(path, model_impl="transformers").probe_result
    except Exception as error:  # any: it is another's code
        reason = str(error) if isinstance(error, EspalierError) else f"no tiny model can be saved ({one_line(error)})"
        reason = reason.removeprefix(f"{path}: ").removeprefix(f"{class_name} cannot run by transformers: ")
        yield Found(name, class_name, "refused", reason.removesuffix("; use another model"))
    for impl, can_run in (("native", path.exists() and name in NATIVE), ("transformers", probed is not None)):
        if can_run:
            try:
                yield compare(Found(name, class_name, impl), path, folder)
            except Exception as error:  # any: the others are to be looked at too
                yield Found(name, class_name, "broken", f"{impl}: {type(error).__name__}: {one_line(error)}")


NATIVE = {family.model_type for family in FAMILIES.values()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="model types, such as phi3; by default all of them")
    names = parser.parse_args(argv).names or list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    everything: list[Found] = []
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            for found in look_at(name, Path(folder)):
                print(found.line(), flush=True)
                everything.append(found)
    by = Counter(each.runs_by for each in everything)
    running = [each for each in everything if not each.reason]
    print(
        f"{len(names)} classes: {by['native']} run native, {by['transformers']} by transformers, {by['refused']} are "
        f"refused, {by['broken']} broken; {sum(each.compared.total() for each in running)} tokens compared, "
        f"{sum(each.differ.total() for each in running)} differ; largest difference of a log-probability "
        f"{max((each.logprobs for each in running), default=0):.1e}"
    )
    return 0 if all(each.is_right for each in running) and not by["broken"] else 1


if __name__ == "__main__":
    sys.exit(main())
