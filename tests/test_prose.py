"""Words that the documentation, the docstrings and the messages should not use.

`EVERYWHERE`, `MARKDOWN` and `DOCSTRINGS` have the highest number of matches of each pattern. Lower a number when you
remove a match; never raise one.
"""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "skills/*/SKILL.md", "docs/**/*.md")
CODE = re.compile(r"^```.*?^```|^(?: {4}|\t).*?$|`[^`]*`|^(?:---|\|[-|: ]+)$", re.M | re.S)
EVERYWHERE = {
    r"\banew\b": 0,
    r"\bbesides?\b": 2,  # two are in a word list of data/spans.py
    r"\bmend(s|ed|ing)?\b": 0,
    r"\b(gold|answer)@\d": 0,
    r"\b(within|beyond) chance\b": 0,
    r"\bbeyond doubt\b": 0,
    r"\bin the mean\b": 0,
    r"\bwhole or absent\b": 0,
    r"\btravels? with the package\b": 0,
    r"\b(seldom|hardly|likeliest)\b": 0,
    r"\b(stands|stood|lies)\b": 0,
    r"\balone\b(?!:)": 0,
    r"(?<!at )(?<!as )(?<!from )\bthe start\b(?! of| and)": 1,
    r"\bwhat (is|was|were|are) \w+ed\b": 0,
    r"\b(is|are) (not )?of (a |an |another|the same)": 0,
    r"\b(a|one) \w+ a (command|file|line|passage|question|seed|stage|step|task)\b": 0,
    r"\b(learnt|(optimi|normali|summari)s(e|ed|er|ing)|data sets?)\b": 0,
}
MARKDOWN = {
    r"(?<![\w.*\\/-])\.\d+": 0,  # decimals without a leading zero
    r"[«»]": 0,
}
DOCSTRINGS = {r"\A(Of|As of|What|Whether|Which|How|Where|Those|That)\b": 0}


@functools.cache
def pages() -> list[tuple[Path, int, str]]:
    """Return every page without its code: path, first line, text."""
    found = []
    for path in sorted({path for pattern in PAGES for path in ROOT.glob(pattern)}):
        if "notebook" in path.parts:
            continue
        text = CODE.sub(lambda code: "\n" * code[0].count("\n") or "…", path.read_text("utf-8"))
        if path.name == "CHANGELOG.md":
            text = "## ".join(text.split("\n## ")[:2])
        found.append((path, 1, text))
    return found


@functools.cache
def nodes() -> list[tuple[Path, ast.AST]]:
    """Return all nodes of the package's syntax trees with their files."""
    paths = sorted((ROOT / "realm_jax").rglob("*.py"))
    return [(path, node) for path in paths for node in ast.walk(ast.parse(path.read_text("utf-8")))]


@functools.cache
def strings() -> list[tuple[Path, int, str]]:
    """Return the docstrings and messages of the package without code: path, first line, text."""
    texts = []
    for path, node in nodes():
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            texts.append((path, node.lineno, re.sub(r"`[^`]*`", "…", node.value)))
    return texts


@functools.cache
def docstrings() -> list[tuple[Path, int, str]]:
    """Return the docstrings of the package: path, first line, text."""
    texts = []
    for path, node in nodes():
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if text := ast.get_docstring(node):
                texts.append((path, node.body[0].lineno, text))
    return texts


def matches(pattern: str, texts: list[tuple[Path, int, str]]) -> list[str]:
    """Return the matches of a pattern, as `file:line: words around it`."""
    found = []
    for path, first_line, text in texts:
        for match in re.finditer(pattern, text):
            line = first_line + text.count("\n", 0, match.start())
            words = " ".join(text[max(0, match.start() - 30) : match.end() + 30].split())
            found.append(f"{path.relative_to(ROOT)}:{line}: {words}")
    return found


CASES = [
    *((pattern, allowed, (pages, strings)) for pattern, allowed in EVERYWHERE.items()),
    *((pattern, allowed, (pages,)) for pattern, allowed in MARKDOWN.items()),
    *((pattern, allowed, (docstrings,)) for pattern, allowed in DOCSTRINGS.items()),
]


@pytest.mark.parametrize(("pattern", "allowed", "sources"), CASES, ids=[pattern for pattern, _, _ in CASES])
def test_prose_does_not_use_a_denied_pattern(pattern, allowed, sources):
    found = [match for source in sources for match in matches(pattern, source())]
    listed = "\n".join(found)
    assert len(found) <= allowed, f"/{pattern}/ matches {len(found)} times, but {allowed} are allowed:\n{listed}"
