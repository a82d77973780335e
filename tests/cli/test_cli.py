"""The command line: which job runs, what it is handed, and how each end of a run is told to the shell."""

import argparse
import errno
import importlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest
from ml_collections import ConfigDict, config_dict

import realm_jax
from realm_jax.cli import main as cli
from realm_jax.config import add_config_argument, default, is_name, load_config, reference, validate
from realm_jax.errors import UserError
from realm_jax.host import Preempted
from realm_jax.launch import spec as specs
from realm_jax.storage import StorageError

ROOT = Path(realm_jax.__file__).parents[1]


@pytest.fixture
def job(monkeypatch):
    """A job `fake` with a config, in the table; `job.seen` is what it was run with, `job.ends` how it ends."""
    module = types.ModuleType("realm_jax_fake_job")
    module.seen, module.ends = [], lambda: None

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        add_config_argument(parser)
        parser.add_argument("--workdir")
        parser.epilog = "examples:\n  realm fake --workdir=runs/first"

    def run(args: argparse.Namespace) -> int | None:
        module.seen.append(args)
        return module.ends()

    module.add_arguments, module.run = add_arguments, run
    monkeypatch.setitem(sys.modules, cli.module_of("fake"), module)
    monkeypatch.setitem(cli.JOBS, "fake", "do nothing")
    return module


def raising(error: BaseException):
    def end():
        raise error

    return end


# ---- which job, with what


def test_a_job_gets_its_arguments_and_the_overrides(job):
    argv = ["fake", "--config=a.py:tiny", "--workdir=w", "--config.train.steps=10", "--config.seed=-1"]
    assert cli.main(argv) == 0
    (args,) = job.seen
    assert (args.config, args.workdir) == ("a.py:tiny", "w")
    assert args.overrides == ["--config.train.steps=10", "--config.seed=-1"]


def test_an_override_without_an_equals_sign_says_how_to_write_it(job, capsys):
    assert cli.main(["fake", "--config.seed", "3"]) == 2
    assert "write --config.seed=VALUE" in capsys.readouterr().err


def test_a_job_without_a_config_refuses_overrides(job, capsys):
    job.add_arguments = lambda parser: None
    with pytest.raises(SystemExit) as end:
        cli.main(["fake", "--config.train.steps=10"])
    assert end.value.code == 2 and "--config.train.steps=10" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "the following arguments are required: COMMAND"),
        ("quickstrat", "invalid choice: 'quickstrat'"),
        ("storage lss", "invalid choice: 'lss'"),
        ("ask --workdir=run --search=hybird", "invalid choice: 'hybird'"),
        ("fake --workdri=w", "realm: error: unrecognized arguments: --workdri=w"),
    ],
)
def test_a_missing_or_mistyped_command_option_or_value_is_an_error_in_one_line_below_the_usage(job, capsys, line, says):
    with pytest.raises(SystemExit) as end:
        cli.main(line.split())
    lines = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and not job.seen
    assert lines[0].startswith("usage: realm ") and says in lines[-1]


def test_help_lists_every_command_and_the_help_of_a_job_shows_its_examples(job, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["--help"])
    assert end.value.code == 0
    listed = capsys.readouterr().out
    for title, commands in cli.GROUPS.items():
        assert all(f"\n  {name} " in listed.partition(f"\n{title}:")[2] for name in commands)
    with pytest.raises(SystemExit):
        cli.main(["fake", "--help"])
    assert "  realm fake --workdir=runs/first\n" in capsys.readouterr().out


def test_the_keys_of_configs_are_listed_without_any_other_argument(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["train", "--help-config"])
    assert end.value.code == 0 and capsys.readouterr().out == reference()


def examples() -> list[list[str]]:
    """The arguments of the commands in the help of jobs that train or build with a config of the package; a plan
    takes a config without data."""
    lines = []
    for name in cli.JOBS:
        text = getattr(importlib.import_module(cli.module_of(name)), "EXAMPLES", "").replace("\\\n", " ")
        lines += [shlex.split(line) for line in text.splitlines() if line.startswith("  realm ")]
    named = [line for line in lines if any(part.startswith("--config=") and is_name(part[9:]) for part in line)]
    return [line for line in named if line[1] in ("train", "build-index", "launch") and line[2] != "plan"]


@pytest.mark.parametrize("command", examples(), ids=" ".join)
def test_the_config_of_an_example_in_the_help_is_complete(command):
    name = next(part for part in command if part.startswith("--config=")).removeprefix("--config=")
    given = [part for part in command if part.startswith("--config.")]
    config = load_config(name, given, default)
    validate(config)


