"""Print the calls from `LLM.generate` to an attention product of the target, and the records that they hand on.

    python scripts/frames.py

A CPU engine of the bundled model runs one round in lock-step.  Counted is the first product of its verify pass.  Beside
it: the places that construct a pass and those that construct a residual stream (`Residual`).
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from espalier import LLM, SamplingParams
from espalier.attention import Pass, sdpa

PACKAGE = Path(sdpa.__file__).resolve().parents[1]
FROM, THROUGH = "decode_round", "verify"


def frames_from(frame: FrameType | None) -> Iterator[FrameType]:
    """The package's frames, the innermost first, up to `LLM.generate`."""
    while frame is not None:
        if PACKAGE in Path(frame.f_code.co_filename).parents:
            yield frame
            if frame.f_code.co_qualname == "LLM.generate":
                return
        frame = frame.f_back


def records_of(frame: FrameType) -> set[str]:
    """The names of the record types among the arguments of a call, and among the parts of a pass."""
    code = frame.f_code
    given = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount]]
    parts = [part for value in given if isinstance(value, Pass) for part in vars(value).values()]
    return {type(value).__name__ for value in (*given, *parts) if is_record(value)}


def is_record(value: Any) -> bool:
    """Models and their layers are dataclasses too, but no records."""
    module = type(value).__module__
    is_ours = module.startswith("espalier.") and not module.startswith("espalier.models.")
    return is_ours and (is_dataclass(value) or isinstance(value, tuple))


def places_that_construct(name: str) -> list[str]:
    return [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
    ]


def main() -> None:
    found: list[list[FrameType]] = []
    product = sdpa.scaled_dot_product_attention

    def watched(*args: Any, **kwargs: Any) -> Any:
        frames = [*frames_from(sys._getframe(1))][::-1]
        if not found and any(frame.f_code.co_name == THROUGH for frame in frames):
            calls = [
                (Path(f.f_code.co_filename).relative_to(PACKAGE), f.f_code.co_qualname, records_of(f)) for f in frames
            ]
            report(calls)
            found.append(frames)
        return product(*args, **kwargs)

    sdpa.scaled_dot_product_attention = watched
    with LLM("bundled", device="cpu", overlap=False) as llm:
        llm.generate("def f(", SamplingParams(max_tokens=4, temperature=0))
    for name in ("Pass", "Residual"):
        places = places_that_construct(name)
        print(f"{name} is constructed in {len(places)} places: {', '.join(places)}")


def report(calls: list[tuple[Path, str, set[str]]]) -> None:
    for path, name, records in calls:
        print(f"{path!s:36}{name:32}{', '.join(sorted(records))}")
    begins = [name for _, name, _ in calls].index(FROM) + 1
    of_round = sorted({record for _, _, records in calls[begins:] for record in records})
    print(f"{len(calls)} calls in {len({path for path, _, _ in calls})} files")
    print(f"{len(of_round)} records from a round to the product: {', '.join(of_round)}")


if __name__ == "__main__":
    main()
