"""Inputs of batches and what their outputs say."""

import json
from collections.abc import Sequence
from pathlib import Path


def line(number: int, **changes) -> dict:
    body = {"model": "bundled", "prompt": f"def f{number}(", "max_tokens": 4}
    made = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body} | changes
    return {name: value for name, value in made.items() if value is not None}


def write(path: Path, lines: Sequence[dict | str]) -> Path:
    path.write_text("".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in lines))
    return path


def outcomes(path: Path) -> dict[int, str | int]:
    """The error's code or the status by line number.  No line may be answered twice, and each ends with a newline."""
    text = path.read_text()
    assert text.endswith("\n") or not text
    answers = [json.loads(each) for each in text.splitlines()]
    numbers = [int(each["id"].rpartition("_")[2]) for each in answers]
    assert len(set(numbers)) == len(numbers)
    assert all(set(each) == {"id", "custom_id", "response", "error"} for each in answers)
    assert all((each["response"] is None) is not (each["error"] is None) for each in answers)
    results = [each["error"]["code"] if each["error"] else each["response"]["status_code"] for each in answers]
    return dict(zip(numbers, results, strict=True))