def test_help_and_version_import_no_jax():
    program = (
        "import sys; from realm_jax.cli import main as cli\n"
        "try: cli.main(sys.argv[1:])\nfinally: assert 'jax' not in sys.modules"
    )
    for option in ("--help", "--version"):
        done = subprocess.run([sys.executable, "-c", program, option], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert done.stdout == f"realm_jax {realm_jax.__version__}\n"


def test_a_missing_dependency_is_named(monkeypatch, capsys):
    monkeypatch.setattr(cli, "module_of", lambda name: "no_such_package.job")
    assert cli.main(["train"]) == 2
    assert "needs the Python package 'no_such_package'" in capsys.readouterr().err


# ---- the ends of a run


@pytest.mark.parametrize("returned, code", [(None, 0), (0, 0), (75, 75)])
def test_the_exit_code_is_the_jobs(job, returned, code):
    job.ends = lambda: returned
    assert cli.main(["fake"]) == code


def caused(error, cause):
    error.__cause__ = cause
    return error


FULL = "No space left on device"
MISTAKE = "questions.jsonl:7: no answer; give at least one"


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (UserError(MISTAKE), 2, f"realm: error: {MISTAKE}\n"),
        (OSError(errno.EROFS, "Read-only file system", "runs/a"), 2,
         "realm: error: runs/a: Read-only file system; name a folder that can be written to\n"),
        (OSError(errno.ENOSPC, "?", "runs/a.jsonl"), 74, f"realm: error: runs/a.jsonl: {FULL}; make room"),
        (OSError(errno.EDQUOT, "?"), 74, "realm: error: Disk quota exceeded; make room there"),
        (Exception(f"{FULL} (os error 28)"), 74, f"realm: error: {FULL} ({FULL} (os err"),
        (ValueError(f"RESOURCE_EXHAUSTED: a\nb: {FULL}"), 74, f"realm: error: {FULL} (RESOURCE_EXHAUSTED"),
        (OSError("1000 requested and 12 written"), 74, f"realm: error: {FULL}; make room there"),
        (StorageError("runs/a: gone; check"), 74, "realm: error: runs/a: gone; check\n"),
        (RuntimeError("Unable to initialize backend 'tpu': ABORTED"), 74, "realm: error: JAX does not start: Unable"),
        (caused(StorageError("runs/a: full"), OSError(errno.ENOSPC, "?")), 74, "realm: error: runs/a: full; make room"),
        (caused(UserError("runs/a: full; act"), OSError(errno.EDQUOT, "?")), 74, "realm: error: runs/a: full; act\n"),
    ],
)  # fmt: skip
def test_a_users_mistake_and_a_transient_fault_are_one_line_and_an_exit_code(job, capsys, error, code, says):
    job.ends = raising(error)
    assert cli.main(["fake"]) == code
    out, err = capsys.readouterr()
    assert err.startswith(says) and err.count("\n") == 1 and not out


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (Preempted("SIGTERM: the state is saved"), 75, "warning: SIGTERM: the state is saved"),
        (KeyboardInterrupt(), 130, "run the same command again to continue"),
    ],
)
def test_a_preemption_and_an_interrupt_have_exit_codes_of_their_own(job, capsys, error, code, says):
    job.ends = raising(error)
    assert cli.main(["fake"]) == code
    assert says in capsys.readouterr().err


def test_a_thread_that_a_full_disk_ends_prints_no_traceback(job, monkeypatch):
    def run(error):
        thread = threading.Thread(target=raising(error))
        thread.start()
        thread.join()

    printed = []
    monkeypatch.setattr(threading, "excepthook", lambda ended: printed.append(ended.exc_value))
    job.ends = lambda: run(OSError(errno.ENOSPC, "full"))
    assert cli.main(["fake"]) == 0 and not printed
    job.ends = lambda: run(defect)
    defect = ValueError("a defect")
    assert cli.main(["fake"]) == 0 and printed == [defect]


@pytest.mark.parametrize("error", [ValueError("a defect"), BrokenPipeError("of another pipe than stdout")])
def test_a_defect_keeps_its_traceback(job, error):
    job.ends = raising(error)
    with pytest.raises(type(error)):
        cli.main(["fake"])


