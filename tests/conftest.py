"""What every test shares: eight emulated CPU devices, a quick compiler, and the real data where a checkout has it.

The device count and XLA's flags must be set before any JAX backend starts, so they are set here, at import.
"""

import dataclasses
import fcntl
import gc
import gzip
import json
import os
import shutil
from importlib.metadata import version
from pathlib import Path

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# The older emitters compile tiny programs in a third of the time; processes that tests start inherit the flag. XLA ends
# a process for a flag that it does not know, so it is set where it is known to be there.
if version("jaxlib").startswith("0.10."):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_use_fusion_emitters=false"

import jax  # noqa: E402  (after the platform is chosen)

jax.config.update("jax_num_cpu_devices", 8)

# Tracing makes many objects that stay. Looking through them after every 700 took a tenth of the tests' time.
gc.set_threshold(50_000)

OPTIMISED = ("slow", "nightly")  # marks of tests whose programs are compiled with optimisations


def pytest_configure(config: pytest.Config) -> None:
    """Give XLA's thread pool more threads than devices, where programs are optimised: on fewer, collectives of
    eight devices can wait for one another for ever, and XLA ends the process."""
    if config.option.markexpr in OPTIMISED:
        os.environ.setdefault("NPROC", "16")


COMPILING = ("adaptation", "cli", "indexing", "launch", "models", "serving", "tasks", "train")  # folders that compile


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest: a worker that began one at the end would leave the others idle."""
    items.sort(key=lambda item: item.path.parent.name not in COMPILING)


SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data sets beside the checkout; the test is skipped where there is none."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"no real data at {SHARED_DATA}")
    return SHARED_DATA


@pytest.fixture(scope="session")
def shared_lines(shared_data):
    """The records of a compressed JSON Lines file of that folder."""

    def read(name: str) -> list[dict]:
        with gzip.open(shared_data / name, "rt", encoding="utf-8") as lines:
            return [json.loads(line) for line in lines]

    return read


@pytest.fixture(scope="session", autouse=True)
def cache_of_tests(tmp_path_factory):
    """Nothing is kept in the home folder. Vectors are not kept at all, unless a test allows it (REALM_CACHE_BYTES):
    tests that embed for themselves shall embed. Nothing waits for the disk: no test turns the power off."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setenv("REALM_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("REALM_CACHE_BYTES", "0")
        yield


@pytest.fixture(scope="session")
def session_folder(tmp_path_factory) -> Path:
    """A folder that all workers share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session", autouse=True)
def compiled(request, session_folder):
    """The folder of all compiled programs, shared by workers and the processes that tests start. Programs are compiled
    without optimisations, which a few tiny steps do not repay, but for `-m slow` and `-m nightly`."""
    folder = session_folder / "compiled"
    settings = {
        "jax_disable_most_optimizations": request.config.option.markexpr not in OPTIMISED,
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            jax.config.update(name, value)
            patch.setenv(name.upper(), str(value))
        yield folder


@pytest.fixture(scope="session")
def trained_run(session_folder):
    """A tiny run (see `tiny_run.py`), trained once for the tests of all workers; they read it and leave it as it is."""
    from tiny_run import open_tiny_run, train_tiny_run

    folder, is_trained = session_folder / "tiny", session_folder / "tiny.trained"
    with open(session_folder / "tiny.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_trained.exists():
            return open_tiny_run(folder)
        run = train_tiny_run(folder)
        is_trained.touch()
        return run


@pytest.fixture
def copied_run(trained_run, tmp_path) -> Path:
    """The folder of a copy of that run, over a copy of its data, to be changed."""
    for name in ("data", "run"):
        shutil.copytree(trained_run.workdir.parent / name, tmp_path / name)
    recorded = tmp_path / "run" / "config.json"
    config = json.loads(recorded.read_text())
    config["data"]["path"] = str(tmp_path / "data")
    recorded.write_text(json.dumps(config))
    return tmp_path / "run"


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
def documents(tmp_path_factory) -> Path:
    """A file of sixty articles to index or to adapt to; see `articles.py`."""
    from articles import write_articles

    return write_articles(tmp_path_factory.mktemp("documents") / "articles.jsonl")


@pytest.fixture
def copied_index(indexed, tmp_path) -> Path:
    """A copy of the index that the fixture `indexed` of a test module made, for tests that change it."""
    shutil.copytree(indexed, tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    config = json.loads(path.read_text())
    config["data"]["path"] = str(tmp_path / "run" / "data")
    path.write_text(json.dumps(config))
    return tmp_path / "run"


@pytest.fixture(scope="module")
def encoder(documents) -> Path:
    """A pretrained encoder with the vocabulary of these documents; see `pretrained_encoders.py`."""
    from pretrained_encoders import save_sentence_bert

    return save_sentence_bert(documents)


@pytest.fixture(scope="module")
def one_device():
    """Commands of this module open runs on one of the emulated devices: it takes less time, and what is tested does not
    depend on their number."""
    from functools import partial

    from realm_jax.assemble import make_run
    from realm_jax.train import recipe, workdir

    with pytest.MonkeyPatch.context() as patch:
        for module in (recipe, workdir):
            patch.setattr(module, "make_run", partial(make_run, devices=jax.devices()[:1]))
        yield


@pytest.fixture(scope="module")
def quick_steps():
    """Runs of this module share their compiled steps, sixteen passages have several chunks, and nobody waits long for
    another job; see `runs.py` and `small_chunks.py`."""
    import small_chunks
    from runs import shared_steps

    with pytest.MonkeyPatch.context() as patch, shared_steps():
        small_chunks.shrink(patch.setattr)
        yield


@pytest.fixture(scope="module")
def sturdy(people, quick_steps, tmp_path_factory):
    """An undisturbed run that adopts at fixed steps, with a builder beside it; tests read it and leave it as it is."""
    from runs import Trained, open_tiny, train_with_builder

    run = open_tiny(people, tmp_path_factory.mktemp("sturdy"))
    return Trained(run, train_with_builder(run))


@pytest.fixture
def copied(sturdy, tmp_path):
    """A copy of that run, which a test may change."""
    shutil.copytree(sturdy.run.workdir, tmp_path / "run")
    return dataclasses.replace(sturdy.run, workdir=tmp_path / "run")


@pytest.fixture(scope="module")
def straight(people, quick_steps, tmp_path_factory):
    """An undisturbed run that makes its index itself; tests read it and leave it as it is."""
    from runs import open_inline, train_measured

    run = open_inline(people, tmp_path_factory.mktemp("straight"))
    train_measured(run)
    return run


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """sky and kubectl that only write down what they are asked, and buckets in memory; call it with their answers.

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

    for module in ("launch.status", "launch.skypilot", "cli.launch"):
        monkeypatch.setattr(f"realm_jax.{module}.open_folder", in_memory)
    return put


@pytest.fixture
def bucket():
    """URL of an empty bucket of a stand-in for Google Cloud Storage."""
    pytest.importorskip("gcp_storage_emulator", reason="needs gcp-storage-emulator and gcsfs (`.[test]`)")
    gcs = pytest.importorskip("gcs")
    with gcs.bucket() as url:
        yield url
