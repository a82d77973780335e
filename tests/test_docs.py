"""What the documentation says is there: commands and their flags, config keys, messages, files and modules.

A page's commands are parsed by the program's own parsers. How the site is built: `test_site.py`.
"""

import argparse
import ast
import functools
import importlib
import re
import shlex
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path
from typing import NamedTuple

import pytest

from realm_jax.cli import main as cli
from realm_jax.config import config_names, default, is_name, load_config, reference, validate
from realm_jax.launch import spec as specs

ROOT = Path(__file__).parents[1]
# Every page that people read, on the site or in the repository.
PATTERNS = ("README.md", "CONTRIBUTING.md", "benchmarks/README.md", "skills/*/SKILL.md", "docs/**/*.md")
PAGES = sorted(str(path.relative_to(ROOT)) for pattern in PATTERNS for path in ROOT.glob(pattern))
PLACEHOLDER = "…"
PACKAGE = ROOT / "realm_jax"
PACKAGES = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
KEY = r"[a-z_0-9]+(?:\.[a-z_0-9]+)*"

every_page = pytest.mark.parametrize("page", PAGES)


def text_of(page: str) -> str:
    return (ROOT / page).read_text("utf-8")


# ---- commands


class Command(NamedTuple):
    """A command line of a page. is_whole: it stands in a block, without a placeholder, and so can be given as it is."""

    page: str
    words: list[str]
    is_whole: bool


def blocks(page: str) -> list[str]:
    """The lines of code blocks, indented or fenced; continued lines are joined, and so are those of one quoted word."""
    lines, is_fenced = [""], False
    for line in re.sub(r"\\\n\s+", "", text_of(page)).splitlines():
        if line.startswith("```"):
            is_fenced = not is_fenced
        elif lines[-1].startswith("realm ") and lines[-1].count("'") % 2:
            lines[-1] += f" {line.strip()}"
        elif is_fenced or line.startswith("    "):
            lines += line.strip().split(" && ")
    return lines


def inline(page: str) -> list[str]:
    """What stands in backticks outside of code blocks."""
    text = re.sub(r"^(```.*?^```|    .*?)$", "", text_of(page), flags=re.M | re.S)
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


@functools.cache
def parser_of(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"realm {name}", allow_abbrev=False)
    importlib.import_module(cli.module_of(name)).add_arguments(parser)
    return parser


def known_words(parser: argparse.ArgumentParser) -> Iterator[str]:
    """The flags and actions of a command, those of its actions among them."""
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for name, subparser in action.choices.items():
                yield from (name, *known_words(subparser))


def is_override(word: str) -> bool:
    return word.startswith(("--config.", "--spec."))


def flags(command: Command) -> set[str]:
    return {word.partition("=")[0] for word in command.words if word.startswith("--") and not is_override(word)}


def shown(page: str) -> list[Command]:
    """The commands of a page but for such as `realm COMMAND --help`."""
    return [one for one in commands(page) if one.words and not one.words[0].startswith(("-", "COMMAND"))]


@every_page
def test_every_command_of_a_page_can_be_parsed(page, capsys):
    for command in shown(page):
        name, *words = command.words
        assert name in cli.JOBS, f"{page}: realm {name}"
        assert flags(command) <= {*known_words(parser_of(name))}, command
        if command.is_whole:
            try:
                parser_of(name).parse_args([word for word in words if not is_override(word)])
            except SystemExit:
                pytest.fail(f"{page}: realm {' '.join(command.words)}: {capsys.readouterr().err}")


def test_every_command_is_documented():
    assert {command.words[0] for page in PAGES for command in shown(page)} == {*cli.JOBS}


@every_page
def test_the_config_of_every_command_of_a_page_is_complete(page):
    for command in shown(page):
        job, *words = command.words
        names = [word.removeprefix("--config=") for word in words if word.startswith("--config=")]
        takes_config = job in ("train", "build-index", "launch") and words[:1] != ["plan"]
        if command.is_whole and takes_config and names and is_name(names[0]):
            overrides = [word for word in words if word.startswith("--config.")]
            validate(load_config(names[0], overrides, default))


@every_page
def test_every_key_and_config_that_a_page_names_is_there(page):
    for kind, keys in (("config", reference()), ("spec", specs.reference())):
        named = {*re.findall(rf"--{kind}\.({KEY})=", text_of(page))}
        assert named <= {*re.findall(f"`({KEY})`", keys), "section.key"}
    named = {*re.findall(r"--config=([a-z_]+)\b(?!/|\.)", text_of(page))}
    assert named - {"mine"} <= {*config_names()}  # the page of messages has one about a config that is not there


