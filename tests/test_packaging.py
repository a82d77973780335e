"""The package that users install: archive and wheel with everything in them, which work far from the checkout; and what
its files for a release say."""

import ast
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

import realm_jax
from realm_jax.config import reference
from realm_jax.environment import differences_from_image, image_versions

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "realm_jax"

# Import names that are not the name of the distribution.
DISTRIBUTION = {
    "ir_measures": "ir-measures",
    "lindera": "lindera-python-ko-dic",
    "Stemmer": "pystemmer",
    "yaml": "pyyaml",
    "apache_beam": "apache-beam",
    "backports": "backports.zstd",
    "farmhash": "pyfarmhash",
    "markdown_it": "markdown-it-py",
    "ml_collections": "ml-collections",
    "orbax": "orbax-checkpoint",
    "tensorflow_datasets": "tensorflow-datasets",
    # FastAPI is made of these two, and pins them.
    "pydantic": "fastapi",
    "starlette": "fastapi",
}


def package_files() -> list[str]:
    """Every file of the package in the checkout, `realm_jax/…`, and the configs, to which it has a link."""
    found = [*PACKAGE.rglob("*.*"), *(PACKAGE / "configs").glob("*.py")]
    files = {path for path in found if path.is_file() and "__pycache__" not in path.parts}
    return sorted(path.relative_to(ROOT).as_posix() for path in files)


def python(*command: str, **options: Any) -> str:
    """Run Python; returns stdout."""
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[str, Path]:
    """The source archive, the wheel that `pip install` makes of it, and the folder where that is installed.

    The archive is built from a copy, so that no old build folder of the checkout gets into it.
    """
    source, archives, wheels, target = (
        tmp_path_factory.mktemp(name) for name in ("source", "sdist", "wheel", "target")
    )
    for name in ("setup.cfg", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    for name in ("realm_jax", "configs", "tests"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    program = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    python("-c", program, str(archives), cwd=source)
    (sdist,) = archives.glob("*.tar.gz")
    pip = "-m", "pip", "-q"
    python(*pip, "wheel", str(sdist), "--no-deps", "--no-build-isolation", "--no-index", f"--wheel-dir={wheels}")
    (wheel,) = wheels.glob("*.whl")
    python(*pip, "install", str(wheel), "--no-deps", "--no-index", f"--target={target}")
    return {"sdist": sdist, "wheel": wheel, "installed": target}


@pytest.fixture
def run_installed(built, tmp_path):
    """Runs Python in another folder with the installed wheel first on its path."""
    environment = os.environ | {"PYTHONPATH": str(built["installed"]), "PYTHONSAFEPATH": "1", "JAX_PLATFORMS": "cpu"}
    return functools.partial(python, cwd=tmp_path, env=environment)


def test_archive_and_wheel_hold_every_file_of_the_package_and_the_license(built):
    names = zipfile.ZipFile(built["wheel"]).namelist()
    assert sorted(name for name in names if name.startswith("realm_jax/")) == package_files()
    assert any(name.endswith("/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests/", "configs/", "build/"))]
    with tarfile.open(built["sdist"]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {name for name in names if re.match(r"realm_jax/.*\.", name)} == {*package_files()}
    assert {"setup.cfg", "pyproject.toml", "README.md", "LICENSE", "realm_jax/py.typed"} <= names
    assert not [name for name in names if name.startswith(("tests/", "build/"))]


def test_the_installed_command_works_from_another_folder(built, run_installed):
    told = run_installed("-m", "realm_jax", "--help")
    assert told.startswith("usage: realm ") and "doctor" in told
    assert run_installed("-m", "realm_jax", "train", "--help-config") == reference()
    report = json.loads(run_installed("-m", "realm_jax", "doctor", "--json"))
    assert report["realm_jax"].endswith(f"({built['installed'] / 'realm_jax'})")
    assert {"jax", "flax", "optax"} <= {*report["packages"]}
    assert run_installed(str(built["installed"] / "bin" / "realm"), "--version").startswith("realm_jax ")


def test_every_config_is_found_by_its_name_far_from_the_checkout(run_installed):
    configs = sorted(path.stem for path in (ROOT / "configs").glob("*.py"))
    program = (
        "from realm_jax import config\n"
        "from realm_jax.cli import ablate\n"
        "for name in config.config_names():\n"
        "    like = ablate._config_template if name == 'ablations' else None\n"
        "    print(name, config.load_config(name, like=like).get('tasks', 'rows'))"
    )
    found = dict(line.split() for line in run_installed("-c", program).splitlines())
    assert sorted(found) == configs and {"real_text", "quickstart", "ablations"} <= {*configs}
    assert found["realm_wiki"] == "realm"


def setup() -> ConfigParser:
    parser = ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def names_in(requirements: str) -> set[str]:
    return {re.split(r"[<>=;\[ ]", line, maxsplit=1)[0] for line in requirements.splitlines() if line}


def test_what_is_imported_is_required_or_an_extra_and_what_is_required_is_imported():
    imported: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported.add(node.module.partition(".")[0])
    imported = {DISTRIBUTION.get(name, name) for name in imported - sys.stdlib_module_names - {"realm_jax"}}
    extras = setup()["options.extras_require"]  # JAX's own are not imported by us
    optional = [names_in(extras[name]) for name in extras if name not in ("test", "cuda", "tpu")]
    assert imported - set().union(*optional) == names_in(setup()["options"]["install_requires"])


def test_what_is_cited_and_the_changes_are_of_this_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (cited["cff-version"], cited["version"], cited["license"]) == ("1.2.0", realm_jax.__version__, "Apache-2.0")
    (paper,) = cited["references"]
    assert paper["title"].startswith("REALM: ") and len(paper["authors"]) == 5
    heads = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert heads == ["Unreleased"] or heads[1] == realm_jax.__version__


@pytest.mark.parametrize(
    ("file", "python", "extras"),
    [("requirements-lock.txt", "3.11", ["test"]), ("realm_jax/launch/image-lock.txt", "3.12", ["huggingface", "tpu"])],
)
def test_locked_versions_are_allowed(file, python, extras):
    """Those of required packages and of the extras."""
    lines = (ROOT / file).read_text().splitlines()
    locked = dict(line.lower().replace("_", "-").split("==") for line in lines if not line.startswith("#"))
    wanted = setup()["options"]["install_requires"]
    for extra in extras:
        wanted += setup()["options.extras_require"][extra]
    checked = 0
    for line in filter(None, wanted.splitlines()):
        one = Requirement(line.partition("#")[0])
        name = one.name.lower().replace("_", "-")
        if name == "realm-jax" or (one.marker and not one.marker.evaluate({"python_version": python})):
            continue
        assert one.specifier.contains(locked[name]), f"{line}: locked is {locked[name]}"
        checked += 1
    assert checked > 25


def test_the_image_installs_the_locked_versions_of_its_python():
    dockerfile = (ROOT / "launch" / "Dockerfile").read_text()
    assert "FROM python:3.12-slim" in dockerfile and "--constraint=image-lock.txt" in dockerfile
    assert {"jax", "jaxlib", "libtpu", "flax"} == {*image_versions()}


def test_other_versions_than_those_of_the_image_are_reported(monkeypatch):
    monkeypatch.setattr("realm_jax.environment.metadata.version", lambda name: image_versions()[name])
    assert differences_from_image() == []
    monkeypatch.setattr("realm_jax.environment.metadata.version", lambda name: "0.1")
    assert f"jax: {image_versions()['jax']} -> 0.1" in differences_from_image()
