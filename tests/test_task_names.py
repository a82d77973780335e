"""What depends on a task asks the task: nobody else compares its name."""

import ast
from pathlib import Path

import realm_jax
from realm_jax.tasks import TASKS

PACKAGE = Path(realm_jax.__file__).parent


def compared_names(source: str) -> list[str]:
    """The names of tasks that stand, alone or in a collection, on either side of a comparison."""
    sides = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            sides += [node.left, *node.comparators]
    parts = [part for side in sides for part in getattr(side, "elts", [side]) if isinstance(part, ast.Constant)]
    return [part.value for part in parts if part.value in TASKS]


def test_a_comparison_is_found():
    source = "a = task == 'realm'\nb = name in ('qa', 'x')\nc = 'mlm' not in names"
    assert compared_names(source) == ["realm", "qa", "mlm"]
    assert compared_names("titles = {'realm': 'REALM'}") == []


def test_no_name_of_a_task_is_compared_outside_of_tasks():
    files = [path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] != "tasks"]
    found = {str(path.relative_to(PACKAGE)): compared_names(path.read_text()) for path in files}
    assert not {path: names for path, names in found.items() if names}


def test_every_file_that_defines_a_task_is_found():
    files = [path for path in (PACKAGE / "tasks").glob("*.py") if "\n    stream = " in path.read_text()]
    assert len(files) == len(TASKS) >= 7


def test_streams_of_random_numbers_stay_as_they_are():
    """Examples and dropout follow from them: another number is another training. Of 5 other code draws; 6 and 9 to 12
    were drawn from by code that is gone."""
    streams = {"mlm": 1, "ict": 2, "realm": 3, "qa": 4, "closed_book": 7}
    streams |= {"rerank": 8, "evidence_contrast": 13}
    found = {name: task.stream for name, task in TASKS.items()}
    assert found.items() >= streams.items()
    assert not {*found.values()} & {5, 6, 9, 10, 11, 12}
