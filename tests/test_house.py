"""The order of the house: who may import whom, what nobody does, and that every part is small, explained and tested."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import pymesh3d

ROOT = Path(__file__).parents[1]

# From the ground up. A file imports only from the layers below its own, and from its own layer where that is not APART.
LAYERS = (
    {"errors", "config"},
    {"placement", "schedule", "planner"},
    {"axis", "mesh", "process_groups", "rendezvous", "topology"},
    {"triton_kernels", "_C"},
    {"random", "initial"},
    {"comm"},
    {"ops"},
    {"tp", "pp", "dp", "checkpoint"},
    {"models", "data"},
    {"engine"},
    {"launch", "bench"},
    {"commands"},
    {"cli"},
    {"__main__"},
)
APART = {"tp", "pp", "dp", "checkpoint"}
PURE = ("errors", "config", "placement", "schedule", "planner")
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}
LONGEST = 500

UNTRUSTED_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
UNTRUSTED_CALLS = {"eval", "exec", "torch.load", "torch.save"}
OBJECT_COLLECTIVES = {
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}


def module_name(path: Path) -> str:
    """The name under which a file of the package is imported: `triton_kernels/x.py` is `pymesh3d.triton_kernels.x`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "pymesh3d" else ("pymesh3d", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_files() -> dict[str, Path]:
    """Every module of the package and its file; the two linked folders are read where they really are."""
    files = [
        path
        for folder in ("pymesh3d", "triton_kernels", "bench")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "results" not in path.parts and path.relative_to(ROOT).parts[:2] not in {("pymesh3d", "triton_kernels"), ("pymesh3d", "bench")}
    ]
    return {module_name(path): path for path in files}


FILES = package_files()
TREES = {name: ast.parse(path.read_text(), str(path)) for name, path in FILES.items()}


def part_of(module: str) -> str:
    """`pymesh3d.tp.layers` belongs to the part `tp`."""
    return module.split(".")[1] if "." in module else ""


def outside_type_checking(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under `if TYPE_CHECKING:`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        yield node
        yield from outside_type_checking(node)


def imports(name: str) -> Iterator[tuple[str, ast.stmt]]:
    """The modules of ours that module `name` imports when it runs, with the statement."""
    package = name if FILES[name].name == "__init__.py" else name.rpartition(".")[0]
    for node in outside_type_checking(TREES[name]):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            inner = [f"{base}.{alias.name}" for alias in node.names]
            targets = [target if target in FILES or target == "pymesh3d._C" else base for target in inner]
        else:
            continue
        yield from ((target, node) for target in targets if target.split(".")[0] == "pymesh3d")


def dotted(node: ast.AST) -> str:
    """`torch.load` for the expression torch.load; empty for what is no chain of names."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def place(name: str, node: ast.stmt | ast.expr) -> str:
    return f"{FILES[name].relative_to(ROOT)}:{node.lineno}"


def test_every_part_has_a_layer() -> None:
    assert {part_of(name) for name in FILES} - {""} <= set(LEVEL)


def test_files_import_from_lower_layers_only() -> None:
    wrong = []
    for name in FILES:
        mine = part_of(name)
        for target, node in imports(name):
            other = part_of(target)
            if mine == other or not other or not {mine, other} <= set(LEVEL):  # the package itself holds only the version
                continue
            if LEVEL[other] > LEVEL[mine] or {mine, other} <= APART:
                wrong.append(f"{place(name, node)} ({mine}) imports {target}")
    assert not wrong, "\n".join(wrong)


def test_no_import_cycles() -> None:
    graph = {name: {target for target, _ in imports(name) if target != "pymesh3d"} for name in FILES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_nothing_of_ours_is_imported_inside_functions() -> None:
    wrong = []
    for name, tree in TREES.items():
        inside = {
            child
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            for child in ast.walk(node)
            if isinstance(child, ast.Import | ast.ImportFrom)
        }
        wrong += [f"{place(name, node)} imports {target}" for target, node in imports(name) if node in inside]
    assert not wrong, "\n".join(wrong)


def test_linked_folders_import_themselves_relatively() -> None:
    """Elsewhere than in the package they would be found under another name and loaded twice."""
    wrong = [
        f"{place(name, node)}: {target}"
        for name in FILES
        for target, node in imports(name)
        if part_of(name) in {"triton_kernels", "bench"} and part_of(name) == part_of(target)
        if not (isinstance(node, ast.ImportFrom) and node.level)
    ]
    assert not wrong, "\n".join(wrong)


def test_only_comm_touches_the_core_and_symmetric_memory() -> None:
    wrong = []
    for name, tree in TREES.items():
        if part_of(name) == "comm":
            continue
        wrong += [f"{place(name, node)} imports {target}" for target, node in imports(name) if target == "pymesh3d._C"]
        for node in ast.walk(tree):
            words = [node.attr] if isinstance(node, ast.Attribute) else []
            if isinstance(node, ast.Import | ast.ImportFrom):
                words = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
            if any("_symmetric_memory" in word.split(".") for word in words):
                wrong.append(f"{place(name, node)} uses symmetric memory")
    assert not wrong, "\n".join(wrong)


COLLECTIVES = {"all_reduce_", "all_gather", "reduce_scatter", "all_to_all", "broadcast_", "gather_rows"}
TO_HOST = {"tolist", "cpu", "item", "numpy", "float", "int", "bool"}


def called_in(node: ast.AST) -> set[str]:
    """The last names of all that is called in an expression."""
    return {dotted(call.func).rpartition(".")[2] or getattr(call.func, "attr", "") for call in ast.walk(node) if isinstance(call, ast.Call)}


def test_the_host_waits_for_collectives_with_a_limit_only() -> None:
    """Not in the driver, where a lost peer keeps it for ever: through `comm.watch.on_host`."""
    wrong = []
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            called = called_in(node) if isinstance(node, ast.Call) else set[str]()
            if called & TO_HOST and called & COLLECTIVES and "on_host" not in called:
                wrong.append(f"{FILES[name].relative_to(ROOT)}:{node.lineno}")
    assert not wrong, "\n".join(wrong)


WITHOUT_TORCH = """
import importlib, sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "triton"):
            raise ModuleNotFoundError(f"{name} is blocked: pure parts import without it", name=name)
sys.meta_path.insert(0, Block())
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def test_pure_parts_import_without_torch() -> None:
    pure = ["pymesh3d", *(name for name in FILES if part_of(name) in PURE)]
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *pure], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_nothing_untrusted_is_read_and_no_objects_are_sent() -> None:
    wrong = []
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                bad = {alias.name for alias in node.names} & UNTRUSTED_MODULES
            elif isinstance(node, ast.ImportFrom):
                bad = {node.module or ""} & UNTRUSTED_MODULES or {alias.name for alias in node.names} & OBJECT_COLLECTIVES
            elif isinstance(node, ast.Call):
                called = dotted(node.func)
                bad = {called} & UNTRUSTED_CALLS or {called.rpartition(".")[2]} & OBJECT_COLLECTIVES
                bad |= {"allow_pickle" for word in node.keywords if word.arg == "allow_pickle" and getattr(word.value, "value", True)}
            elif isinstance(node, ast.Global):
                bad = {"global"}
            else:
                continue
            wrong += [f"{place(name, node)}: {word}" for word in bad]
    assert not wrong, "\n".join(wrong)


