"""The pages of the documentation, and the commands that they show; for `test_docs.py`."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
# Every page that people read, on the site or in the repository.
PATTERNS = ("README.md", "CONTRIBUTING.md", "benchmarks/README.md", "skills/*/SKILL.md", "docs/**/*.md")
PAGES = sorted(str(path.relative_to(ROOT)) for pattern in PATTERNS for path in ROOT.glob(pattern))
PLACEHOLDER = "…"


class Command(NamedTuple):
    """A command line of a page. is_whole: it stands in a block, without a placeholder, and so can be given as it is."""

    page: str
    words: list[str]
    is_whole: bool


def blocks(page: str) -> list[str]:
    """The lines of code blocks, indented or fenced; continued lines are joined, and so are those of one quoted word."""
    lines, is_fenced = [""], False
    for line in re.sub(r"\\\n\s+", "", (ROOT / page).read_text("utf-8")).splitlines():
        if line.startswith("```"):
            is_fenced = not is_fenced
        elif lines[-1].startswith("realm ") and lines[-1].count("'") % 2:
            lines[-1] += f" {line.strip()}"
        elif is_fenced or line.startswith("    "):
            lines += line.strip().split(" && ")
    return lines


def inline(page: str) -> list[str]:
    """What stands in backticks outside of code blocks."""
    text = re.sub(r"^(```.*?^```|    .*?)$", "", (ROOT / page).read_text("utf-8"), flags=re.M | re.S)
    parts = [" ".join(part.split()) for part in re.findall(r"(?<!`)`([^`]+)`(?!`)", text)]
    return [command for part in parts for command in part.split(" && ")]


def commands(page: str, program: str = "realm") -> list[Command]:
    """The commands of a program on a page, as words of a shell: without the program and what explains them."""
    found = []
    for lines, is_block in ((blocks(page), True), (inline(page), False)):
        for line in (re.sub(r"^([A-Z_]+=\S+ )+", "", one) for one in lines):  # without variables of the environment
            if line.startswith(f"{program} "):
                words = shlex.split(re.split(r"\s[<>|]|\s{3,}|\s# ", line)[0])[1:]
                is_whole = is_block and PLACEHOLDER not in line
                found.append(Command(page, [word for word in words if word != PLACEHOLDER], is_whole))
    return found
