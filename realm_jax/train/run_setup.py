"""Open a run: check its config and folder, and build its data, mesh and networks."""

import logging
import os
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from realm_jax.cache import cache_bytes
from realm_jax.config import add_sections, task_names, validate
from realm_jax.data.sources import Sources, open_sources
from realm_jax.data.store import PassageStore
from realm_jax.errors import UserError
from realm_jax.retrieval.scann import check_scann
from realm_jax.run import Run, make_model, make_run, prompt_encoder
from realm_jax.sections import has_reader_tokenizer
from realm_jax.storage import Folder, cache_folder, make_folder, open_folder, read_json
from realm_jax.tasks import TASKS, make_task, with_networks
from realm_jax.train.init_from import check_reader_is_named, fill_from_pretrained, init_sources, needs_init
from realm_jax.train.workdir import check_workdir, recorded_config

logger = logging.getLogger(__name__)


def set_up_jax() -> None:
    """A persistent compilation cache, unless JAX_COMPILATION_CACHE_DIR names one already. Raises UserError if the
    environment says nothing sensible about what may be kept."""
    cache_bytes()
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "jax"))


def open_run(config: ConfigDict, workdir: Path) -> Run:
    """A validated run over its prepared folder; its config is recorded in `workdir`, or compared with the one there."""
    validate(config)
    if config.retrieval.backend == "scann":
        check_scann()
    has_begun(workdir, tagger=False)
    config = fill_from_pretrained(config, workdir)
    sources = open_sources(config.data.path, recorded_corpus(workdir), reader=has_reader_tokenizer(config))
    config = _with_possible_tasks(config, sources)
    if needs_init(config, workdir):
        _check_sources(config, sources)
    run = with_networks(make_run(config, workdir, sources))
    for name in task_names(config):
        make_task(name, run).check_data()
    make_folder(workdir, "--workdir")
    check_workdir(run)
    _warn_of_cut_passages(run)
    return run


def _with_possible_tasks(config: ConfigDict, sources: Sources) -> ConfigDict:
    """The config with the tasks that its data allow. Raises UserError if none is left."""
    names = task_names(config)
    lacking = {name: what for name in names if (what := TASKS[name].missing(config, sources))}
    left = [name for name in names if name not in lacking]
    if not left:
        raise UserError(
            f"{config.data.path}: no {' and no '.join(dict.fromkeys(lacking.values()))}, and config.tasks has nothing "
            f"but {' and '.join(lacking)}; prepare some, or set config.tasks"
        )
    for name, what in lacking.items():
        logger.info("%s has no %s: %s left out of the recipe", config.data.path, what, name)
    if not lacking:
        return config
    found = ConfigDict(config.to_dict())
    found.tasks = ",".join(left)
    return found


def _check_sources(config: ConfigDict, sources: Sources) -> None:
    """Raise UserError if what a run is to start from is missing, or does not fit."""
    tokenizer, reader = sources.tokenizer, sources.for_reader.tokenizer
    model = make_model(config, tokenizer.size, prompt_encoder(tokenizer), reader_vocabulary_size=reader.size)
    for source in init_sources(config):
        check_reader_is_named(config, source)
        source.check(config, model, tokenizer, reader)


def recorded_corpus(workdir: Path) -> str | None:
    """The version of the corpus that the run began with, if it has begun: it stays with it whatever is edited."""
    path = workdir / "data.json"
    return read_json(path).get("passages") if path.is_file() else None


def _warn_of_cut_passages(run: Run) -> None:
    _warn_of_cut(run, run.sources.passages, "")
    if run.sources.reader is not None:
        _warn_of_cut(run, run.sources.reader.passages, " in the reader's tokens")


def _warn_of_cut(run: Run, store: PassageStore, where: str) -> None:
    bodies, titles = store.lengths()
    length = run.config.data.document_length
    cut = int((bodies + titles + 3 > length).sum())  # [CLS], and [SEP] after title and body
    if cut:
        logger.warning(
            "%d of %d passages are longer than config.data.document_length=%d%s and are cut to it",
            cut,
            len(bodies),
            length,
            where,
        )


def load_run(workdir: Path, overrides: dict[str, Any] | None = None, questions: bool = True) -> Run:
    """The run recorded in a folder, with operations keys changed by `overrides` (dotted keys).

    questions: whether those of its prepared folder are read.
    """
    config = recorded_config(workdir)
    add_sections(config, [key.partition(".")[0] for key in overrides or {}])
    config.update_from_flattened_dict(overrides or {})
    validate(config)
    sources = open_sources(config.data.path, questions=questions, reader=has_reader_tokenizer(config))
    return with_networks(make_run(config, workdir, sources))


def has_begun(workdir: Path, tagger: bool) -> bool:
    """Whether a run has begun there. Raises UserError if it is one of the other kind, or damaged."""
    begun = (workdir / "config.json").is_file()
    if begun:
        recorded_config(workdir, tagger=tagger)
    return begun


def recorded_folder(workdir: Path) -> Folder:
    """The shared folder of the run that is recorded in `workdir`."""
    config = recorded_config(workdir)
    validate(config)
    return open_folder(config.refresh.shared or workdir)