def test_asserts_have_messages() -> None:
    asserts = [(name, node) for name, tree in TREES.items() for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    wrong = [place(name, node) for name, node in asserts if node.msg is None]
    assert not wrong, "\n".join(wrong)


def public_definitions(body: list[ast.stmt]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """Functions and classes of a module, and the methods of its classes, that a reader may call."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from public_definitions(node.body)


# Their meaning is torch's.
OVERRIDES = {"forward", "backward", "setup_context", "extra_repr", "send", "post", "take", "flush"}  # of torch, and of a Link


def test_public_things_have_docstrings() -> None:
    wrong = [str(FILES[name].relative_to(ROOT)) for name, tree in TREES.items() if not ast.get_docstring(tree) and tree.body]
    for name, tree in TREES.items():
        for node in public_definitions(tree.body):
            if not ast.get_docstring(node) and node.name not in OVERRIDES:
                wrong.append(f"{place(name, node)}: {node.name}")
    assert not wrong, "\n".join(wrong)


def test_files_are_short() -> None:
    tests = [path for ending in ("py", "cpp", "h") for path in (ROOT / "tests").rglob(f"*.{ending}")]
    ours = [*FILES.values(), *tests, *(ROOT / "csrc").iterdir()]
    long = [f"{path.relative_to(ROOT)}: {count} lines" for path in ours if (count := len(path.read_text().splitlines())) > LONGEST]
    assert not long, "\n".join(long)


def test_every_kernel_file_has_a_test_of_its_name() -> None:
    tests = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    kernels = {path.name for path in (ROOT / "triton_kernels").glob("*.py")} - {"__init__.py", "signals.py"}
    assert not [name for name in sorted(kernels) if f"test_{name}" not in tests]


def test_public_names_resolve() -> None:
    for name in pymesh3d.__all__:
        assert name in dir(pymesh3d)
        assert getattr(pymesh3d, name).__name__ == name


def test_type_checker_sees_the_same_public_names() -> None:
    seen = {
        alias.asname: node.module
        for block in TREES["pymesh3d"].body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == {name: f"pymesh3d.{module}" for name, module in pymesh3d._MODULE_OF.items()}


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'pymesh3d' has no attribute 'Mash'"):
        pymesh3d.Mash  # noqa: B018
