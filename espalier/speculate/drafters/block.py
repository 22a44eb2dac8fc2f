"""Block drafts: DFlash and JetSpec, DSpark, and both in vLLM's speculators format."""

from espalier.models.block import make_block
from espalier.models.block_config import ARCHITECTURES, SPECULATORS_TYPES, explain_not_built, read_block
from espalier.speculate.drafters.base import DraftFormat
from espalier.speculate.drafters.one_pass import OnePassDrafter

FORMAT = DraftFormat(
    algorithm="block",
    title="block drafts",
    architectures=ARCHITECTURES,
    speculators_types=SPECULATORS_TYPES,
    read=read_block,
    make=make_block,
    drafter=OnePassDrafter,
    explain=explain_not_built,
    # Two mistakes leave an accept length near 1: layer ids off by one, and the wrong row for depth 1.
    checks=(
        "the target layers that it reads (target_layer_ids name their outputs, aux_hidden_state_layer_ids their "
        "inputs), mask_token_id and sample_from_anchor"
    ),
)
