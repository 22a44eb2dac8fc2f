"""The formats of tool calls and of reasoning, by name.  By default, the text of a model's chat template decides."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

from espalier.errors import EspalierError
from espalier.tool_calls.base import MISTRAL_REASONING, THINK_REASONING, ReasoningFormat, ToolFormat
from espalier.tool_calls.formats import deepseek, harmony, llama, mistral, tagged

# A chat template gets the first format in this order whose template_signs are all in the template.  So a format with
# more signs comes before a format with only some of these signs.
_TOOL_FORMATS = (
    harmony.TOOL_FORMAT,
    tagged.GLM_FORMAT,
    tagged.QWEN_CODER_FORMAT,
    tagged.HERMES_FORMAT,
    deepseek.V3_FORMAT,
    deepseek.V31_FORMAT,
    mistral.NAMED_FORMAT,
    mistral.LIST_FORMAT,
    llama.TOOL_FORMAT,
)
_REASONING_FORMATS = (harmony.REASONING_FORMAT, MISTRAL_REASONING, THINK_REASONING)
TOOL_FORMATS: Mapping[str, ToolFormat] = MappingProxyType({each.name: each for each in _TOOL_FORMATS})
REASONING_FORMATS: Mapping[str, ReasoningFormat] = MappingProxyType({each.name: each for each in _REASONING_FORMATS})
AUTO, NONE = "auto", "none"
Format = TypeVar("Format", ToolFormat, ReasoningFormat)


@dataclass(frozen=True)
class Formats:
    """A model's formats.  tools: None if the model writes no tool calls.  reasoning: None if it does not reason."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None


def find_formats(template: str, tool_format: str = AUTO, reasoning_format: str = AUTO) -> Formats:
    """Returns a model's formats: by name, or for "auto" by the text of its chat template.  Raises EspalierError."""
    # The harmony format parses both calls and reasoning.
    if tool_format == harmony.TOOL_FORMAT.name and reasoning_format == AUTO:
        reasoning_format = harmony.REASONING_FORMAT.name
    if reasoning_format == harmony.REASONING_FORMAT.name and tool_format == AUTO:
        tool_format = harmony.TOOL_FORMAT.name
    tools = _find_format("tool_format", tool_format, TOOL_FORMATS, template)
    reasoning = _find_format("reasoning_format", reasoning_format, REASONING_FORMATS, template)
    if tools is harmony.TOOL_FORMAT and (reasoning is None or not reasoning.includes_calls):
        raise EspalierError("tool_format='harmony' needs reasoning_format='harmony': its calls stand in channels too")
    if reasoning is not None and reasoning.includes_calls and tools is not None and tools.name != reasoning.name:
        raise EspalierError(
            f"reasoning_format={reasoning.name!r} with tool_format={tools.name!r} is not supported; use "
            f"{reasoning.name!r} or 'none' for tools"
        )
    return Formats(tools, reasoning)


def _find_format(flag: str, name: str, formats: Mapping[str, Format], template: str) -> Format | None:
    """Returns the format `name`; None for "none".  For "auto": the first format that the chat template fits."""
    if name == AUTO:
        return next((each for each in formats.values() if all(sign in template for sign in each.template_signs)), None)
    if name == NONE:
        return None
    if name not in formats:
        raise EspalierError(f"{flag}={name!r} is not supported; use {', '.join((AUTO, NONE, *sorted(formats)))}")
    return formats[name]
