"""What every test shares: eight emulated CPU devices, and the real data where a checkout has it.

The device count must be set before any JAX backend starts, so it is set here, at import.
"""

import os
from pathlib import Path

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402  (after the platform is chosen)

jax.config.update("jax_num_cpu_devices", 8)

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data sets beside the checkout; the test is skipped where there is none."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"no real data at {SHARED_DATA}")
    return SHARED_DATA


@pytest.fixture(scope="session", autouse=True)
def cache_of_tests(tmp_path_factory):
    """Nothing is kept in the home folder. Vectors are not kept at all, unless a test allows it (REALM_CACHE_BYTES):
    tests that embed for themselves shall embed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REALM_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("REALM_CACHE_BYTES", "0")
        yield


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """The folder of all programs that were compiled without optimisations, for the next module that needs them."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="session")
def trained_run(compiled, tmp_path_factory):
    """A tiny run (see `tiny_run.py`), trained once for all tests; they read it and leave it as it is."""
    from runs import quick_compiler
    from tiny_run import train_tiny_run

    with pytest.MonkeyPatch.context() as patch:
        # Jobs then keep no compiled programs in the home folder.
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(compiled))
        with quick_compiler(compiled):  # two steps do not repay the compiler's work
            run = train_tiny_run(tmp_path_factory.mktemp("tiny"))
        yield run


@pytest.fixture(scope="session")
def people(tmp_path_factory):
    """A prepared folder; see `tiny_run.py`."""
    from tiny_run import prepare_people

    return prepare_people(tmp_path_factory.mktemp("people"))


@pytest.fixture
def passages(tmp_path) -> Path:
    """A file of three articles; see `capitals.py`."""
    from capitals import TEXTS, write_lines

    records = [{"id": key, "title": key.title(), "text": text} for key, text in TEXTS.items()]
    return write_lines(tmp_path / "passages.jsonl", records)


@pytest.fixture
def questions(tmp_path) -> Path:
    """Questions about them."""
    from capitals import QUESTIONS, write_lines

    return write_lines(tmp_path / "questions.jsonl", QUESTIONS)


@pytest.fixture(scope="module")
def quick_programs(compiled):
    """Programs of this module are compiled without optimisations: they run too briefly to repay them."""
    from runs import quick_compiler

    with quick_compiler(compiled):
        yield


@pytest.fixture(scope="module")
def quick_steps(compiled):
    """Runs of this module share their compiled steps; see `runs.py`."""
    from runs import shared_steps

    with shared_steps(compiled):
        yield


@pytest.fixture(scope="module")
def sturdy(people, quick_steps, tmp_path_factory):
    """An undisturbed run that adopts at fixed steps, with a builder beside it; tests read it and leave it as it is."""
    from runs import Trained, builder, open_tiny, train

    run = open_tiny(people, tmp_path_factory.mktemp("sturdy"))
    with builder(run):
        return Trained(run, train(run))


@pytest.fixture(scope="module")
def straight(people, quick_steps, tmp_path_factory):
    """An undisturbed run that makes its index itself; tests read it and leave it as it is."""
    from runs import open_inline, train_measured

    run = open_inline(people, tmp_path_factory.mktemp("straight"))
    train_measured(run)
    return run


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """gcloud and kubectl that only write down what they are asked, and buckets in memory; call it with their answers.

    Gives the folder of the fakes. May be called again, for other answers.
    """
    from fake_tools import install

    from realm_jax.storage import open_folder

    def in_memory(url):
        return open_folder(str(url).replace("gs://", f"memory://{tmp_path.name}/"))

    def put(*answers: dict) -> Path:
        install(tmp_path / "bin", list(answers))
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
        return tmp_path / "bin"

    for module in ("launch.status", "jobs.launch"):
        monkeypatch.setattr(f"realm_jax.{module}.open_folder", in_memory)
    return put
