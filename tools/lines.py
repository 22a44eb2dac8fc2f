"""Print the size of the project: lines of code by package, the longest file, the longest function.

    python tools/lines.py

A line of code has something other than a comment or a docstring.
"""

import ast
import io
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("espalier", "lab", "tests", "tools")
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}


def functions(tree: ast.AST) -> Iterator[tuple[str, int, int]]:
    """(name, line, lines) of every function, decorators and docstring included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            yield node.name, first, (node.end_lineno or first) - first + 1


def docstring_lines(tree: ast.AST) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            lines |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return lines


def code_lines(source: str) -> int:
    """The number of lines with code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NOT_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstring_lines(ast.parse(source)))


def package(path: Path) -> str:
    """The folder under which a file is counted, at most two levels deep: "espalier/cache"."""
    return "/".join(path.parts[:-1][:2])


def main() -> None:
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    longest_file, longest_function = (0, ""), (0, "")
    for file in sorted(
        file for folder in ("espalier", "lab", "tests", "tools") for file in (ROOT / folder).rglob("*.py")
    ):
        source = file.read_text(encoding="utf-8")
        path = file.relative_to(ROOT)
        num_lines = len(source.splitlines())
        for name in {package(path), f"{path.parts[0]}, all"}:
            for column, number in enumerate((1, num_lines, code_lines(source))):
                counts[name][column] += number
        if path.parts[0] == "espalier":
            longest_file = max(longest_file, (num_lines, str(path)))
            for function, line, length in functions(ast.parse(source)):
                longest_function = max(longest_function, (length, f"{path}:{line} {function}"))
    print(f"{'package':<22}{'files':>7}{'lines':>8}{'code':>8}")
    for name in sorted(counts):
        print(f"{name:<22}" + "{:>7}{:>8}{:>8}".format(*counts[name]))
    print(f"longest file      {longest_file[0]} lines  {longest_file[1]}")
    print(f"longest function  {longest_function[0]} lines  {longest_function[1]}")


if __name__ == "__main__":
    main()
