"""Open a run: its config checked, its folder compared, its data, mesh and networks built."""

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from realm_jax.cache import cache_bytes
from realm_jax.checksums import checksums
from realm_jax.config import completed, default_like, flatten, kind_of, require, task_names, validate
from realm_jax.data.sources import Sources, open_sources
from realm_jax.errors import UserError
from realm_jax.index.approximate import check_scann
from realm_jax.jobs.models import no_model, resolved
from realm_jax.jobs.projection import FILE as COMPONENTS
from realm_jax.jobs.starting import (
    READER,
    find_weights,
    has_trained_reader,
    is_weights,
    local_source,
    place_of,
    sentence_model,
    with_weights,
)
from realm_jax.mesh import put_whole
from realm_jax.models.realm import Params, Realm
from realm_jax.models.weights import PROJECTION
from realm_jax.processes import run_on_process_0
from realm_jax.run import Run, encoder_of, make_model, make_run, tower_lengths
from realm_jax.storage import Folder, cache_folder, digest, make_folder, open_folder, read_json, write_json_atomic
from realm_jax.tasks import TASKS, make_task
from realm_jax.text.tokenizer import Tokenizer
from realm_jax.training.checkpoints import Saved
from realm_jax.training.workdir import START, begins_with_reader, check_workdir, has_checkpoint

logger = logging.getLogger(__name__)

BORROWING = ("init_from", "reader_from")  # keys that name what a fresh run starts from