def test_a_reader_that_stops_reading_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    done = realm("[print('line' * 100) for _ in range(1000)] and 0", stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.fixture
def interruptible():
    """Ctrl-C as a terminal has it: a test run in the background of a shell hands on that it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def test_an_interrupt_waits_until_the_job_is_imported(monkeypatch, tmp_path, interruptible):
    (tmp_path / "interrupted_job.py").write_text(
        "import signal\n"
        "try: signal.raise_signal(signal.SIGINT)\n"
        "except BaseException: raise ImportError('half of an extension') from None\n"
        "add_arguments = run = lambda _: None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(cli, "module_of", lambda name: "interrupted_job")
    assert cli.main(["train"]) == 130
    assert "interrupted_job" in sys.modules


def test_an_interrupt_that_became_another_error_is_still_one(job, interruptible, capsys):
    def end():
        try:
            ctrl_c()
        except KeyboardInterrupt:
            raise UserError("the checkpoint is damaged; remove it") from None

    job.ends = end
    assert cli.main(["fake"]) == 130
    assert "damaged" not in capsys.readouterr().err


def test_an_interrupt_where_nothing_can_be_raised_comes_again(job, interruptible):
    class Unlucky:
        def __del__(self):
            ctrl_c()

    def end():
        Unlucky()
        threading.Event().wait(20)

    job.ends = end
    assert cli.main(["fake"]) == 130


# ---- errors of JAX


def realm(end: str, *shell: str, stdout=subprocess.PIPE, **environment: str) -> subprocess.CompletedProcess:
    """A job whose body is `end`, run with the redirections of `shell`."""
    program = (
        "import sys, types; from realm_jax.cli import main as cli\n"
        "job = sys.modules[cli.module_of('talk')] = types.ModuleType('job'); job.add_arguments = lambda parser: None\n"
        f"job.run = lambda args: {end}\n"
        "cli.JOBS['talk'] = 'talk'; sys.exit(cli.main(['talk']))"
    )
    command = " ".join([shlex.join([sys.executable, "-c", program]), *shell])
    environ = os.environ | environment
    return subprocess.run(command, shell=True, cwd=ROOT, stdout=stdout, stderr=subprocess.PIPE, env=environ)


def test_a_platform_that_jax_does_not_have_is_one_line():
    done = realm("__import__('jax').devices()", JAX_PLATFORMS="bogus")
    assert done.returncode == 2
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith("realm: error: JAX does not start: Unable to initialize backend 'bogus'")


def test_too_little_memory_is_one_line_with_the_keys_that_need_less():
    done = realm("__import__('jax').numpy.zeros(10**15).block_until_ready()")
    assert done.returncode == 2
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith("realm: error: a device has too little memory (RESOURCE_EXHAUSTED: Out of memory")
    assert "--config.optimizer.microbatches=2" in line


# ---- configs


def tiny_config() -> ConfigDict:
    config = ConfigDict({"seed": 0, "train": {"steps": 10, "learning_rate": 1e-3, "tasks": ("mlm", "ict")}})
    config.train.limit = config_dict.placeholder(int)
    config.retrieval = ConfigDict({"shared": False, "backend": "device", "depths": [1, 2]})
    return config


def load(*overrides: str, path: str | None = None, default=tiny_config, like=None) -> ConfigDict:
    return load_config(path, list(overrides), default, like=like)


def write(folder: Path, text: str) -> str:
    path = folder / "experiment.py"
    path.write_text(text)
    return str(path)


def test_overrides_are_parsed_to_the_type_of_their_key_and_the_last_counts_but_for_tuples():
    config = load(
        "--config.train.steps=30",
        "--config.train.steps=20",
        "--config.train.learning_rate=1",
        "--config.train.limit=3",
        "--config.train.tasks=('realm',)",
        "--config.train.tasks=qa",
        "--config.retrieval.shared=true",
        "--config.retrieval.backend=a b=c",
    )
    assert config.train.to_dict() == {"steps": 20, "learning_rate": 1.0, "limit": 3, "tasks": ("realm", "qa")}
    assert (config.retrieval.shared, config.retrieval.backend) == (True, "a b=c")


def test_a_loaded_config_is_locked_and_the_default_is_not_shared():
    config = load("--config.seed=5")
    assert config.is_locked and config.train.is_locked
    assert config.seed == 5 and load().seed == 0


def test_of_two_overrides_of_a_key_the_wrong_one_is_named():
    with pytest.raises(UserError, match=r"^--config\.train\.steps=1e3: this key takes a value of type int"):
        load("--config.train.steps=2", "--config.seed=1", "--config.train.steps=1e3")


@pytest.mark.parametrize(
    "override, message",
    [
        ("--config.train.stepps=1", "stepps: there is no such key in the config; did you mean train.steps"),
        ("--config.trainsteps=1", "did you mean train.steps?"),
        ("--config.zzz=1", "zzz: there is no such key in the config; the top level has retrieval, seed, train"),
        ("--config.train={'steps': 1}", "--config.train: train is a section; set its keys, such as --config.train."),
        ("--config.train.steps", "--config.train.steps: no value; write --config.train.steps=VALUE"),
        ("--config.train.steps=ten", "--config.train.steps=ten: this key takes a value of type int, such as 10"),
        ("--config.train.steps=1.5", "--config.train.steps=1.5: this key takes a value of type int"),
        ("--config.train.limit=x", "--config.train.limit=x: this key takes a value of type int"),
        ("--config.train.learning_rate=fast", "learning_rate=fast: this key takes a value of type float"),
        ("--config.retrieval.shared=maybe", "--config.retrieval.shared=maybe: this key takes a value of type bool"),
        ("--config.train.tasks=(mlm, ict", "--config.train.tasks=(mlm, ict: this key takes a value of type tuple"),
        ("--config.train.tasks=(mlm, ict)", "--config.train.tasks=(mlm, ict): this key takes a value of type tuple"),
        ("--config.retrieval.depths=[3]", "--config.retrieval.depths: a list cannot be set on the command line"),
    ],
)
def test_a_wrong_override_is_named_with_what_to_do(override, message):
    with pytest.raises(UserError) as error:
        load("--config.seed=1", override)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_config_file_gets_its_argument(tmp_path):
    path = write(
        tmp_path,
        "from ml_collections import ConfigDict\n"
        "SIZES = {'tiny': 64, 'base': 768}\n"
        "def get_config(size='tiny'):\n"
        "    return ConfigDict({'width': SIZES[size]})\n",
    )

    def of(argument: str, *overrides: str) -> int:
        return load(*overrides, path=path + argument, default=lambda: ConfigDict({"width": 1})).width

    assert of("") == 64
    assert of(":base") == 768
    assert of(":base", "--config.width=5") == 5
    with pytest.raises(UserError, match=r"experiment\.py:4: KeyError: huge"):
        of(":huge")


def test_a_key_of_a_config_file_that_the_default_does_not_have_is_an_error_whatever_is_overridden(tmp_path):
    path = write(
        tmp_path,
        "from realm_jax.config import default\n"
        "def get_config():\n"
        "    config = default()\n"
        "    config.ict.stepss = 5\n"
        "    return config\n",
    )
    with pytest.raises(UserError, match=r"^config\.ict\.stepss: no such key, did you mean ict\.steps\?$"):
        load("--config.ict.stepss=3", path=path, default=default)


@pytest.mark.parametrize(
    "text, message",
    [
        ("def get_config(:\n", r"experiment\.py:1: invalid syntax"),
        ("import no_such_module\n", r"experiment\.py:1: ModuleNotFoundError: No module named 'no_such_module'"),
        ("x = 1\n", r"experiment\.py: a config file must define get_config\(\)"),
        ("def get_config():\n    return 3\n", r"experiment\.py: get_config\(\) must return a ConfigDict, not int"),
        (
            "from ml_collections import ConfigDict\n\n"
            "def get_config():\n"
            "    config = ConfigDict({'steps': 1}).lock()\n"
            "    config.stepps = 2\n"
            "    return config\n",
            r"experiment\.py:5: AttributeError: .*stepps.*steps",
        ),
    ],
)
def test_a_broken_config_file_is_named_with_its_line(tmp_path, text, message):
    with pytest.raises(UserError, match=message) as error:
        load(path=write(tmp_path, text))
    assert "\n" not in str(error.value)


def test_arguments_that_get_config_does_not_fit(tmp_path):
    without = "def get_config():\n    return None\n"
    with pytest.raises(UserError, match=r"get_config\(\) takes no :ARGUMENT"):
        load(path=write(tmp_path, without) + ":tiny")
    with pytest.raises(UserError, match="write --config=FILE:ARGUMENT"):
        load(path=write(tmp_path, without.replace("()", "(size)")))


def test_a_missing_config_file_is_named():
    with pytest.raises(UserError, match=r"there is no file configs/none\.py \(looked from /"):
        load(path="configs/none.py:tiny")


def test_a_config_of_the_package_has_a_name_and_a_path_stays_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "from realm_jax.config import load_config\nget_config = lambda: load_config('qa_wiki')"
    (tmp_path / "quickstart").write_text(text)
    assert load(path="quickstart", default=default).model.width == 64
    assert load("--config.model.width=8", path="./quickstart", default=default).tasks == "qa"


def test_a_name_that_no_config_has_gets_the_names_there_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"^--config=wiki: there is no config .*; choose among ablations, .*, or the"):
        load(path="wiki", default=default)
    (tmp_path / "mine").write_text("")
    with pytest.raises(UserError, match=r"or \./mine for the file$"):
        load(path="mine", default=default)
    for command in (["train"], ["ablate"], ["launch", "plan"], ["build-index"]):
        assert cli.main([*command, "--config=none", "--workdir=run"]) == 2
    with pytest.raises(UserError, match=r"^--spec=v5e: there is no file v5e"):
        load_config("v5e", [], specs.default, kind="spec")


def test_an_edited_config_file_is_read_anew(tmp_path):
    text = "from ml_collections import ConfigDict\ndef get_config():\n    return ConfigDict({'steps': 1})\n"

    def steps(text: str) -> int:
        return load(path=write(tmp_path, text), default=lambda: ConfigDict({"steps": 0})).steps

    assert steps(text) == 1
    assert steps(text.replace("1}", "2}")) == 2
    assert not (tmp_path / "__pycache__").exists()
