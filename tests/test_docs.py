"""What documents for contributors and scripts name is there: files, modules of a package, classes and constants."""

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "realm_jax"
PAGES = ("CONTRIBUTING.md", "docs/design.md")
SOURCE = "\n".join(path.read_text() for folder in ("realm_jax", "tests") for path in (ROOT / folder).rglob("*.py"))
PACKAGES = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}


def named(page: str, pattern: str) -> set[str]:
    """What stands in backticks on a page and looks like this."""
    quoted = re.findall(r"`([^`\n]+)`", (ROOT / page).read_text())
    return {part for part in quoted if re.fullmatch(pattern, part)}


def is_there(module: str) -> bool:
    return any((folder / f"{module}{ending}").exists() for folder in (PACKAGE, ROOT) for ending in ("", ".py"))


@pytest.mark.parametrize("page", PAGES)
def test_modules_that_a_page_names_are_there(page):
    names = named(page, r"(realm_jax/)?[a-z_]+/[a-z_0-9]+(\.py)?")
    modules = {name.removeprefix("realm_jax/").removesuffix(".py") for name in names}
    modules = {module for module in modules if module.partition("/")[0] in PACKAGES}
    assert len(modules) > 5
    assert not {module for module in modules if not is_there(module)}


@pytest.mark.parametrize("page", PAGES)
def test_classes_and_constants_that_a_page_names_are_there(page):
    names = named(page, r"[A-Z][a-z]+[A-Za-z]*|[A-Z]+(_[A-Z]+)+") | {
        part.rpartition(".")[2] for part in named(page, r"[a-z_.]*[A-Z][A-Za-z]+(\.[a-z_]+)?") if "." in part
    }
    others = {"ConfigDict", "SIGTERM", "TASK"}  # of libraries, or of paths
    assert not {name for name in names - others if not re.search(rf"\b{name}\b", SOURCE)}


@pytest.mark.parametrize("folder", ["benchmarks", "launch"])
def test_what_scripts_import_from_the_package_is_there(folder):
    """Scripts that no test runs."""
    trees = {path.name: ast.parse(path.read_text()) for path in (ROOT / folder).glob("*.py")}
    lines = [
        (name, node) for name, tree in trees.items() for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
    ]
    wanted = {
        (name, node.module, alias.name)
        for name, node in lines
        if (node.module or "").startswith("realm_jax")
        for alias in node.names
    }
    assert wanted
    for name, module, attribute in wanted:
        found = importlib.import_module(module)
        assert hasattr(found, attribute) or importlib.import_module(f"{module}.{attribute}"), f"{name}: {module}"