def set_up_jax() -> None:
    """A persistent compilation cache, unless JAX_COMPILATION_CACHE_DIR names one already. Raises UserError where the
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
    config = resolved(config, workdir)
    sources = open_sources(config.data.path, recorded_corpus(workdir))
    config = _with_possible_tasks(config, sources)
    borrowed = _borrowed(config, workdir, sources.wordpiece)
    run = make_run(config, workdir, sources)
    for name in task_names(config):
        make_task(name, run).check_data()
    make_folder(workdir, "--workdir")
    for key, folder in borrowed.items():
        if not is_weights(folder):
            check_source(run, folder, key)
    check_workdir(run)
    _warn_of_cut_passages(run)
    return run


def _with_possible_tasks(config: ConfigDict, sources: Sources) -> ConfigDict:
    """The config with the tasks that its data allow. Raises UserError where none is left."""
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


def _borrowed(config: ConfigDict, workdir: Path, wordpiece: Tokenizer) -> dict[str, Path]:
    """Key → the folder that it names, of what a run still has to start from. Raises UserError for weights in one that
    do not fit."""
    found: dict[str, Path] = {}
    if not borrows(config, workdir):
        return found
    model = make_model(config, wordpiece.size, encoder_of(wordpiece))
    for key in BORROWING:
        if not config[key]:
            continue
        found[key] = folder = local_source(config[key], f"config.{key}")
        if is_weights(folder):
            networks = find_weights(folder, model, wordpiece, networks_of(key, model))
            require(key != "reader_from" or READER in networks, key, f"{folder} has no reader; name another folder")
        elif not (folder / "data.json").is_file():
            raise UserError(no_model(config[key], key))
    if "init_from" in found and is_weights(found["init_from"]):
        _warn_of_long_inputs(config, found["init_from"], model)
    return found


def _warn_of_long_inputs(config: ConfigDict, folder: Path, model: Realm) -> None:
    """Where texts may be longer than those for which a model of sentence-transformers was made."""
    lengths = tower_lengths(config, model.query_template, model.passage_template)
    for tower, (length, key) in enumerate(zip(lengths, ("query_length", "document_length"), strict=True)):
        place = place_of(folder, tower)
        sentence = sentence_model(place) if place else None
        longest = sentence.max_seq_length if sentence else None
        if longest and length > longest:
            logger.warning(
                "config.data.%s=%d makes inputs of up to %d word pieces, but %s was made for %d (max_seq_length); "
                "sentence-transformers would cut them there",
                key, config.data[key], length, place, longest,
            )  # fmt: skip


def recorded_corpus(workdir: Path) -> str | None:
    """The version of the corpus that the run began with, if it has begun: it stays with it whatever is edited."""
    path = workdir / "data.json"
    return read_json(path).get("passages") if path.is_file() else None


def _warn_of_cut_passages(run: Run) -> None:
    bodies, titles = run.sources.passages.lengths()
    length = run.config.data.document_length
    cut = int((bodies + titles + 3 > length).sum())  # [CLS], and [SEP] after title and body
    if cut:
        logger.warning(
            "%d of %d passages are longer than config.data.document_length=%d and are cut to it",
            cut,
            len(bodies),
            length,
        )


def reopen_run(workdir: Path, overrides: dict[str, Any] | None = None, questions: bool = True) -> Run:
    """The run recorded in a folder, with operations keys changed by `overrides` (dotted keys).

    questions: whether those of its prepared folder are read.
    """
    config = recorded_config(workdir)
    config.update_from_flattened_dict(overrides or {})
    validate(config)
    return make_run(config, workdir, open_sources(config.data.path, questions=questions))


def has_begun(workdir: Path, tagger: bool) -> bool:
    """Whether a run has begun there. Raises UserError where it is one of the other kind, or damaged."""
    begun = (workdir / "config.json").is_file()
    if begun:
        recorded_config(workdir, tagger=tagger)
    return begun


def recorded_config(workdir: Path, name: str = "--workdir", tagger: bool | None = False) -> ConfigDict:
    """The config that a run recorded in its folder. `name`: of the flag or key that names the folder.

    tagger: whether it must be the run of a tagger, or of REALM; None: either will do.
    """
    if not (workdir / "config.json").is_file():
        raise UserError(f"{name}={workdir}: no run there (no config.json); train one with `realm train`")
    config = read_json(workdir / "config.json")
    if not isinstance(config, dict) or not {"tasks", "data", "model"} <= {*config}:
        raise UserError(f"{name}={workdir}: config.json there is not the config of a run of `realm train`")
    if tagger is not None and (kind_of(config) is not None) != tagger:
        found, wanted = ("REALM", "a tagger") if tagger else ("a tagger", "REALM")
        raise UserError(f"{name}={workdir}: {found} was trained there, not {wanted}; name another folder")
    known = default_like(config)
    if gone := sorted(key for key in {*flatten(config)} - {*flatten(known.to_dict())} if "." in key):
        raise UserError(
            f"{name}={workdir}: made by another version of realm_jax, with a key {gone[0]}; there, write its networks "
            "with `realm weights export`, and start from them with config.init_from"
        )
    return completed(config, known)


def recorded_folder(workdir: Path) -> Folder:
    """The shared folder of the run that is recorded in `workdir`."""
    config = recorded_config(workdir)
    validate(config)
    return open_folder(config.refresh.shared or workdir)


def borrows(config: ConfigDict, workdir: Path) -> bool:
    """Whether a run still has to take its first parameters from elsewhere: none of its own are saved yet."""
    return any(config.get(key) for key in BORROWING) and not has_checkpoint(config, workdir)


def starts_with_pca(run: Run) -> bool:
    """Whether the projection begins as principal components: one that `init_from` has is taken as it is, and a run
    always has its own."""
    encoder, source = run.config.encoder, run.config.init_from
    if encoder.projection == 0 or encoder.projection_start != "pca":
        return False
    if not source:
        return True
    folder = local_source(source)
    if not is_weights(folder):
        return False
    found = find_weights(folder, run.model, run.sources.wordpiece)
    return not any(PROJECTION in found[tower].found for tower in run.model.embedder_names if tower in found)


def borrow_params(run: Run, fresh: Params) -> Params:
    """What `init_from` and `reader_from` name, on this run's devices; the reader is that of the latter."""
    params = dict(fresh)
    for key in BORROWING:
        if run.config[key]:
            params |= _borrow(run, fresh, key)
    return params


def networks_of(key: str, model: Realm) -> tuple[str, ...]:
    """The networks that a key of BORROWING is about."""
    return (READER,) if key == "reader_from" else (*model.embedder_names, READER)


