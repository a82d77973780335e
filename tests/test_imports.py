"""Imports run downhill: what a package may import is what stands above it in docs/design.md, and in this list."""

import ast
from pathlib import Path

import realm_jax

ROOT = Path(realm_jax.__file__).parent
# The lowest first. A module or package imports from those before it alone; configs/ are users' files.
LAYERS = (
    *(
        "version",
        "errors",
        "storage",
        "mirror",
        "run_log",
        "processes",
        "mesh",
        "console",
        "checksums",
        "cache",
        "host",
        "environment",
    ),
    *("data", "models", "config", "corpora", "retrieval", "forward", "run", "flops"),
    *("eval", "tasks", "assemble"),
    *("indexing", "train", "search_index", "adaptation", "inference", "serving", "launch", "cli"),
    *("api", "__main__"),
)


def imported(path: Path) -> set[str]:
    """Packages and top-level modules of realm_jax that a file imports, also inside of functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "realm_jax":
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("realm_jax."):
            found.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {name.name.split(".")[1] for name in node.names if name.name.startswith("realm_jax.")}
    return found & {*LAYERS}


def test_a_package_imports_only_what_is_below_it():
    for number, layer in enumerate(LAYERS):
        files = [ROOT / f"{layer}.py"] if (ROOT / f"{layer}.py").is_file() else sorted((ROOT / layer).rglob("*.py"))
        allowed = {*LAYERS[: number + 1]}
        assert files and {str(path): wrong for path in files if (wrong := imported(path) - allowed)} == {}


def test_every_module_has_its_layer():
    there = {path.stem for path in ROOT.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert there - {"__init__", "configs"} == {*LAYERS}
