"""The house keeps its order: imports point downward, no state stands in a module, nothing grows too long.

Each rule is a function over a file (its source, or what is parsed of it) that returns what breaks it, and is shown a
planted offence.
"""

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest

from scripts.lines import FOLDERS, functions

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "espalier").rglob("*.py"))
LABORATORY = sorted((ROOT / "lab").rglob("*.py"))
MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 70

# docs/design.md, section 8, from below: a room imports from those that stand below it, rooms of one line not from each
# other.  `request` imports nothing but errors, grammar, limits, logprobs and stats, and anyone may import it.
# "" is espalier/__init__.py, the public face.
FLOORS = (
    ("other_engines",),
    ("child_process", "errors", "cores", "stats", "logprobs", "engine_lock", "stop_strings"),
    ("limits", "chat", "grammar", "model_files"),
    ("gguf_file",),
    ("tokenizer_files", "layout"),
    ("config", "request", "text", "text_limit"),
    ("tool_calls",),
    ("inputs",),
    ("slots", "shards"),
    ("kernels",),
    ("cache",),
    ("attention",),
    ("sampling", "models"),
    ("speculate", "masking"),
    ("engine",),
    ("startup",),
    ("llm",),
    ("",),
    ("batch_jobs", "terminal"),
    ("prompt_files",),
    ("bench", "train"),
    ("learn",),
    ("server",),
    ("serve_ray",),
    ("cli",),
    ("__main__",),
)
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
MUTABLE = {"dict", "list", "set", "defaultdict", "deque", "Counter", "OrderedDict", "bytearray"}
# What containers can do and their frozen counterparts cannot.
MUTATORS = {*dir(list), *dir(dict), *dir(set)} - {*dir(tuple), *dir(frozenset), *dir(MappingProxyType)}
# Functions of transformers that load something which may be code of a checkpoint.
LOADS = re.compile(r"from_pretrained|from_config|get_class_from_dynamic_module|load_custom_generate|pipeline")
OWNERLESS = re.compile(r"\b(?:TODO|FIXME)\b(?!.*\(owner:)")


def room_of(path: Path) -> str:
    """The room of a file under espalier/: its folder, or its name where it stands at the top."""
    top = path.relative_to(ROOT / "espalier").parts[0].removesuffix(".py")
    return "" if top == "__init__" else top


def module_of(path: Path) -> str:
    """The dotted name of a file under espalier/."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


class Found(NamedTuple):
    """What the rules find in a file."""

    imports: list[tuple[int, str]]
    state: list[str]
    long_functions: list[str]
    private: list[str]
    imported_first: frozenset[str]


@cache
def found_in(source: str) -> Found:
    """All at once: to parse a file takes longer than to check it."""
    tree = ast.parse(source)
    return Found(
        list(imports(tree)),
        module_state(tree, "global" in source),
        long_functions(tree),
        list(private_names(tree)),
        frozenset(imported_first(tree)),
    )


def imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, room) of everything that is imported from the house, wherever in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for top, *inner in (name.split(".") for name in names):
            if top == "espalier":
                # What is no room is a name that the public face hands on.
                yield node.lineno, inner[0] if inner and inner[0] in FLOOR else ""


def upward_imports(source: str, room: str) -> list[str]:
    def allowed(other: str) -> bool:
        own = ("errors", "limits", "stats", "logprobs", "grammar")
        return other == room or (FLOOR[other] < FLOOR[room] and (room != "request" or other in own))

    return [
        f"line {line}: {room!r} imports {other!r}" for line, other in found_in(source).imports if not allowed(other)
    ]


def module_names(target: ast.expr) -> Iterator[str]:
    for node in ast.walk(target):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def is_mutable(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call):
        called = value.func
        return (called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")) in MUTABLE
    return isinstance(value, ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp)


def module_mutables(tree: ast.Module) -> dict[str, int]:
    """Names that the module binds to a dict, list or set, and where."""
    found: dict[str, int] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and is_mutable(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {name: node.lineno for target in targets for name in module_names(target)}
    return found


def mutated_names(function: ast.AST) -> Iterator[tuple[int, str]]:
    """Names whose object a function changes in place, unless it binds the name itself."""
    own = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    own |= {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    for node in ast.walk(function):
        changed: ast.expr | None = None
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            changed = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            changed = node.func.value
        if isinstance(changed, ast.Name) and changed.id not in own:
            yield changed.lineno, changed.id


def module_state(tree: ast.Module, says_global: bool) -> list[str]:
    """Heuristic: `global`, a container under a variable's name, or a module's container that a function changes."""
    mutables = module_mutables(tree)
    nodes = list(ast.walk(tree)) if mutables or says_global else []
    found = [f"line {node.lineno}: global" for node in nodes if isinstance(node, ast.Global)]
    found += [
        f"line {line}: {name} is a variable" for name, line in mutables.items() if name.islower() and name[0] != "_"
    ]
    for function in nodes:
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            changed = [(line, name) for line, name in mutated_names(function) if name in mutables]
            found += [f"line {line}: {name} is changed by a function" for line, name in changed]
    return found


def long_functions(tree: ast.Module) -> list[str]:
    found = functions(tree)
    return [f"line {line}: {name} has {length} lines" for name, line, length in found if length > MAX_FUNCTION_LINES]


def private_names(tree: ast.Module) -> Iterator[str]:
    """Names with an underscore that come from another file of the house: imported, or read from its module."""
    modules: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("espalier"):
            modules |= {alias.asname or alias.name for alias in node.names if alias.name.islower()}
            for name in (alias.name for alias in node.names if is_private(alias.name)):
                yield f"line {node.lineno}: imports {name}"
        elif isinstance(node, ast.Import):
            of_house = (alias for alias in node.names if alias.name.startswith("espalier"))
            modules |= {alias.asname or alias.name for alias in of_house}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and ast.unparse(node.value) in modules:
            yield f"line {node.lineno}: reads {ast.unparse(node)}"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def imported_first(tree: ast.Module) -> Iterator[str]:
    """What the import of a file imports, as dotted names; of `from m import n` both m and m.n, as n may be a module."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names))