def _borrow(run: Run, fresh: Params, key: str) -> Params:
    """Weights in place of fresh parameters, or the final parameters of another run, of the networks of a key.

    A run is read by the names of its networks, since its last task may have trained others than it would here.
    """
    folder, names = local_source(run.config[key], f"config.{key}"), networks_of(key, run.model)
    if is_weights(folder):
        return with_weights(run, {name: fresh[name] for name in names}, folder, key)
    last = task_names(recorded_config(folder, f"config.{key}"))[-1]
    saved = Saved.newest(folder / last / "checkpoints")
    if saved is None:
        raise UserError(f"config.{key}: {folder} has no checkpoint of task {last}; let it finish first")
    places = {name: run.param_shardings[name] for name in names}
    return dict(jax.tree.map(put_whole, saved.params(names), places))


def record_start(run: Run, params: Params) -> None:
    """Write WORKDIR/start.json, what is to be known of where a run began when that may be gone.

    {"reader": whether its reader was trained with questions before, "params": a digest of the parameters that it took
    from elsewhere}. What an earlier start from others left there is removed: its best parameters, principal components
    and records are none of this run's. Every process has to call it, before the first step.
    """
    sums = checksums(params) if any(run.config[key] for key in BORROWING) else {}
    run_on_process_0(lambda: _record_start(run, digest(json.dumps(sums, sort_keys=True).encode())))


def _record_start(run: Run, params: str) -> int:
    make_folder(run.workdir, "--workdir")
    path = run.workdir / START
    if path.is_file() and read_json(path).get("params") != params:
        (run.workdir / COMPONENTS).unlink(missing_ok=True)
        shutil.rmtree(run.workdir / task_names(run.config)[0], ignore_errors=True)
    key = next((key for key in ("reader_from", "init_from") if run.config[key]), "")  # the first that is set has it
    trained = bool(key) and _has_reader(run, key)
    write_json_atomic(path, {"reader": trained, "params": params})
    return 0


def _has_reader(run: Run, key: str) -> bool:
    """Whether what a key of BORROWING names, a run or weights, has a reader that was trained with questions."""
    folder = local_source(run.config[key], f"config.{key}")
    if is_weights(folder):
        return has_trained_reader(folder, run.model)
    names = task_names(recorded_config(folder, f"config.{key}"))
    return any(TASKS[name].teaches_reading() for name in names) or begins_with_reader(folder)


def check_source(run: Run, folder: Path, key: str) -> None:
    """Raise UserError when the run in `folder` is not done, or has another tokenizer or a network of another size.

    key: that names it, `init_from` or `reader_from`.
    """
    config = recorded_config(folder, f"config.{key}")
    last = task_names(config)[-1]
    saved = Saved.newest(folder / last / "checkpoints")
    if saved is None or saved.step < config[last].steps:
        done = 0 if saved is None else saved.step
        raise UserError(
            f"config.{key}: {folder} is at step {done} of {config[last].steps} of {last}; let it finish first"
        )
    tokenizer = read_json(folder / "data.json")["tokenizer"]
    if tokenizer != run.sources.wordpiece.fingerprint:
        raise UserError(
            f"config.{key}: {folder} was trained with another vocabulary; prepare {run.config.data.path} with "
            "`realm prepare --vocab` and the vocab.txt of its tokenizer"
        )
    model = make_model(config, run.sources.wordpiece.size, encoder_of(run.sources.wordpiece))
    theirs, ours = (_shapes(one, networks_of(key, run.model)) for one in (model, run.model))
    for name in sorted({*theirs, *ours}):
        if theirs.get(name) != ours.get(name):
            raise UserError(
                f"config.{key}: {name} is {theirs.get(name)} in {folder} and {ours.get(name)} here; "
                "set config.model, config.encoder and the lengths of config.data as they are there"
            )


def _shapes(model: Realm, names: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """Path → shape of the parameters of some networks."""
    params = jax.eval_shape(model.init, jax.random.key(0))
    wanted = {name: params[name] for name in names if name in params}
    return {jax.tree_util.keystr(path): x.shape for path, x in jax.tree_util.tree_leaves_with_path(wanted)}
