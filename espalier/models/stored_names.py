"""The names of a text model's weights in a checkpoint.  The checkpoint may be of a multimodal model."""

from collections.abc import Iterable
from dataclasses import dataclass

from espalier.models.weight_formats import FormatOf, WeightFormat


@dataclass(frozen=True)
class StoredNames:
    """An *own name* is the name of a weight in a checkpoint of the text model alone.

    prefixes: (beginning of a stored name, beginning of the own name) pairs.  has_parts: whether names with other
    beginnings belong to other parts (vision, audio), which are not read.
    """

    prefixes: tuple[tuple[str, str], ...] = ()
    has_parts: bool = False

    def own(self, stored: str) -> str | None:
        """The own name of a stored name; None for a weight of another part."""
        for prefix, own in self.prefixes:
            if stored.startswith(prefix):
                return own + stored.removeprefix(prefix)
        return None if self.has_parts else stored

    def formats(self, formats: FormatOf, stored: Iterable[str]) -> FormatOf:
        """A FormatOf that takes own names, made from `formats`, which takes stored names.  stored: all stored names."""
        prefixes = {own: prefix for prefix, own in self.prefixes if any(name.startswith(prefix) for name in stored)}
        if not prefixes:
            return formats

        def of(name: str) -> WeightFormat:
            own = next((own for own in prefixes if f"{name}.".startswith(own)), "")
            return formats((prefixes.get(own, "") + f"{name}.".removeprefix(own)).removesuffix("."))

        return of


AS_OWN = StoredNames()
# Published checkpoints have the first two prefixes.  transformers 5 has the third in memory.  `mtp.` are MTP layers.
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