def runs_code_of_a_checkpoint(source: str) -> list[str]:
    """Calls into transformers that load something and do not say that a checkpoint's code stays off."""
    if not LOADS.search(source):
        return []
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and LOADS.fullmatch(ast.unparse(node.func).rpartition(".")[2]):
            says = {each.arg: each.value for each in node.keywords}
            off = says.get("trust_remote_code")
            if not (isinstance(off, ast.Constant) and off.value is False):
                found.append(f"line {node.lineno}: {ast.unparse(node.func)} without trust_remote_code=False")
    return found


def ownerless_comments(source: str) -> list[str]:
    if not OWNERLESS.search(source):
        return []
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = [token for token in tokens if token.type == tokenize.COMMENT and OWNERLESS.search(token.string)]
    return [f"line {token.start[0]}: {token.string}" for token in comments]


def breaches(rule: Callable[[str], list[str]], files: Sequence[Path] = SOURCES) -> list[str]:
    found = ((path.relative_to(ROOT), rule(path.read_text(encoding="utf-8"))) for path in files)
    return [f"{path} {breach}" for path, breaches in found for breach in breaches]


def test_every_room_has_its_floor():
    assert SOURCES
    assert {room_of(path) for path in SOURCES} <= FLOOR.keys()


def test_imports_point_downward():
    found = [
        f"{path.relative_to(ROOT)} {breach}"
        for path in SOURCES
        for breach in upward_imports(path.read_text(encoding="utf-8"), room_of(path))
    ]
    assert not found, "\n".join(found)


def outside_imports(source: str) -> list[str]:
    """Imports of what is not installed with the package, wherever in the file, and names of its modules in strings."""
    return re.findall(r"^\s*(?:from|import) (?:lab|tests|scripts)\b.*|[\"']lab\.\w.*", source, re.M)


def test_the_package_imports_nothing_of_the_laboratory():
    found = breaches(outside_imports)
    assert not found, "\n".join(found)


def test_no_state_stands_in_a_module():
    found = breaches(lambda source: found_in(source).state, [*SOURCES, *LABORATORY])
    assert not found, "\n".join(found)


def test_a_checkpoints_code_never_runs():
    found = breaches(runs_code_of_a_checkpoint, [*SOURCES, *LABORATORY])
    assert not found, "\n".join(found)


