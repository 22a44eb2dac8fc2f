"""The formats of tool calls and of reasoning, by name.  The chat template tells a model's formats."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

from espalier.errors import EspalierError
from espalier.tool_calls.base import MISTRAL_REASONING, THINK_REASONING, ReasoningFormat, ToolFormat
from espalier.tool_calls.formats import deepseek, harmony, llama, mistral, tagged

# In this order, the signs of each format are searched in a template.  A format whose signs include another format's
# signs comes first.
_TOOLS = (
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
_REASONING = (harmony.REASONING_FORMAT, MISTRAL_REASONING, THINK_REASONING)
TOOL_FORMATS: Mapping[str, ToolFormat] = MappingProxyType({each.name: each for each in _TOOLS})
REASONING_FORMATS: Mapping[str, ReasoningFormat] = MappingProxyType({each.name: each for each in _REASONING})
AUTO, NONE = "auto", "none"
F = TypeVar("F", ToolFormat, ReasoningFormat)


@dataclass(frozen=True)
class Formats:
    """The formats of a model, None where it has none."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None


def find_formats(template: str, tool_format: str = AUTO, reasoning_format: str = AUTO) -> Formats:
    """Returns the formats of a model, found by the text of its chat template or by name.

    Raises EspalierError for a name that does not exist.
    """
    # The harmony format reads both calls and reasoning.
    if tool_format == harmony.TOOL_FORMAT.name and reasoning_format == AUTO:
        reasoning_format = harmony.REASONING_FORMAT.name
    if reasoning_format == harmony.REASONING_FORMAT.name and tool_format == AUTO:
        tool_format = harmony.TOOL_FORMAT.name
    tools = _find("tool_format", tool_format, TOOL_FORMATS, template)
    reasoning = _find("reasoning_format", reasoning_format, REASONING_FORMATS, template)
    if (
        tools is not None
        and tools.name == harmony.TOOL_FORMAT.name
        and (reasoning is None or not reasoning.includes_calls)
    ):
        raise EspalierError("tool_format='harmony' needs reasoning_format='harmony': its calls stand in channels too")
    if reasoning is not None and reasoning.includes_calls and tools is not None and tools.name != reasoning.name:
        raise EspalierError(
            f"reasoning_format={reasoning.name!r} with tool_format={tools.name!r} is not supported; use "
            f"{reasoning.name!r} or 'none' for tools"
        )
    return Formats(tools, reasoning)


def _find(flag: str, name: str, formats: Mapping[str, F], template: str) -> F | None:
    if name == AUTO:
        return next((each for each in formats.values() if all(sign in template for sign in each.template_signs)), None)
    if name == NONE:
        return None
    if name not in formats:
        raise EspalierError(f"{flag}={name!r} is not supported; use {', '.join((AUTO, NONE, *sorted(formats)))}")
    return formats[name]
