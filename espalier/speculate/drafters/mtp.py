"""Multi-token prediction layers: a target's own (DeepSeek-V3, GLM, MiMo-7B), or a head in the speculators format."""

from espalier.models.mtp import make_mtp
from espalier.models.mtp_config import ARCHITECTURES, explain_not_built, read_mtp, stores_mtp
from espalier.speculate.drafters.autoregressive import AutoregressiveDrafter
from espalier.speculate.drafters.base import DraftFormat

FORMAT = DraftFormat(
    algorithm="mtp",
    title="multi-token prediction layers",
    architectures=ARCHITECTURES,
    speculators_types=("mtp",),
    read=read_mtp,
    make=make_mtp,
    drafter=AutoregressiveDrafter,
    explain=explain_not_built,
    in_target=stores_mtp,
    checks="mtp_form and num_nextn_predict_layers",
)