def test_files_and_functions_stay_short():
    files = [*SOURCES, *LABORATORY]
    found = breaches(lambda source: found_in(source).long_functions, files)
    lengths = {path.relative_to(ROOT): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    found += [f"{path} has {length} lines" for path, length in lengths.items() if length > MAX_FILE_LINES]
    assert not found, "\n".join(found)


def test_private_names_stay_in_their_file():
    found = breaches(lambda source: found_in(source).private, [*SOURCES, *LABORATORY])
    assert not found, "\n".join(found)


def test_only_launchers_import_triton():
    """`import espalier` and every CPU path work without Triton.  What a function imports, it imports when it runs."""
    imported = {module_of(path): found_in(path.read_text(encoding="utf-8")).imported_first for path in SOURCES}
    need_triton = {"triton"}
    while grown := {name for name, others in imported.items() if need_triton & others} - need_triton:
        need_triton |= grown
    launchers = {name for name in need_triton if name.startswith("espalier.kernels.")}
    assert len(launchers) > 50 and need_triton - launchers == {"triton"}
    assert not [name for name in launchers if name.startswith("espalier.kernels.ops.")]


def test_what_is_left_to_do_has_an_owner():
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    found = breaches(ownerless_comments, files)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("cache", "from espalier.attention.base import Backend"),
        ("cache", "def f():\n    import espalier.engine.engine"),
        ("kernels", "if TYPE_CHECKING:\n    from espalier import cache"),
        ("sampling", "from espalier.models import base"),
        ("request", "from espalier.config import Config"),
        ("engine", "from espalier import LLM"),
    ],
)
def test_an_upward_import_is_seen(room, source):
    assert len(upward_imports(source, room)) == 1


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("speculate", "from espalier.sampling.pick import pick\nfrom espalier.models.base import CausalLM"),
        ("errors", "import torch\nfrom os import path"),
        ("slots", "from espalier.request import Request"),
        ("engine", "from espalier.engine.launch_input import LaunchInput"),
        ("cli", "from espalier import LLM, bench"),
    ],
)
def test_a_downward_import_is_not(room, source):
    assert upward_imports(source, room) == []


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("from lab.bench import round", 1),
        ("def f():\n    import lab.synthetic.chain", 1),
        ("WORKER = 'lab.shape_worker'", 1),
        ("from label import lab\nlab = 'lab'", 0),
    ],
)
def test_an_import_of_the_laboratory_is_seen(source, count):
    assert len(outside_imports(source)) == count


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("AutoTokenizer.from_pretrained(path)", 1),
        ("x.from_pretrained(path, trust_remote_code=remote)", 1),
        ("x.from_pretrained(path, **options)", 1),
        ("get_class_from_dynamic_module(name, path)", 1),
        ("AutoModel.from_config(config)", 1),
        ("pipeline('text-generation', model=path)", 1),
        ("AutoTokenizer.from_pretrained(path, trust_remote_code=False)", 0),
    ],
)
def test_code_of_a_checkpoint_is_seen(source, count):
    assert len(runs_code_of_a_checkpoint(source)) == count


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("N = 0\ndef f():\n    global N\n    N += 1", 1),
        ("cache = {}", 1),
        ("engines: list[int] = list()", 1),
        ("TABLE = {}\ndef f(k):\n    TABLE[k] = 1", 1),
        ("TABLE = {}\ndef f(k):\n    del TABLE[k]", 1),
        ("SEEN = set()\nclass A:\n    def f(self, k):\n        SEEN.add(k)", 1),
        ("TABLE = {'a': 1}\ndef f(k):\n    return TABLE[k]", 0),
        ("TABLE = {}\ndef f(TABLE):\n    TABLE.clear()", 0),
        ("pages = (1, 2)", 0),
        ("def f():\n    found = []\n    found.append(1)", 0),
    ],
)
def test_state_in_a_module_is_seen(source, count):
    assert len(found_in(source).state) == count


def test_a_long_function_is_seen():
    body = "    pass\n" * MAX_FUNCTION_LINES
    assert found_in(f"@decorated\ndef f():\n{body}").long_functions == [f"line 1: f has {MAX_FUNCTION_LINES + 2} lines"]
    assert found_in("def f():\n" + "    pass\n" * (MAX_FUNCTION_LINES - 1)).long_functions == []


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("from espalier.cache.kv import _rows, rows", 1),
        ("from espalier.cache import kv\nkv._rows()", 1),
        ("import espalier.cache.kv as pages\npages._rows()", 1),
        ("import espalier.cache.kv\nespalier.cache.kv._rows()", 1),
        ("from torch import _C\nimport torch\ntorch._C", 0),
        ("from espalier.cache import kv\nkv.__name__\nself._rows()", 0),
        ("from espalier.speculate.pieces import Pieces\nPieces._fields", 0),
    ],
)
def test_a_private_name_of_another_file_is_seen(source, count):
    assert len(found_in(source).private) == count


@pytest.mark.parametrize(
    ("comment", "count"),
    [
        ("# TODO faster", 1),
        ("# FIXME(someone)", 1),
        ("# TODO(owner: kernels) when blocks grow", 0),
        ("# TODO (owner: kernels) when blocks grow", 0),
        ("# TODO later (owner: kernels)", 0),
        ("s = 'TODO'", 0),
    ],
)
def test_a_comment_without_owner_is_seen(comment, count):
    assert len(ownerless_comments(comment)) == count
