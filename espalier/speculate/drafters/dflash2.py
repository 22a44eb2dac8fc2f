"""DFlash 2 drafts, in z-lab's form and in vLLM's speculators format."""

from espalier.models.dflash2 import make_dflash2
from espalier.models.dflash2_config import ARCHITECTURES, SPECULATORS_TYPES, read_dflash2
from espalier.speculate.drafters import block
from espalier.speculate.drafters.base import DraftFormat
from espalier.speculate.drafters.one_pass import OnePassDrafter

FORMAT = DraftFormat(
    algorithm="dflash2",
    title="DFlash 2 drafts",
    architectures=ARCHITECTURES,
    speculators_types=SPECULATORS_TYPES,
    read=read_dflash2,
    make=make_dflash2,
    drafter=OnePassDrafter,
    checks=block.FORMAT.checks,
)
