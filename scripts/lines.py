"""Print the size of the project: lines of code by package, the longest file, the longest function.

    python scripts/lines.py --before COMMIT
    python scripts/lines.py --of COMMIT

A line of code has something other than a comment or a docstring.  With --of, how much of today's package is as old as a
commit: by `git blame`, which follows lines that moved or were indented, in some minutes.
"""

import ast
import io
import subprocess
import tarfile
import tokenize
from argparse import ArgumentParser
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("espalier", "lab", "tests", "scripts")
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
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NOT_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstring_lines(ast.parse(source)))


def package(path: Path) -> str:
    """The folder under which a file is counted, at most two levels deep: "espalier/cache"."""
    return "/".join(path.parts[:-1][:2])


def sources_now() -> Iterator[tuple[Path, str]]:
    """(path in the project, source) of every file."""
    for file in sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")):
        yield file.relative_to(ROOT), file.read_text(encoding="utf-8")


def sources_at(commit: str) -> Iterator[tuple[Path, str]]:
    """The same of a commit.  Folders that it did not have are left out."""
    packed = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive:
            path = Path(member.name)
            if path.suffix == ".py" and path.parts[0] in (*FOLDERS, "tools"):
                file = archive.extractfile(member)
                assert file is not None
                yield path, file.read().decode()


def counted(sources: Iterable[tuple[Path, str]]) -> dict[str, list[int]]:
    """[files, lines, lines of code] by folder."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for path, source in sources:
        for name in {package(path), f"{path.parts[0]}, all"}:
            for column, number in enumerate((1, len(source.splitlines()), code_lines(source))):
                counts[name][column] += number
    return counts


def largest(sources: Iterable[tuple[Path, str]]) -> Iterator[str]:
    """The longest file of the package, and its longest function."""
    files, found = [], []
    for path, source in sources:
        if path.parts[0] == "espalier":
            files.append((len(source.splitlines()), str(path)))
            found += [(length, f"{path}:{line} {name}") for name, line, length in functions(ast.parse(source))]
    yield "longest file      {} lines  {}".format(*max(files))
    yield "longest function  {} lines  {}".format(*max(found))


def of_commit(commit: str) -> str:
    """The lines of today's package that are as old as a commit, and the files that have most of them."""
    as_old = newer = files = 0
    for file in sorted((ROOT / "espalier").rglob("*.py")):
        blame = ["git", "blame", "-w", "-C", "-M", "-s", f"{commit}..HEAD", "--", str(file)]
        lines = subprocess.run(blame, cwd=ROOT, capture_output=True, check=True, text=True).stdout.splitlines()
        old = sum(line.startswith("^") for line in lines)
        as_old, newer, files = as_old + old, newer + len(lines) - old, files + (2 * old > len(lines))
    return f"as old as {commit}: {as_old} lines of {as_old + newer}; files with a majority of such lines: {files}"


def main(given: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description="Print the size of the project.")
    parser.add_argument("--before", metavar="COMMIT", help="print the sizes at this commit beside those of today")
    parser.add_argument(
        "--of", metavar="COMMIT", help="print only the lines of the package that are as old as this commit"
    )
    args = parser.parse_args(given)
    if args.of:
        print(of_commit(args.of))
        return
    sides = [sources_at(args.before)] if args.before else []
    tables = [counted(side) for side in [*sides, sources_now()]]
    print(f"{'package':<22}" + f"{'files':>7}{'lines':>8}{'code':>8}" * len(tables))
    for name in sorted(set().union(*tables)):
        print(f"{name:<22}" + "".join("{:>7}{:>8}{:>8}".format(*table[name]) for table in tables))
    for line in largest(sources_now()):
        print(line)


if __name__ == "__main__":
    main()
