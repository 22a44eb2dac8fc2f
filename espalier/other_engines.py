"""The names of settings in vLLM, SGLang, transformers and others, with Espalier's name for each.

The tables are used for keywords in Python and for flags on the command line.  A flag is the keyword with dashes in
place of underscores.
"""

from collections.abc import Collection
from types import MappingProxyType

# Keys are Espalier's settings (with "=value" if the other name implies a value), values are other engines' names.
OTHER_ENGINE_NAMES = MappingProxyType(
    {
        "EngineConfig.model": "model_path model_name model_name_or_path pretrained_model_name_or_path",
        "EngineConfig.model_overrides": "hf_overrides json_model_override_args",
        "EngineConfig.draft": "speculative_model speculative_draft_model_path draft_model spec_model",
        "EngineConfig.attention": "attention_backend decode_attention_backend prefill_attention_backend",
        "EngineConfig.kv_dtype": "kv_cache_dtype",
        "EngineConfig.tensor_parallel": "tensor_parallel_size tp_size tp",
        "EngineConfig.page_size": "block_size",
        "EngineConfig.num_pages": "max_total_tokens num_gpu_blocks_override",
        "EngineConfig.max_batch": "max_num_seqs max_running_requests",
        "EngineConfig.max_context": "max_model_len context_length max_seq_len",
        "EngineConfig.chunk_size": "max_num_batched_tokens chunked_prefill_size max_prefill_tokens",
        "EngineConfig.prefix_cache": "enable_prefix_caching",
        "EngineConfig.prefix_cache=False": "disable_radix_cache no_enable_prefix_caching",
        "EngineConfig.overlap": "async_scheduling",
        "EngineConfig.overlap=False": "disable_overlap_schedule no_async_scheduling",
        "EngineConfig.graph_batch": "cuda_graph_max_bs max_cudagraph_capture_size cuda_graph_sizes",
        "EngineConfig.graph_batch=0": "enforce_eager disable_cuda_graph",
        "EngineConfig.seed": "random_seed",
        "EngineConfig.speculation": "speculative_config",
        "SpeculationConfig.algorithm": "speculative_algorithm speculative_algo",
        "SpeculationConfig.steps": "speculative_num_steps num_speculative_tokens num_assistant_tokens",
        "SpeculationConfig.topk": "speculative_eagle_topk",
        "SpeculationConfig.num_draft_tokens": "speculative_num_draft_tokens",
        "SamplingParams.max_tokens": "max_new_tokens max_completion_tokens n_predict",
        "SamplingParams.min_tokens": "min_new_tokens",
        "SamplingParams.temperature=0": "greedy",
        "SamplingParams.n": "num_return_sequences num_samples",
        "SamplingParams.stop": "stop_sequences stop_strings",
        "SamplingParams.stop_token_ids": "eos_token_id",
        "SamplingParams.include_stop_str_in_output": "no_stop_trim",
        "SamplingParams.seed": "sampling_seed",
        "SamplingParams.logit_bias": "bad_words allowed_token_ids",
        "SamplingParams.grammar=espalier.Grammar(...)": "structured_outputs guided_decoding guided_json guided_regex "
        "guided_choice guided_grammar json_schema regex ebnf structural_tag response_format",
        "serve.cors_origin": "allowed_origins",
        "serve.log_level": "uvicorn_log_level log_level_http",
        "serve.max_queue": "max_queued_requests",
        # Espalier has a flag of this name, but a request has no such field.
        "serve.chat_template": "",
        "serve.api_key": "admin_api_key",
        "serve.tool_format": "tool_call_parser",
        "serve.reasoning_format": "reasoning_parser",
        "serve.replicas": "data_parallel_size dp_size dp",
    }
)
# Keys are reasons why Espalier lacks a setting, values are other engines' names for the setting.
UNSUPPORTED_SETTINGS = MappingProxyType(
    {
        "the KV cache takes a share of the free memory, or as many pages as num_pages says": "gpu_memory_utilization "
        "mem_fraction_static kv_cache_memory_bytes",
        "several GPUs share a model by tensor_parallel alone": "pipeline_parallel_size pp_size pp "
        "expert_parallel_size ep_size enable_expert_parallel nnodes node_rank",
        "a checkpoint says how its weights are quantized": "quantization load_in_8bit load_in_4bit",
        "adapters are not supported": "enable_lora lora_modules lora_paths max_loras",
        "Espalier never runs a checkpoint's code": "trust_remote_code",
        "a request brings no code (use logit_bias or a grammar)": "logits_processors logits_processor "
        "custom_logit_processor",
        "xgrammar makes the grammars": "grammar_backend guided_decoding_backend",
        "tool calls and reasoning need no switch": "enable_auto_tool_choice enable_reasoning",
        "Espalier uses the model's tokenizer": "tokenizer tokenizer_path tokenizer_mode skip_tokenizer_init",
        "the KV cache is not swapped to the CPU": "swap_space cpu_offload_gb",
        "the server has no TLS (put a reverse proxy in front of it)": "ssl_keyfile ssl_certfile",
        "outputs are not ranked (set n, and choose one of them)": "best_of use_beam_search num_beams beam_width",
        "LLM.generate shows no progress bar (use on_chunk)": "use_tqdm",
        "temperature=0 is greedy decoding, and any other value samples": "do_sample",
    }
)
# Maps other engines' names to arguments of LLM.generate and LLM.stream.
OUR_ARGUMENTS = MappingProxyType({"sampling_params": "params"})
# Maps other engines' names to kinds of Grammar.
_GRAMMAR_KINDS = MappingProxyType(
    {"guided_json": "json_schema", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "ebnf"}
    | {kind: kind for kind in ("json_schema", "regex", "choice", "ebnf", "structural_tag", "json_object")}
)
_OUR_NAMES = MappingProxyType({name: ours for ours, names in OTHER_ENGINE_NAMES.items() for name in names.split()})
_REFUSAL_REASONS = MappingProxyType(
    {name: why for why, names in UNSUPPORTED_SETTINGS.items() for name in names.split()}
)


