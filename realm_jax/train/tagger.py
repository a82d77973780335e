"""`realm train` of a named-entity tagger, and a trained one as the span finder `tagger:WORKDIR`.

    WORKDIR/config.json, data.json   as of every run
    WORKDIR/tokenizer/               the vocabulary
    WORKDIR/kinds.json               kinds of names, in the order of the labels
    WORKDIR/tagger/                  checkpoints, metrics.jsonl, evaluations.jsonl (dev set)
    WORKDIR/results.json             precision, recall and F1 on dev and test, written last

A trained tagger needs its folder alone. Read `run_tagger` next; the network is `realm_jax/models/tagger.py`.
"""

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict
from rich.table import Table

from realm_jax.cache import cache_programs
from realm_jax.config import validate
from realm_jax.console import console
from realm_jax.data.conll import Document, open_tagged
from realm_jax.data.spans import NAME, find_by_rules
from realm_jax.data.wordpiece import WordPiece
from realm_jax.errors import UserError
from realm_jax.eval.entities import Scores
from realm_jax.eval.tagging import TextTagger, WindowTagger
from realm_jax.host import PREEMPTED, Preempted
from realm_jax.mesh import put_with_sharding
from realm_jax.models.folders import resolve_model_path
from realm_jax.models.weights import load_bert, read_bert_settings
from realm_jax.processes import is_process_0
from realm_jax.run import BaseRun
from realm_jax.storage import exclusive_lock, make_folder, read_json, write_json_atomic
from realm_jax.tasks.tagger import TaggerTask, annotated, kinds_of, make_tagger_run, score, score_spans
from realm_jax.train.checkpoints import SavedCheckpoint
from realm_jax.train.init_from import needs_init
from realm_jax.train.loop import train_task
from realm_jax.train.recipe import preemptible
from realm_jax.train.restore import restore_params
from realm_jax.train.trackers import check_installed
from realm_jax.train.workdir import check_workdir, has_begun, recorded_config

logger = logging.getLogger(__name__)

KINDS, TOKENIZER, VOCABULARY = "kinds.json", "tokenizer", "vocab.txt"


def run_tagger(config: ConfigDict, workdir: Path) -> int:
    """Train, measure and write the results; returns the exit code, 75 after SIGTERM, once the state is saved."""
    run = open_tagger_run(config, workdir)
    try:
        with exclusive_lock(workdir) if is_process_0() else nullcontext(), preemptible():
            results = train(run)
    except Preempted as reason:
        logger.warning("%s", reason)
        return PREEMPTED
    if is_process_0():
        show(results)
    return 0


def open_tagger_run(config: ConfigDict, workdir: Path, devices: list[jax.Device] | None = None) -> BaseRun:
    """A validated run over its annotated text; config and vocabulary are recorded in `workdir`, or compared with those
    there. Raises UserError, also where the weights of `init_from` do not fit."""
    validate(config, TaggerTask)
    check_installed(config.log.to)
    begun = has_begun(workdir, tagger=True)
    splits = open_tagged(config.data.path)
    if needs_init(config, workdir):
        read_bert_settings(resolve_model_path(config.init_from))  # says what it is, if it is no BERT
    given = not begun or Path(config.data.vocabulary).is_file()  # compared with that of the run
    tokenizer = _vocabulary(config, splits["train"]) if given else WordPiece.load(workdir / TOKENIZER)
    run = make_tagger_run(config, workdir, tokenizer, kinds_of(splits["train"]), splits, devices)
    make_folder(workdir, "--workdir")
    if needs_init(config, workdir):
        load_bert(
            resolve_model_path(config.init_from), run.model.bert
        )  # says what does not fit before anything is recorded
    if is_process_0() and not begun:
        tokenizer.save(workdir / TOKENIZER)
        write_json_atomic(workdir / KINDS, list(run.model.kinds))
    check_workdir(run)
    return run


def _vocabulary(config: ConfigDict, documents: Sequence[Document]) -> WordPiece:
    """The vocabulary that the config names, that of the weights, or one learned from the training text."""
    data = config.data
    path = data.vocabulary or (str(resolve_model_path(config.init_from) / VOCABULARY) if config.init_from else "")
    if path:
        tokenizer = WordPiece.from_vocab(path, data.lower_case)
        if data.lower_case != (not tokenizer.cased):
            found = f"a piece with capital letters, {tokenizer.cased[0]!r}" if data.lower_case else "no capital letters"
            raise UserError(f"{path}: has {found}; set config.data.lower_case={not data.lower_case}")
        return tokenizer
    return WordPiece.train((annotated(document).text for document in documents), data.vocabulary_size, data.lower_case)


