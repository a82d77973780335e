"""What the documentation says is there: commands and their flags, config keys, messages, files, modules and names.

A page's commands are parsed by the program's own parsers, and each has to be run by a test with each of its flags.
Those of other programs that need a cloud stand in a section that says so. How the site is built: `test_site.py`.
"""

import argparse
import ast
import functools
import importlib
import re
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path

import pytest
from documented import PAGES, ROOT, Command, commands, inline

from realm_jax import config_flags
from realm_jax.cli import main as cli
from realm_jax.config import default, reference, validate
from realm_jax.launch import spec as specs
from realm_jax.recipes import config_names, is_name

PACKAGE = ROOT / "realm_jax"
DESIGN = ("CONTRIBUTING.md", "docs/design.md")  # pages for those who change the code
SOURCE = "\n".join(path.read_text() for folder in ("realm_jax", "tests") for path in (ROOT / folder).rglob("*.py"))
PACKAGES = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
CLOUD_TOOLS = ("gcloud", "kubectl", "xpk", "docker")


def text_of(page: str) -> str:
    return (ROOT / page).read_text("utf-8")


# ---- commands


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
            for name, one in action.choices.items():
                yield from (name, *known_words(one))


def is_override(word: str) -> bool:
    return word.startswith(("--config.", "--spec."))


def flags(command: Command) -> list[str]:
    return [word.partition("=")[0] for word in command.words if word.startswith("--") and not is_override(word)]


def shown(page: str) -> list[Command]:
    """The commands of a page but for such as `realm COMMAND --help`."""
    return [one for one in commands(page) if one.words and not one.words[0].startswith(("-", "COMMAND"))]


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_can_be_parsed(page, capsys):
    for command in shown(page):
        name, *words = command.words
        assert name in cli.JOBS, f"{page}: realm {name}"
        assert not {*flags(command)} - {*known_words(parser_of(name))}, command
        if command.is_whole:
            try:
                parser_of(name).parse_args([word for word in words if not is_override(word)])
            except SystemExit:
                pytest.fail(f"{page}: realm {' '.join(command.words)}: {capsys.readouterr().err}")


def test_every_command_is_documented():
    assert {command.words[0] for page in PAGES for command in shown(page)} == set(cli.JOBS)


def takes_a_whole_config(command: Command) -> bool:
    name, *words = command.words
    named = any(word.startswith("--config=") and is_name(word.removeprefix("--config=")) for word in words)
    return command.is_whole and named and name in ("train", "build-index", "launch") and words[0] != "plan"


@pytest.mark.parametrize("page", PAGES)
def test_the_config_of_every_command_of_a_page_is_complete(page):
    for command in filter(takes_a_whole_config, shown(page)):
        name = next(word for word in command.words if word.startswith("--config=")).removeprefix("--config=")
        given = [word for word in command.words if word.startswith("--config.")]
        config = config_flags.load_config(name, given, default)
        validate(config)


@pytest.mark.parametrize("page", PAGES)
def test_every_key_that_a_page_sets_is_one(page):
    keys = {kind: set(re.findall(r"`([a-z_0-9]+(?:\.[a-z_0-9]+)*)`", text)) for kind, text in (
        ("config", reference()), ("spec", specs.reference()))}  # fmt: skip
    set_there = re.findall(r"--(config|spec)\.([a-z_0-9]+(?:\.[a-z_0-9]+)*)=", text_of(page))
    assert not {(kind, key) for kind, key in set_there if key not in keys[kind] | {"section.key"}}


@pytest.mark.parametrize("page", PAGES)
def test_every_config_that_a_page_names_is_there(page):
    named = {name for name in re.findall(r"--config=([a-z_]+)\b(?!/|\.)", text_of(page))}
    assert named - {"mine"} <= {*config_names()}  # the page of messages has one about a config that is not there


class Exercised:
    """What a file of tests gives to the program: the commands that it runs, and its flags, also as keywords."""

    def __init__(self, path: Path):
        nodes = [*ast.walk(ast.parse(path.read_text("utf-8")))]
        imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
        modules = {f"{node.module}.{one.name}" for node in imports for one in node.names}
        modules |= {node.module for node in imports if node.module}
        self.commands = {name for name in cli.JOBS if cli.module_of(name) in modules}
        # A function of another file that is called like a command, as `launch`, runs it.
        self.commands |= {one.name for node in imports for one in node.names} & {*cli.JOBS}
        lists = [node.elts for node in nodes if isinstance(node, ast.List)]
        calls = [node.args for node in nodes if isinstance(node, ast.Call)]
        self.commands |= {name for words in lists + calls if (name := given(words))}
        texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        self.flags = {flag for text in texts for flag in re.findall(r"--[a-z][a-z0-9-]*", text)}
        self.flags |= {
            "--" + node.arg.replace("_", "-") for node in nodes if isinstance(node, ast.keyword) and node.arg
        }


def given(words: list[ast.expr]) -> str | None:
    """The command that words of a list or call run: first, or behind the program, and with flags or alone."""
    texts = [word.value if isinstance(word, ast.Constant) else None for word in words]
    start = texts.index("realm_jax.cli.main") + 1 if "realm_jax.cli.main" in texts else 0
    if texts[start : start + 1] and texts[start] in cli.JOBS:
        rest = words[start + 1 :]
        flags = [
            one for one in rest if isinstance(one, ast.Starred) or ast.unparse(one).lstrip("f'\"").startswith("--")
        ]
        return texts[start] if flags or not rest else None
    return None


