"""`espalier doctor`: prints the machine, the versions and the resolved configuration, without loading a model.

With --matrix, it prints the supported features of each attention backend.
"""

from argparse import Namespace

import torch
from rich.text import Text

from espalier.attention import BACKENDS
from espalier.attention.support import support_matrix
from espalier.bench import tune
from espalier.cache.layer_spec import specs_of_rank
from espalier.config import EngineConfig, is_unresolved
from espalier.errors import EspalierError
from espalier.models.declared_weights import possible_rank_counts, ranks_can_divide
from espalier.models.layer_loading import layer_specs_of
from espalier.shards import Shards
from espalier.speculate.drafters.registry import draft_shards
from espalier.startup.build import cache_specs, describe_cache_size
from espalier.startup.load import Checkpoint, count_weights, find_checkpoint, resolve_config
from espalier.terminal.console import DIM_STYLE, describe_machine, installed_version, stdout
from espalier.terminal.flags import engine_settings, flag_of, given_flags

# The report lists up to this number of ranks, because machines have at most this number of GPUs.
MAX_RANKS = 8
OPTIONAL_PACKAGES = ("triton", "flashinfer-python", "sglang-kernel", "flash-attn-3", "accelerate")


def run(args: Namespace) -> int:
    if args.matrix:
        if args.tune or (given := given_flags(args)):
            flag = "--tune" if args.tune else flag_of(given[0])
            raise EspalierError(f"{flag} is not for --matrix, which lists every backend; leave one out")
        return _print_matrix()
    if args.tune:
        return tune.run(args, EngineConfig(**engine_settings(args)))
    for name in ("shapes", "weights", "draft_weights", "seconds", "choices"):
        if getattr(args, name) is not None:
            raise EspalierError(f"{flag_of(name)} is for --tune; add that, or leave {flag_of(name)} out")
    config = EngineConfig(**engine_settings(args))
    console = stdout()
    console.print(Text("machine", "bold"))
    facts = describe_machine() | {package: installed_version(package) for package in OPTIONAL_PACKAGES}
    for name, value in facts.items():
        console.print(Text(f"  {name:<18} {value}"))
    checkpoint = find_checkpoint(config)
    resolved = resolve_config(config, checkpoint)
    console.print(Text("resolved configuration", "bold"))
    console.print(Text(resolved.as_text()))
    if resolved.device != "cpu" and is_unresolved(config.num_pages):
        console.print(Text("  num_pages is an estimate; it is measured when the models are loaded", DIM_STYLE))
    target = checkpoint.target
    layout = resolved.layout
    shards = Shards(0, resolved.tensor_parallel)
    drafts = specs_of_rank(checkpoint.spec.layer_specs, draft_shards(checkpoint.draft, shards))
    specs = cache_specs(
        specs_of_rank(layer_specs_of(target), shards), drafts, resolved.kv_dtype, resolved.draft_kv_dtype
    )
    cache_size = describe_cache_size(resolved, specs, getattr(torch, resolved.dtype))
    num_longest_requests = (resolved.num_pages - 1) // layout.table_width
    num_fitting = f"{min(num_longest_requests, layout.max_batch)} of {layout.max_batch}"
    if resolved.tensor_parallel > 1:
        console.print(Text(_ranks_text(checkpoint, getattr(torch, resolved.dtype))))
    console.print(Text(f"  {cache_size}; requests of max_context that fit at once: {num_fitting}"))
    if not num_longest_requests:
        console.print(Text("  a request of max_context does not fit: raise num_pages, or lower max_context"))
    console.print(Text("model", "bold"))
    console.print(
        Text(
            f"  {target.architecture}: {target.num_layers} layers, hidden size {target.hidden_size}, {target.heads} "
            f"heads, {target.kv_heads} KV heads, vocabulary {target.vocab_size}, {target.max_position} positions"
        )
    )
    probed = target.probe_result
    if probed is not None:
        console.print(Text(f"  it runs by transformers; modules that are replaced by ours: {probed.replaced_modules}"))
    else:
        console.print(Text("  it runs by Espalier's own layers (native)"))
    console.print(Text("this configuration is supported and fits here", DIM_STYLE))
    return 0


def _ranks_text(checkpoint: Checkpoint, dtype: torch.dtype) -> str:
    """Returns a line that lists the possible numbers of ranks, each with the size of the weights that one rank has."""
    counts = possible_rank_counts(checkpoint.target, MAX_RANKS)
    if checkpoint.draft is not None:
        num_draft_ranks = {count: draft_shards(checkpoint.draft, Shards(0, count)).count for count in counts}
        counts = [count for count in counts if ranks_can_divide(checkpoint.draft.layer, num_draft_ranks[count])]
    weight_sizes = (f"{count}: {count_weights(checkpoint, count).nbytes(dtype) / 2**30:.2f} GiB" for count in counts)
    return f"  weights of each rank, by the number of ranks that divide these models: {', '.join(weight_sizes)}"


def _print_matrix() -> int:
    """Prints a line for each backend and feature, because a table with a column for each backend would be too wide."""
    console, (head, rows) = stdout(), support_matrix([backend.support for backend in BACKENDS.values()])
    for column, name in enumerate(head[1:], start=1):
        support = BACKENDS[name].support
        console.print(Text(name, "bold") + Text("" if support.is_installed else "  not installed", DIM_STYLE))
        for row in rows:
            console.print(Text(f"  {row[0]:<28} {row[column]}"))
        for limit, why in support.limit_reasons.items():
            console.print(Text(f"  limit of {limit}: {why}", DIM_STYLE))
    return 0
