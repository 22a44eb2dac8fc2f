"""EAGLE-3 heads (Li et al. 2025, arXiv 2503.01840), in the formats of SafeAILab and of vLLM's speculators."""

from espalier.models.eagle3 import make_eagle3
from espalier.models.eagle3_config import ARCHITECTURES, explain_earlier, read_eagle3
from espalier.models.peagle_config import MASKS
from espalier.speculate.drafters.autoregressive import AutoregressiveDrafter
from espalier.speculate.drafters.base import DraftFormat

FORMAT = DraftFormat(
    algorithm="eagle3",
    title="EAGLE-3 heads",
    architectures=ARCHITECTURES,
    speculators_types=("eagle3",),
    read=read_eagle3,
    make=make_eagle3,
    drafter=AutoregressiveDrafter,
    explain=explain_earlier,
    unmarked=MASKS,
    checks="eagle_aux_hidden_state_layer_ids (top-level ids name layers' inputs, those in eagle_config their outputs)",
)
