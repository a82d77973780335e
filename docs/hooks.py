"""Pages of the site that are not files of docs/, and what is made of every page: hooks of MkDocs (`mkdocs.yml`).

The commands' page is made from their parsers at every build, so it cannot go stale. Pages that lie elsewhere in the
repository keep their place there; links to them are turned into links of the site. Formulas (```math, as GitHub
renders them) become MathML, which browsers show without a script. Not for checking documents: `tests/test_docs.py`.
"""

import argparse
import importlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from posixpath import dirname, normpath, relpath
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from realm_jax.cli.main import JOBS, module_of

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = "reference/commands.md"
# Pages of the repository outside of docs/, and their place in the site.
ELSEWHERE = {
    "benchmarks/README.md": "results/measurements.md",
    "CONTRIBUTING.md": "contributing.md",
    "skills/realm/SKILL.md": "agents.md",
}
WIDTH = "90"  # columns of a command's help
FENCE = re.compile(r"(^```.*?^```[ ]*$)", re.M | re.S)
LINK = re.compile(r"(?<=\]\()([^)#\s:]+)(?=[)#])")
HEADER = re.compile(r"\A---\n.*?\n---\n", re.S)  # of a skill, for programs

_texts: dict[str, str] = {}  # page → its Markdown as the site has it


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that are made here and those that lie elsewhere."""
    files.append(File.generated(config, COMMANDS, content=commands_page()))
    for path, place in ELSEWHERE.items():
        files.append(File.generated(config, place, content=HEADER.sub("", (ROOT / path).read_text("utf-8"))))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Outside of code: links of the repository as links of the site, and lists that need no empty line before them."""
    place = page.file.src_uri
    source = {place: path for path, place in ELSEWHERE.items()}.get(place, f"docs/{place}")
    parts = FENCE.split(markdown)
    parts[::2] = [_separate_lists(LINK.sub(lambda link: _in_site(link[1], source, place), part)) for part in parts[::2]]
    _texts[place] = "".join(parts)
    parts[1::2] = [_formula(part) for part in parts[1::2]]
    return "".join(parts)


def on_post_build(config: Any) -> None:
    """Writes llms.txt, and beside every page its Markdown, which it lists."""
    site = Path(config.site_dir)
    for place, text in _texts.items():
        (site / place).write_text(text, "utf-8")
    lines = [f"# {config.site_name}", "", f"> {config.site_description}.", ""]
    lines += ["Every page of this documentation as Markdown.", ""]
    for entry in config.nav:
        ((title, pages),) = entry.items()
        named = list(_named([entry] if isinstance(pages, str) else pages))
        lines += [f"## {title}", "", *(f"- [{name}]({place}): {_summary(_texts[place])}" for name, place in named), ""]
    (site / "llms.txt").write_text("\n".join(lines), "utf-8")


def commands_page() -> str:
    """What each command prints for `--help`, as one page."""
    lines = ["# Commands", "", "What each command prints for `--help`.", ""]
    lines += ["| command | what it does |", "|---|---|"]
    lines += [f"| [`realm {name}`](#realm-{name}) | {summary} |" for name, summary in JOBS.items()]
    for name, summary in JOBS.items():
        parser = argparse.ArgumentParser(
            prog=f"realm {name}",
            description=summary[0].upper() + summary[1:] + ".",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        importlib.import_module(module_of(name)).add_arguments(parser)
        for depth, one in _parsers(parser):
            lines += ["", f"{'#' * depth} {one.prog}", "", "```text", _help(one), "```"]
    return "\n".join(lines) + "\n"


def _parsers(parser: argparse.ArgumentParser, depth: int = 2) -> Iterator[tuple[int, argparse.ArgumentParser]]:
    """A parser and those of its actions, with the depth of their headings."""
    yield depth, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for one in action.choices.values():
                yield from _parsers(one, depth + 1)


def _help(parser: argparse.ArgumentParser) -> str:
    """Its help in lines of one width, whatever the terminal of the build."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = WIDTH
    try:
        return parser.format_help().rstrip()
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before


def _in_site(target: str, source: str, place: str) -> str:
    """A link from the file `source` of the repository, as one from the page `place` of the site."""
    path = normpath(f"{dirname(source)}/{target}" if dirname(source) else target)
    there = ELSEWHERE.get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)
    return target if there is None else relpath(there, dirname(place) or ".")


def _separate_lists(text: str) -> str:
    return re.sub(r"^(?![ *\d|#])(\S.*\n)(?=\* )", r"\1\n", text, flags=re.M)


def _formula(block: str) -> str:
    kind, _, formula = block.partition("\n")
    if kind.strip() != "```math":
        return block
    return convert(formula.rpartition("```")[0].strip(), display="block")


def _named(pages: list[Any]) -> Iterator[tuple[str, str]]:
    """Titles and places of pages of a section; one without a title has that of its heading."""
    for entry in pages:
        if isinstance(entry, str):
            yield re.search(r"^# (.*)$", _texts[entry], re.M)[1], entry  # type: ignore[index]
        else:
            yield from entry.items()


def _summary(text: str) -> str:
    """The first sentence of the first paragraph."""
    parts = (part.strip("\n") for part in text.split("\n\n"))
    first = next(part for part in parts if part and not part.startswith(("#", "|", "```", "!", "    ", "<")))
    return re.split(r"(?<=\.)\s", " ".join(first.split()))[0]