def train(run: BaseRun) -> dict[str, Any]:
    """Train to the end and write `results.json`; returns it."""
    name, fresh = TaggerTask.name, run.initial_params()
    if needs_init(run.config, run.workdir):
        encoder = load_bert(resolve_model_path(run.config.init_from), run.model.bert)
        fresh[name]["bert"] = jax.tree.map(put_with_sharding, encoder, run.param_shardings[name]["bert"])
    params = train_task(run, name, fresh, TaggerTask(run).measure())
    splits = {split: documents for split, documents in run.sources.splits.items() if split in ("dev", "test")}
    windows = WindowTagger(run)
    results: dict[str, Any] = {split: score(windows, params, documents) for split, documents in splits.items()}
    results["rules"] = {split: score_rules(documents) for split, documents in splits.items()}
    if is_process_0():
        saved = SavedCheckpoint.newest(run.workdir / name / "checkpoints")
        assert saved is not None, "training ends with a save"
        results |= {"kinds": list(run.model.kinds), "seconds": saved.record["seconds"]}
        write_json_atomic(run.workdir / "results.json", results)
    return results


def score_rules(documents: Sequence[Document]) -> Scores:
    """How well the rules do without a model, which know no kinds: only the scores of boundaries say something."""
    texts = [annotated(document) for document in documents]
    found = [[span for span in find_by_rules(text.text) if span.kind == NAME] for text in texts]
    return score_spans(texts, found)


def show(results: dict[str, Any]) -> None:
    """The results as a table."""
    table = Table("", "precision", "recall", "F1", "of boundaries", "", "F1", title="Names found", title_justify="left")
    measures = ("precision", "recall", "f1")
    for split, rules in results["rules"].items():
        own = [f"{results[split][key]:.3f}" for key in measures]
        table.add_row(split, *own, *(f"{results[split][f'boundary_{key}']:.3f}" for key in measures))
        table.add_row(f"{split}, by rules", *"–––", *(f"{rules[f'boundary_{key}']:.3f}" for key in measures))
    console().print(table)


# --- a trained tagger -------------------------------------------------------------------------------------------------


def finder(workdir: str) -> TextTagger:
    """The span finder `tagger:WORKDIR`: the newest parameters of a run, on this process's devices.

    Raises UserError when there is no tagger, or it has no checkpoint yet.
    """
    cache_programs()
    return open_tagger(Path(workdir), jax.local_devices())


def open_tagger(workdir: Path, devices: list[jax.Device] | None = None, batch_size: int | None = None) -> TextTagger:
    """A trained tagger on these devices (None: all). batch_size: windows on each, as in its config if not given.

    Raises UserError when there is none, and when its vocabulary, its kinds or its config are not those of its training.
    """
    task = TaggerTask.name
    config = recorded_config(workdir, task, tagger=True)
    here = {"mesh.fsdp": 1, "mesh.model": 1, "optimizer.microbatches": 1, "init_from": ""}
    here[f"{task}.batch_size"] = len(devices or jax.devices())
    config.update_from_flattened_dict(here)
    if batch_size is not None:
        config.evaluation.batch_size = batch_size
    validate(config, TaggerTask)
    run = make_tagger_run(config, workdir, WordPiece.load(workdir / TOKENIZER), _recorded_kinds(workdir), {}, devices)
    recorded = read_json(workdir / "data.json")
    for name, file in {"tokenizer": TOKENIZER, "kinds": KINDS, "network": "config.json"}.items():
        if not isinstance(recorded, dict) or recorded.get(name) != run.sources.fingerprints()[name]:
            raise UserError(f"tagger={workdir}: {file} is not what it was trained with; restore it, or train again")
    saved = SavedCheckpoint.newest(workdir / task / "checkpoints")
    if saved is None:
        raise UserError(f"tagger={workdir}: has no checkpoint yet; go on with `realm train`")
    if saved.step < config[task].steps:
        logger.warning("tagger=%s is not done: step %d of %d", workdir, saved.step, config[task].steps)
    params = restore_params(run, task, saved)
    return TextTagger(WindowTagger(run), params, f"tagger:{workdir}", saved.record["digest"])


def _recorded_kinds(workdir: Path) -> tuple[str, ...]:
    kinds = read_json(workdir / KINDS)
    if not (isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)):
        raise UserError(f"tagger={workdir}: {KINDS} is not a list of kinds; restore the original")
    return tuple(kinds)
