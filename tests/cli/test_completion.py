"""`realm completion`: what bash offers with the script that it prints."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from realm_jax.cli import main as cli
from realm_jax.config import config_names

# Asks for completions as Readline does; a line a candidate.
ASK = """
source "$1"
shift
COMP_WORDS=("$@") COMP_CWORD=$(( $# - 1 ))
[[ $(complete -p realm) =~ -F\\ ([^ ]+) ]] && "${BASH_REMATCH[1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory) -> Path:
    if not shutil.which("bash"):
        pytest.skip("there is no bash")
    path = tmp_path_factory.mktemp("completion") / "realm"
    with pytest.MonkeyPatch.context() as patch, open(path, "w") as file:
        patch.setattr("sys.stdout", file)
        assert cli.main(["completion", "bash"]) == 0
    return path


@pytest.fixture
def folder(tmp_path) -> Path:
    for name in ("runs", "runs/one", "runs/two"):
        (tmp_path / name).mkdir()
    (tmp_path / "runs" / "notes.txt").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    "line, offered",
    [
        ("realm qu", {"quickstart"}),
        ("realm storage ", {"ls", "verify", "rm"}),
        ("realm storage --workdir runs/one v", {"verify"}),
        ("realm inspect ", {"data", "text"}),
        ("realm weights export --na", {"--names"}),
        ("realm launch sta", {"start", "status"}),
        ("realm ask --search h", {"hybrid"}),
        ("realm ask --search ", {"bm25", "hybrid", "vectors"}),
        ("realm train --config ", {*config_names()}),
        ("realm ask --workdir runs/", {"runs/one", "runs/two"}),
        ("realm ask --workdir runs/o", {"runs/one"}),
        ("realm evaluate runs/", {"runs/one", "runs/two", "runs/notes.txt"}),
        ("realm completion ba", {"bash"}),
    ],
)
def test_bash_offers_commands_flags_choices_and_files(script, folder, line, offered):
    assert offers(script, folder, line) == offered


def test_bash_offers_every_command(script, folder):
    assert offers(script, folder, "realm ") == {*cli.JOBS}


def offers(script: Path, folder: Path, line: str) -> set[str]:
    """What a tab at the end of a line gives. Bash makes a word of every `=`."""
    words = re.findall("[^ =]+|=", line) + [""] * line.endswith(" ")
    ended = subprocess.run(["bash", "-c", ASK, "bash", script, *words], cwd=folder, capture_output=True, text=True)
    assert ended.stderr == "", ended.stderr
    return {*ended.stdout.split()}


@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_other_shells_take_their_script(shell, folder, capsys):
    if not shutil.which(shell):
        pytest.skip(f"there is no {shell}")
    assert cli.main(["completion", shell]) == 0
    (folder / "script").write_text(capsys.readouterr().out)
    ended = subprocess.run([shell, "-n", "script"], cwd=folder, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
