"""sky and kubectl for tests: they refuse flags that the real ones do not have, write down what they were asked, and
say what they are told to.

A tool's folder on PATH holds its program (this file, linked), `calls.jsonl`, and `answers.json`: a list of
{"match": words that the call must contain, "stdout", "stderr", "code"}, of which the first that matches is given.
"""

import json
import os
import sys
from pathlib import Path

# Flags that are used here, as the tools' references list them (`sky jobs COMMAND --help` of SkyPilot 0.14,
# kubernetes.io/docs/reference/kubectl); every other one is an error, as it is there.
FLAGS = {
    ("sky", "jobs launch"): "yes detach-run secret",
    ("sky", "jobs queue"): "all verbose output",
    ("sky", "jobs logs"): "follow no-follow",
    ("sky", "jobs cancel"): "yes",
    ("kubectl", "apply"): "context namespace filename",
    ("kubectl", "get"): "context namespace selector output",
    ("kubectl", "patch"): "context namespace type patch",
    ("kubectl", "delete"): "context namespace cascade ignore-not-found",
    ("kubectl", "logs"): "context namespace selector container tail prefix max-log-requests follow",
}


def main() -> int:
    folder, tool, words = Path(sys.argv[0]).parent, Path(sys.argv[0]).name, sys.argv[1:]
    plain = " ".join(word for word in words if not word.startswith("--"))
    known = next((flags for (name, verb), flags in FLAGS.items() if name == tool and verb in plain), None)
    if known is None:
        print(f"ERROR: unknown command: {plain}", file=sys.stderr)
        return 2
    for word in words:
        name = word.partition("=")[0]
        if name.startswith("--") and name[2:] not in known.split():
            print(f"ERROR: unrecognized arguments: {name}", file=sys.stderr)
            return 2
    stdin = "" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read()
    tasks = [Path(word).read_text() for word in words if word.endswith(".yaml")]
    with open(folder / "calls.jsonl", "a") as calls:
        calls.write(json.dumps({"words": [tool, *words], "stdin": stdin, "tasks": tasks}) + "\n")
    for answer in json.loads((folder / "answers.json").read_text()):
        if all(word in " ".join([tool, *words]) for word in answer["match"].split()):
            sys.stdout.write(answer.get("stdout", ""))
            sys.stderr.write(answer.get("stderr", ""))
            return int(answer.get("code", 0))
    return 0


def install(folder: Path, answers: list[dict]) -> None:
    """Put both on a folder that is to come first on PATH."""
    folder.mkdir(exist_ok=True)
    for tool in ("sky", "kubectl"):
        program = folder / tool
        program.write_text(f"#!{sys.executable}\n{Path(__file__).read_text()}")
        program.chmod(0o755)
    (folder / "answers.json").write_text(json.dumps(answers))


def calls(folder: Path) -> list[dict]:
    """What they were asked."""
    file = folder / "calls.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


if __name__ == "__main__" and os.path.basename(sys.argv[0]) in ("sky", "kubectl"):
    sys.exit(main())