def keyword_advice(name: str, known_names: Collection[str], python: bool = True) -> str | None:
    """Returns the advice for an unknown keyword: Espalier's name for it, or why Espalier has none.

    known_names: the keywords that the caller accepts.  python: whether the advice may name another Python class; False
    for clients of the server.  Returns None if no table has the keyword, or if `python` forbids the advice."""
    if name in _GRAMMAR_KINDS and {"kind", "spec"} <= set(known_names):
        return f'use Grammar("{_GRAMMAR_KINDS[name]}", "...")'
    if name in _REFUSAL_REASONS:
        return f"{_REFUSAL_REASONS[name]}; leave it out"
    if OUR_ARGUMENTS.get(name) in known_names:
        return f"use {OUR_ARGUMENTS[name]}"
    # The name may also be Espalier's own name for a setting of another class.
    our_name = _OUR_NAMES.get(name) or next(
        (our_setting for our_setting in OTHER_ENGINE_NAMES if our_setting.partition(".")[2] == name), None
    )
    if our_name is None:
        return None
    owner, _, setting = our_name.partition(".")
    if owner == "serve":
        return f"use espalier serve --{setting.replace('_', '-')}"
    if setting.partition("=")[0] in known_names:
        return f"use {setting}"
    if not python:
        return None
    return f"use {owner}({setting if '=' in setting else f'{setting}=...'})"


def flag_advice(name: str, flags: Collection[str], arguments: Collection[str] = ()) -> str | None:
    """Returns the advice for an unknown flag.

    name: with underscores, without leading dashes.  flags, arguments: the flags and the arguments (such as "model") of
    the command."""
    if name in _REFUSAL_REASONS:
        return f"{_REFUSAL_REASONS[name]}; leave it out"
    owner, _, setting = _OUR_NAMES.get(name, "").partition(".")
    our_setting, _, value = setting.partition("=")
    if name == "speculative_config":
        return "use --draft, --steps, --topk and --num-draft-tokens"
    if (our_setting or name) in arguments:
        return f"write the {our_setting or name} after the command, without a flag"
    our_flag = "--" + our_setting.replace("_", "-")
    if not our_setting or our_flag not in flags:
        return f"use espalier serve {our_flag}" if owner == "serve" else None
    if value == "False":
        return f"use --no-{our_flag[2:]}"
    return f"use {our_flag} {value}".rstrip()
