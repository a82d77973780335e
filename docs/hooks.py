"""Hooks of MkDocs (`mkdocs.yml`): add pages from outside of docs/, and convert links and formulas of every page.

Every build makes the page of commands from their parsers, so it cannot become outdated. Files outside of docs/ become
pages too, and links to them become links of the site. Formulas (```math, as GitHub renders them) become MathML, which
browsers show without a script. `tests/test_docs.py` checks the pages themselves.
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
# File of the repository outside of docs/ → path of its page in the site.
ELSEWHERE = {
    "benchmarks/README.md": "results/measurements.md",
    "CONTRIBUTING.md": "contributing.md",
    "skills/realm/SKILL.md": "agents.md",
}
WIDTH = "90"  # columns of a command's help
FENCE = re.compile(r"(^```.*?^```[ ]*$)", re.M | re.S)
LINK = re.compile(r"(?<=\]\()([^)#\s:]+)(?=[)#])")
HEADER = re.compile(r"\A---\n.*?\n---\n", re.S)  # of a skill, for programs

_texts: dict[str, str] = {}  # path of a page → its Markdown, with links of the site


def on_files(files: Files, config: Any) -> Files:
    """Add the page of commands, and the pages of files outside of docs/."""
    files.append(File.generated(config, COMMANDS, content=commands_page()))
    for path, page_path in ELSEWHERE.items():
        files.append(File.generated(config, page_path, content=HEADER.sub("", (ROOT / path).read_text("utf-8"))))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Convert links and formulas, and put an empty line before each list, which Python-Markdown needs."""
    page_path = page.file.src_uri
    source = {target: path for path, target in ELSEWHERE.items()}.get(page_path, f"docs/{page_path}")
    parts = FENCE.split(markdown)  # text, code block, text, …
    for i, text in enumerate(parts[::2]):
        parts[2 * i] = _separate_lists(LINK.sub(lambda link: _site_link(link[1], source, page_path), text))
    _texts[page_path] = "".join(parts)
    parts[1::2] = [_formula(part) for part in parts[1::2]]
    return "".join(parts)


def on_post_build(config: Any) -> None:
    """Write the Markdown of every page next to it, and list these files in llms.txt."""
    site = Path(config.site_dir)
    for page_path, text in _texts.items():
        (site / page_path).write_text(text, "utf-8")
    lines = [f"# {config.site_name}", "", f"> {config.site_description}.", ""]
    lines += ["Every page of this documentation as Markdown.", ""]
    for entry in config.nav:
        ((title, pages),) = entry.items()
        named = _titles_and_paths([entry] if isinstance(pages, str) else pages)
        lines += [f"## {title}", "", *(f"- [{name}]({path}): {_summary(_texts[path])}" for name, path in named), ""]
    (site / "llms.txt").write_text("\n".join(lines), "utf-8")


def commands_page() -> str:
    """Return the page with the help of all commands."""
    lines = ["# Commands", "", "Each command prints this text for `--help`.", ""]
    lines += ["| command | purpose |", "|---|---|"]
    lines += [f"| [`realm {name}`](#realm-{name}) | {summary} |" for name, summary in JOBS.items()]
    for name, summary in JOBS.items():
        parser = argparse.ArgumentParser(
            prog=f"realm {name}",
            description=summary[0].upper() + summary[1:] + ".",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        importlib.import_module(module_of(name)).add_arguments(parser)
        for depth, subparser in _parsers(parser):
            lines += ["", f"{'#' * depth} {subparser.prog}", "", "```text", _help(subparser), "```"]
    return "\n".join(lines) + "\n"


def _parsers(parser: argparse.ArgumentParser, depth: int = 2) -> Iterator[tuple[int, argparse.ArgumentParser]]:
    """Yield a parser and those of its actions, with the depth of their headings."""
    yield depth, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                yield from _parsers(subparser, depth + 1)


def _help(parser: argparse.ArgumentParser) -> str:
    """Return the help of a parser in lines of `WIDTH` columns, for any terminal of the build."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = WIDTH
    try:
        return parser.format_help().rstrip()
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before


def _site_link(target: str, source: str, page_path: str) -> str:
    """Return a link of the file `source` of the repository as a link of the page `page_path` of the site."""
    path = normpath(f"{dirname(source)}/{target}" if dirname(source) else target)
    target_page = ELSEWHERE.get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)
    return target if target_page is None else relpath(target_page, dirname(page_path) or ".")


def _separate_lists(text: str) -> str:
    return re.sub(r"^(?![ *\d|#])(\S.*\n)(?=\* )", r"\1\n", text, flags=re.M)


def _formula(block: str) -> str:
    kind, _, formula = block.partition("\n")
    if kind.strip() != "```math":
        return block
    return convert(formula.rpartition("```")[0].strip(), display="block")


def _titles_and_paths(pages: list[Any]) -> Iterator[tuple[str, str]]:
    """Yield titles and paths of the pages of a section; the default title is the first heading."""
    for entry in pages:
        if isinstance(entry, str):
            yield re.search(r"^# (.*)$", _texts[entry], re.M)[1], entry  # type: ignore[index]
            continue
        for title, page in entry.items():
            if isinstance(page, str):
                yield title, page
            else:
                yield from _titles_and_paths(page)


def _summary(text: str) -> str:
    """Return the first sentence of the first paragraph."""
    parts = (part.strip("\n") for part in text.split("\n\n"))
    first = next(part for part in parts if part and not part.startswith(("#", "|", "```", "!", "    ", "<")))
    return re.split(r"(?<=\.)\s", " ".join(first.split()))[0]