@every_page
def test_extras_scripts_and_tests_of_a_page_are_there(page):
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = ",".join(re.findall(r"(?:\.|realm_jax)\[([a-z,]+)\]'", text_of(page)))
    assert {*filter(None, extras.split(","))} <= {*setup["options.extras_require"]}
    if page.startswith("docs/notebook/"):
        return  # its commands are those of their day
    for command in commands(page, "python"):
        script = next((word for word in command.words if word.endswith(".py")), "")
        if "/" in script:
            source = text_of(script)
            assert not [flag for flag in flags(command) if f'"{flag}"' not in source], command
    for command in commands(page, "pytest"):
        assert all((ROOT / word).is_file() for word in command.words if word.endswith(".py")), command


# ---- messages


@functools.cache
def message_patterns() -> list[re.Pattern[str]]:
    """The texts of the package that say enough by themselves; each value that is filled in stands for anything."""
    texts: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [re.escape(str(x.value)) if isinstance(x, ast.Constant) else "(.*)" for x in node.values]
                texts.add("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.add(re.sub(r"%[a-z]", "(.*)", re.escape(node.value)))
    return [re.compile(text) for text in texts if len(re.sub(r"\(\.\*\)|\\", "", text)) > 20]


@pytest.mark.parametrize(
    "message", re.findall(r"^```text\n(.*?)\n```", text_of("docs/troubleshooting.md"), re.M | re.S)
)
def test_every_message_that_the_documentation_explains_is_one_of_the_code(message):
    assert any(pattern.fullmatch(message) for pattern in message_patterns()), "no message of the code reads like this"


# ---- files and names


@every_page
def test_links_and_modules_of_a_page_are_there(page):
    text = re.sub(r"^```.*?^```", "", text_of(page), flags=re.M | re.S)
    targets = [target for target in re.findall(r"\]\(\s*([^)#\s]+)", text) if "://" not in target]
    assert not [target for target in targets if not (ROOT / page).parent.joinpath(target).exists()]
    names = [part for part in inline(page) if re.fullmatch(r"(realm_jax/)?[a-z_]+/[a-z_0-9]+(\.py)?", part)]
    modules = {name.removeprefix("realm_jax/").removesuffix(".py") for name in names}
    for module in (module for module in modules if module.partition("/")[0] in PACKAGES):
        places = [folder / f"{module}{ending}" for folder in (PACKAGE, ROOT) for ending in ("", ".py")]
        assert any(place.exists() for place in places), module


def test_numbers_of_readme_home_and_tutorials_are_on_a_results_page():
    """A number lives on a results page, and others repeat it, rounded to two decimals or not."""
    code = re.compile(r"^```.*?^```|^ {4}.*?$|`[^`]*`", re.M | re.S)

    def decimals(path: Path) -> set[str]:
        return set(re.findall(r"(?<![\d.])0\.\d{2,3}(?!\d)", code.sub("", path.read_text("utf-8"))))

    results = set().union(*map(decimals, (ROOT / "docs" / "results").glob("*.md")))
    results |= {f"{float(number):.2f}" for number in results}
    for page in (ROOT / "README.md", ROOT / "docs" / "index.md", *(ROOT / "docs" / "tutorials").glob("*.md")):
        assert decimals(page) <= results, f"{page}: {decimals(page) - results}"


def test_functions_on_the_paths_of_the_design_are_there():
    """A row is `file.py  function` or `file.py  Class.method`; without a file it belongs to the file above."""
    path = ""
    for line in text_of("docs/design.md").splitlines():
        if row := re.match(r" {4,}([a-z_]+(?:/[a-z_]+)?\.py)? {2,}([A-Za-z_]+)(?:\.(\w+))?(?:,| {2}|$)", line):
            path = row[1] or path
            source = (PACKAGE / path).read_text("utf-8")
            for name in filter(None, row.groups()[1:]):
                assert re.search(rf"^ *(def|class) {name}\b", source, re.M), line


def test_what_scripts_import_from_the_package_is_there():
    """Scripts that no test runs."""
    scripts = [path for folder in ("benchmarks", "launch") for path in (ROOT / folder).glob("*.py")]
    for path in scripts:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("realm_jax"):
                module = importlib.import_module(node.module)
                for alias in node.names:
                    is_there = hasattr(module, alias.name)
                    assert is_there or importlib.import_module(f"{node.module}.{alias.name}"), path


def test_every_test_that_the_features_name_is_there():
    named = {*re.findall(r"`(test_\w+)`", text_of("docs/features.md"))}
    assert named and not named - {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
