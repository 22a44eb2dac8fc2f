"""What a checkpoint calls the weights of a text model, which may be a part of a multimodal one."""

from collections.abc import Iterable
from dataclasses import dataclass

from espalier.models.weight_formats import FormatOf, WeightFormat


@dataclass(frozen=True)
class StoredNames:
    """prefixes: of stored names, each with what a checkpoint of the text model alone has in its place.

    has_parts: whether names with none of the prefixes are of other parts (vision, audio), which are not read.
    """

    prefixes: tuple[tuple[str, str], ...] = ()
    has_parts: bool = False

    def own(self, stored: str) -> str | None:
        """What a checkpoint of the text model alone calls a weight; None for a weight of another part."""
        for prefix, own in self.prefixes:
            if stored.startswith(prefix):
                return own + stored.removeprefix(prefix)
        return None if self.has_parts else stored

    def formats(self, formats: FormatOf, stored: Iterable[str]) -> FormatOf:
        """`formats`, which knows names as the checkpoint has them, asked with own names.  stored: all stored names."""
        prefixes = {own: prefix for prefix, own in self.prefixes if any(name.startswith(prefix) for name in stored)}
        if not prefixes:
            return formats

        def of(name: str) -> WeightFormat:
            own = next((own for own in prefixes if f"{name}.".startswith(own)), "")
            return formats((prefixes.get(own, "") + f"{name}.".removeprefix(own)).removesuffix("."))

        return of


AS_OWN = StoredNames()
# The first two are in published checkpoints, the third is how transformers 5 calls them in memory; `mtp.` are MTP
# layers.
TEXT_PART = StoredNames(
    (
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
        ("model.language_model.", "model."),
        ("lm_head.", "lm_head."),
        ("mtp.", "mtp."),
    ),
    has_parts=True,
)