def test_every_command_and_flag_of_the_documentation_is_run_by_a_test():
    """By a file of tests that runs the command, and gives the flag."""
    own = ("test_docs.py", "documented.py")
    files = [Exercised(path) for path in (ROOT / "tests").glob("*.py") if path.name not in own]
    wanted = {(one.words[0], flag) for page in PAGES for one in shown(page) for flag in ("", *flags(one))}
    run = {(name, flag) for file in files for name in file.commands for flag in ("", "--help", *file.flags)}
    missing = wanted - run
    assert not missing


# ---- other programs


def sections(page: str) -> Iterator[tuple[str, str]]:
    """Each section of a page, with the text of the page before its first section."""
    first, *parts = re.split(r"^(?=## )", text_of(page), flags=re.M)
    for part in (first, *parts):
        yield part, first


@pytest.mark.parametrize("page", [page for page in PAGES if page not in ("docs/design.md", "benchmarks/README.md")])
def test_commands_of_a_cloud_stand_where_it_says_so(page):
    tools = "|".join(CLOUD_TOOLS)
    for section, first in sections(page):
        calls = re.findall(
            rf"^    ((?:{tools}) .*|realm .*(?:--target=(?:queued_resources|jobset)|gs://).*)", section, re.M
        )
        assert not calls or re.search(r"[Nn]eeds? a c(loud|luster)", section + first), calls


@pytest.mark.parametrize("page", PAGES)
def test_extras_scripts_and_tests_of_a_page_are_there(page):
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = {
        name for found in re.findall(r"(?:\.|realm_jax)\[([a-z,]+)\]'", text_of(page)) for name in found.split(",")
    }
    assert extras <= {*setup["options.extras_require"]}
    for command in commands(page, "python"):
        script = next((word for word in command.words if word.endswith(".py")), None)
        if script is not None and "/" in script:
            source = (ROOT / script).read_text("utf-8")
            assert not [flag for flag in flags(command) if f'"{flag}"' not in source], command
    for command in commands(page, "pytest"):
        assert all((ROOT / word).is_file() for word in command.words if word.endswith(".py")), command


# ---- messages


def messages(tree: ast.AST) -> Iterator[str]:
    """Texts of a module, as patterns: each value that is filled in stands for anything, and is a group."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [re.escape(str(one.value)) if isinstance(one, ast.Constant) else "(.*)" for one in node.values]
            yield "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%[a-z]", "(.*)", re.escape(node.value))


@functools.cache
def patterns() -> list[re.Pattern[str]]:
    """Of messages that say enough by themselves."""
    found = {text for path in PACKAGE.rglob("*.py") for text in messages(ast.parse(path.read_text("utf-8")))}
    return [re.compile(text) for text in found if len(re.sub(r"\(\.\*\)|\\", "", text)) > 20]


def said(message: str) -> float:
    """The share of a message that stands in the code."""
    places: set[int] = set()
    for found in filter(None, (pattern.search(message) for pattern in patterns())):
        filled = {place for group in found.regs[1:] for place in range(*group)}
        places |= set(range(*found.span())) - filled
    return len(places) / len(message)


def quoted_messages() -> list[str]:
    return re.findall(r"^```text\n(.*?)\n```", text_of("docs/troubleshooting.md"), re.M | re.S)


def test_there_are_messages_to_look_up():
    assert len(quoted_messages()) > 30


@pytest.mark.parametrize("message", quoted_messages())
def test_every_message_that_the_documentation_explains_is_one_of_the_code(message):
    assert any(pattern.fullmatch(message) for pattern in patterns()), "no message of the code reads like this"
    assert said(message) > 0.3


# ---- files and names


@pytest.mark.parametrize("page", PAGES)
def test_links_of_a_page_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", text_of(page), flags=re.M | re.S)
    targets = [target for target in re.findall(r"\]\(\s*([^)#\s]+)", text) if "://" not in target]
    assert not [target for target in targets if not (ROOT / page).parent.joinpath(target).exists()]


def named(page: str, pattern: str) -> set[str]:
    """What stands in backticks on a page and looks like this."""
    return {part for part in inline(page) if re.fullmatch(pattern, part)}


def is_there(module: str) -> bool:
    return any((folder / f"{module}{ending}").exists() for folder in (PACKAGE, ROOT) for ending in ("", ".py"))


@pytest.mark.parametrize("page", PAGES)
def test_modules_that_a_page_names_are_there(page):
    names = named(page, r"(realm_jax/)?[a-z_]+/[a-z_0-9]+(\.py)?")
    modules = {name.removeprefix("realm_jax/").removesuffix(".py") for name in names}
    modules = {module for module in modules if module.partition("/")[0] in PACKAGES}
    assert len(modules) > 5 or page not in DESIGN
    assert not {module for module in modules if not is_there(module)}


@pytest.mark.parametrize("page", DESIGN)
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


# ---- features


def test_every_test_that_the_features_name_is_there():
    named = set(re.findall(r"`(test_\w+)`", text_of("docs/features.md")))
    assert named and not named - {path.stem for path in (ROOT / "tests").glob("test_*.py")}
