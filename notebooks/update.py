"""Run notebooks and write their outputs into them.

    python notebooks/update.py                    all, in their order
    python notebooks/update.py quickstart inside

Their runs lie in notebooks/runs, which git ignores. What is there is not made again: remove it first for outputs of a
whole run. Not a test: `tests/test_notebooks.py` runs them in an empty folder.
"""

import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
NAMES = "search", "quickstart", "inside", "adapt"


def update(name: str) -> None:
    """Run the notebook of a name, and write it with nothing but its outputs changed."""
    path = FOLDER / f"{name}.ipynb"
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    settings = {"timeout": None, "record_timing": False, "coalesce_streams": True}
    NotebookClient(notebook, resources={"metadata": {"path": str(FOLDER)}}, **settings).execute()
    for output in (output for cell in notebook.cells for output in cell.get("outputs", [])):
        if output.output_type == "stream":
            output.text = output.text.replace("\r\n", "\n")  # of commands, which a terminal is made for
    notebook.metadata.language_info = {"name": "python"}  # without the version of this Python
    nbformat.write(notebook, path)


if __name__ == "__main__":
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # `realm`
    os.environ["REALM_CACHE"] = "runs/cache"  # no path of this machine in what is printed
    for chosen in sys.argv[1:] or NAMES:
        print(chosen, flush=True)
        update(chosen)
