"""Write and read the exported model of a run, from which it answers, searches, or starts another run.

    WORKDIR/TASK/model/                   the parameters at the end of a task
    WORKDIR/model/                        those of the last finished task; its files are hard links to the ones above
        manifest.json                     task, step, corpus of the vectors, checksums of all arrays
        config.json                       the run's config
        query_embedder/, document_embedder/ (or embedder/, if both encoders share one network)
                                          BERT, tokenizer and the modules of sentence-transformers
        modules.json, router_config.json  both encoders as one `SentenceTransformer(WORKDIR/model)`
        reader/                           BERT with its heads, and its tokenizer
        reranker/                         if the run has one: all of its arrays by our names
        vectors.npy                       float32 [passages, width]; missing if no passage vectors fit these parameters
        tokens.npy, token_*.npy           token vectors, only of an index that stores them (`indexing/token_file.py`)

Answers need only this directory; checkpoints are only for training. We write a directory under a hidden name and rename
it, so readers never see a part of it. Read next: `trained_run.py`, which opens it.
"""

import dataclasses
import logging
import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from realm_jax.assemble import longest_inputs
from realm_jax.checksums import arrays_digest, checksums, mismatched, named_arrays
from realm_jax.config import Config, task_names
from realm_jax.data.tokenizer import Tokenizer
from realm_jax.errors import UserError
from realm_jax.indexing.files import load_vectors, read_manifest
from realm_jax.indexing.provider import shared_folder
from realm_jax.indexing.token_file import FILES as TOKEN_FILES
from realm_jax.indexing.token_file import FREQUENCIES, PROJECTION, TOKENS
from realm_jax.mesh import to_host
from realm_jax.mirror import url_of
from realm_jax.models.folders import READER, SHARED, TOWERS
from realm_jax.models.layers import Params
from realm_jax.models.networks import Realm
from realm_jax.models.sentence_transformers import (
    ENCODER_SECTION,
    PASSAGES,
    QUERIES,
    TRAINED_READER,
    mark_not_a_sentence_encoder,
    write_modules,
    write_sentence_transformer,
)
from realm_jax.models.weights import bert_of, find, networks, read, save, settings_of
from realm_jax.processes import allgather_flags, broadcast_from_process_0, is_process_0, run_on_process_0
from realm_jax.retrieval.token_rerank import Compression
from realm_jax.run import Run
from realm_jax.storage import flush_folder, publish_folder, read_json, sha256_hex, write_json_atomic
from realm_jax.train.checkpoints import SavedCheckpoint
from realm_jax.train.restore import saved_vectors
from realm_jax.train.workdir import with_absolute_paths
from realm_jax.version import __version__

logger = logging.getLogger(__name__)

MODEL, MANIFEST, CONFIG, VECTORS = "model", "manifest.json", "config.json", "vectors.npy"
ARRAYS = "arrays.safetensors"  # of a network that Hugging Face's libraries do not have
FORMAT = 1


# --- Read -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ExportedModel:
    """An exported model, opened without reading its arrays.

    Attributes:
        folder: WORKDIR/model or WORKDIR/TASK/model.
        manifest: the content of manifest.json.
    """

    folder: Path
    manifest: dict[str, Any]

    @property
    def task(self) -> str:
        """Return the name of the task that trained the parameters."""
        return str(self.manifest["task"])

    @property
    def step(self) -> int:
        """Return the number of steps of the task."""
        return int(self.manifest["step"])

    def has(self, params: Params) -> bool:
        """Return True if its networks of these names have these parameters."""
        return not mismatched(self.manifest["arrays"], checksums(params))

    @property
    def identity(self) -> str:
        """Return a digest of parameters and vectors."""
        return str(self.manifest["identity"])

    def params(self, model: Realm, names: Collection[str]) -> Params:
        """Read networks, and compare them with their checksums.

        Args:
            model: model of the run, with the sizes of all networks.
            names: keys of networks in the parameters.

        Returns:
            A tree of float32 arrays on the host.

        Raises:
            UserError: a file is missing or damaged.
        """
        params: Params = {}
        for name in names:
            folder = self.folder / name
            try:
                if name in networks(model):
                    params[name] = read(find(folder, bert_of(model, name), networks(model)[name]))
                else:
                    params[name] = unflatten_dict(load_file(folder / ARRAYS), sep=".")
            except (UserError, OSError, SafetensorError) as error:
                raise self._damaged(f"{name} cannot be read ({error})") from None
        if wrong := mismatched(self.manifest["arrays"], checksums(params)):
            raise self._damaged(f"{wrong[0]} does not match its checksum")
        return params

    def vectors(self, corpus: str) -> NDArray[np.float32] | None:
        """Open the passage vectors, memory-mapped.

        Args:
            corpus: fingerprint of the passages.

        Returns:
            [passages, width] float32; None if there are none, or those of other passages.

        Raises:
            UserError: the file is damaged.
        """
        if self.manifest["vectors"] is None or self.manifest["corpus"] != corpus:
            return None
        return self._array(VECTORS, self.manifest["vectors"])

    @property
    def stores_tokens(self) -> bool:
        """Return True if it has token vectors of passages."""
        return self.manifest.get("tokens") is not None

    def tokens(self, corpus: str) -> NDArray[np.int8] | None:
        """Open the stored token vectors of passages, memory-mapped.

        Args:
            corpus: fingerprint of the passages.

        Returns:
            [passages, tokens, dimensions] int8; None if there are none, or those of other passages.

        Raises:
            UserError: the file is damaged.
        """
        if not self.stores_tokens or self.manifest["corpus"] != corpus:
            return None
        return self._array(TOKENS, self.manifest["tokens"][TOKENS])

    def has_tokens_of(self, run: Run, params: Params) -> bool:
        """Return True if it has token vectors of a run's corpus by this passage encoder.

        Args:
            run: has corpus and networks.
            params: with the encoders.
        """
        encoders = {name: params[name] for name in run.model.embedder_names[-1:]}
        is_current = self.manifest["corpus"] == run.sources.passages.fingerprint
        return self.stores_tokens and is_current and self.has(encoders)

    def token_compression(self) -> Compression | None:
        """Read how token vectors are stored; None if there are none. Raises UserError if a file is damaged."""
        if not self.stores_tokens:
            return None
        return Compression(*(self._array(name, self.manifest["tokens"][name]) for name in (PROJECTION, FREQUENCIES)))

    def _array(self, name: str, recorded: list[int]) -> NDArray[Any]:
        """Open the array in a file, memory-mapped, and compare it with its checksum. Raises UserError."""
        try:
            array = np.asarray(np.load(self.folder / name, mmap_mode="r", allow_pickle=False))
        except (OSError, ValueError, EOFError):
            raise self._damaged(f"{name} cannot be read") from None
        if checksums({name: array})[name] != recorded:
            raise self._damaged(f"{name} does not match its checksum")
        return array

    def _damaged(self, reason: str) -> UserError:
        return UserError(
            f"{url_of(self.folder)}: {reason}; remove the folder, and repeat the command that trained the run: it "
            "writes the folder from the checkpoint"
        )


def find_exported_model(folder: Path) -> ExportedModel | None:
    """Open the exported model in a folder; None if there is none. Raises UserError if it has another format."""
    if not folder.exists():  # a process may have been killed between the two renames that replace it
        folder = folder.with_name(f".{folder.name}.old")
    if not (folder / MANIFEST).is_file():
        return None
    manifest = read_json(folder / MANIFEST)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise UserError(
            f"{url_of(folder / MANIFEST)}: has another format than {FORMAT}, the format of this version; remove the "
            "folder, and repeat the command that trained the run"
        )
    return ExportedModel(folder, manifest)


def exported_model(workdir: Path, task: str | None = None) -> ExportedModel:
    """Open the exported model of a run.

    Args:
        workdir: the run directory.
        task: name of the task that trained the parameters; None for the last finished one.

    Raises:
        UserError: the run has exported no such model.
    """
    # An adaptation has its exported model only in WORKDIR/model.
    model = find_exported_model(workdir / MODEL)
    if task is not None and (model is None or model.task != task):
        model = find_exported_model(workdir / task / MODEL)
    if model is None:
        ended = "no task has ended" if task is None else f"task {task} has not ended"
        raise UserError(
            f"{url_of(workdir)}: has no exported model yet ({ended}, or an earlier version trained it); repeat the "
            "command that started the run: it writes one at the end of each task"
        )
    return model


def exported_vectors(run: Run, task: str) -> NDArray[np.float32] | None:
    """Read the passage vectors of a task's exported model. Collective: all processes must call it.

    Args:
        run: the run.
        task: name of the task; its model may be missing.

    Returns:
        float32 [passages, width], memory-mapped; None on every process unless every process sees those of process 0.

    Raises:
        UserError: on every process, if one cannot read them.
    """
    broadcast_from_process_0(0)  # a barrier: the others must not look while process 0 still writes the model
    vectors, error, identity = None, None, 0
    try:
        exported = find_exported_model(run.workdir / task / MODEL)
        if exported is not None:
            vectors = exported.vectors(run.sources.passages.fingerprint)
            identity = int(sha256_hex(exported.identity.encode())[:7], 16)
    except UserError as damage:
        error = damage
    if broadcast_from_process_0(identity) != identity:
        vectors = None  # of a copy of the run directory that began before process 0 exported again
    has_vectors, can_read = allgather_flags(vectors is not None, error is None).T  # [processes] each
    if not can_read.all():
        raise error or UserError(f"{run.workdir / task / MODEL}: another process cannot read it; see its log")
    return vectors if has_vectors.all() else None


# --- Write ------------------------------------------------------------------------------------------------------------


def export_task(run: Run, task: str, params: Params, trained_reader: bool) -> None:
    """Export the parameters at the end of a task to WORKDIR/TASK/model and WORKDIR/model, unless that was done.

    Every process has to call this.

    Args:
        run: has config, model, tokenizer and run directory.
        task: its last checkpoint holds the vectors that fit the parameters.
        params: all parameters after its last step.
        trained_reader: true if the reader learned to answer questions.

    Raises:
        UserError: the directory cannot be written.
    """
    saved = SavedCheckpoint.newest_on_process_0(run.workdir / task / "checkpoints")
    assert saved is not None, "the last step of a task is saved"
    folder, identity = run.workdir / task / MODEL, saved.record["digest"]

    def is_exported() -> bool:
        """Return True if WORKDIR/TASK/model has the parameters of the last checkpoint."""
        exported = find_exported_model(folder)
        return exported is not None and exported.identity == identity

    writes = not run_on_process_0(is_exported)
    if writes:
        vectors = saved_vectors(run, saved)
        if vectors is None and saved.record["generation"] and saved.record["index_step"] == saved.step:
            shared = shared_folder(run)
            generation = read_manifest(shared, saved.record["generation"])
            if is_process_0() and generation is not None:
                vectors = load_vectors(shared, generation)[: run.context.rows]
        write_exported_model(folder, run, task, saved.step, params, vectors, trained_reader, identity)
    if is_process_0():
        # A finished run that is started again passes through all of its tasks. An earlier one must not replace the
        # model of a later one.
        latest, names = find_exported_model(run.workdir / MODEL), task_names(run.config)
        later_tasks = names[names.index(task) + 1 :]
        if latest is None or writes or (latest.task not in later_tasks and latest.identity != identity):
            with _StagedFolder(run.workdir / MODEL) as staged:
                shutil.copytree(folder, staged, copy_function=_link_or_copy, dirs_exist_ok=True)


def write_exported_model(
    folder: Path, run: Run, task: str, step: int, params: Params, vectors: NDArray | None, trained_reader: bool,
    identity: str | None = None, token_folder: Path | None = None,
) -> None:  # fmt: skip
    """Write an exported model, and replace an earlier one. Every process has to call this.

    Args:
        folder: directory to write.
        run: has config, model and tokenizer.
        task: name of the task that trained the parameters.
        step: number of steps of the task.
        params: all parameters, on the devices or on the host.
        vectors: vectors of all passages by these parameters, [passages, width]; None to embed the passages whenever the
            model is opened.
        trained_reader: true if the reader learned to answer questions.
        identity: see `ExportedModel`; None for a digest of the arrays.
        token_folder: has the files of `TokenFile`, by these parameters; None to store no token vectors.

    Raises:
        UserError: the directory cannot be written.
    """
    params = jax.tree.map(to_host, params)
    if not is_process_0():
        return
    with _StagedFolder(folder) as staged:
        write_networks(staged, run.config, run.model, params, run.sources.tokenizer, trained_reader=trained_reader)
        names = [SHARED] * 2 if SHARED in params else TOWERS
        write_sentence_transformer(staged, dict(zip((QUERIES, PASSAGES), names, strict=True)))
        for name in params.keys() - networks(run.model).keys():
            (staged / name).mkdir()
            arrays = {path: np.asarray(array) for path, array in flatten_dict(params[name], sep=".").items()}
            save_file(arrays, staged / name / ARRAYS)
        vectors_checksum = None
        if vectors is not None:
            vectors = np.ascontiguousarray(vectors, np.float32)
            np.save(staged / VECTORS, vectors, allow_pickle=False)
            vectors_checksum = checksums({VECTORS: vectors})[VECTORS]
        write_json_atomic(staged / CONFIG, with_absolute_paths(run.config.to_dict()))
        token_arrays = _add_token_files(staged, token_folder)
        arrays = named_arrays(params) | ({} if vectors is None else {VECTORS: vectors}) | token_arrays
        manifest = {
            "format": FORMAT,
            "realm_jax": __version__,
            "task": task,
            "step": step,
            "identity": arrays_digest(arrays) if identity is None else identity,
            "corpus": run.sources.passages.fingerprint,
            "networks": sorted(params),
            "arrays": checksums(params),
            "vectors": vectors_checksum,
            "tokens": checksums(token_arrays) or None,
        }
        write_json_atomic(staged / MANIFEST, manifest)
    logger.info("%s: exported %s at step %d", folder, task, step)


def replace_vectors(
    folder: Path, run: Run, vectors: NDArray, publish_corpus: Callable[[], None], token_folder: Path | None = None
) -> None:
    """Replace the vectors of an exported model by those of the run's corpus. The networks stay as they are.

    Args:
        folder: folder of the exported model.
        run: has the corpus.
        vectors: vectors of all its passages by the model's encoders, [passages, width].
        publish_corpus: called once all files are written, right before they replace the earlier ones.
        token_folder: see `write_exported_model`.

    Raises:
        UserError: the directory cannot be written.
    """
    exported = find_exported_model(folder)
    assert exported is not None, "the folder has an exported model"
    manifest = dict(exported.manifest)
    stored = {VECTORS: np.ascontiguousarray(vectors, np.float32)}
    with _StagedFolder(folder) as staged:
        shutil.copytree(exported.folder, staged, copy_function=_link_or_copy, dirs_exist_ok=True)
        for name in (VECTORS, *TOKEN_FILES):
            (staged / name).unlink(missing_ok=True)  # else we would write through its link
        np.save(staged / VECTORS, stored[VECTORS], allow_pickle=False)
        token_arrays = _add_token_files(staged, token_folder)
        manifest |= {"corpus": run.sources.passages.fingerprint, "vectors": checksums(stored)[VECTORS]}
        manifest |= {"tokens": checksums(token_arrays) or None}
        manifest["identity"] = arrays_digest(stored | token_arrays, manifest["identity"].encode())
        write_json_atomic(staged / MANIFEST, manifest)
        publish_corpus()


def _add_token_files(folder: Path, token_folder: Path | None) -> dict[str, NDArray]:
    """Link the files of token vectors into a folder, and return their arrays by name; nothing for None.

    Args:
        folder: gets the links.
        token_folder: has the files.
    """
    if token_folder is None:
        return {}
    for name in TOKEN_FILES:
        _link_or_copy(str(token_folder / name), str(folder / name))
    return {name: np.load(folder / name, mmap_mode="r", allow_pickle=False) for name in TOKEN_FILES}


def write_networks(
    folder: Path, config: Config, model: Realm, params: Params, tokenizer: Tokenizer, names: str = "bert",
    trained_reader: bool = True,
) -> None:  # fmt: skip
    """Write each network to a subfolder that transformers opens.

    Args:
        folder: gets a subfolder for each network.
        config: config of the run.
        model: model of the run.
        params: trees of arrays on the devices or on the host, by network.
        tokenizer: written next to each network.
        names: 'bert' for the names of `BertModel`, 'realm' for those of transformers' `RealmEmbedder`.
        trained_reader: true if the reader learned to answer questions; recorded for runs that start from it.
    """
    encoder = config.encoder.to_dict()
    query_length, passage_length = longest_inputs(config, model.query_template, model.passage_template)
    lengths = {QUERIES: query_length, PASSAGES: passage_length}
    for network, parts in networks(model).items():
        if network not in params:
            continue
        path, arrays = folder / network, jax.tree.map(np.asarray, params[network])
        settings = settings_of(model, network, names) | {"pad_token_id": tokenizer.pad_id}
        if model.bert.architecture != "bert":  # BERT's config.json names none of them
            ends = {"cls": tokenizer.cls_id, "bos": tokenizer.cls_id, "sep": tokenizer.sep_id, "eos": tokenizer.sep_id}
            settings |= {f"{name}_token_id": number for name, number in ends.items()}
        settings |= {TRAINED_READER: trained_reader} if network == READER else {ENCODER_SECTION: encoder}
        save(path, arrays, parts, names, settings)
        save_tokenizer(path, tokenizer, bert_of(model, network).max_length)
        if names == "bert" and network != READER:
            inputs = {purpose: lengths[purpose] for purpose in lengths if network == SHARED or purpose in network}
            write_modules(path, model, arrays, encoder, inputs)
        else:
            mark_not_a_sentence_encoder(path)


def save_tokenizer(folder: Path, tokenizer: Tokenizer, length: int) -> None:
    """Write the tokenizer files of transformers.

    Args:
        folder: gets the files.
        tokenizer: the tokenizer.
        length: tokens of the longest input.
    """
    for name, content in tokenizer.pretrained_files(length).items():
        (folder / name).write_bytes(content)


class _StagedFolder:
    """Context manager with a hidden folder to write to, which replaces `final` if the context ends without error."""

    def __init__(self, final: Path) -> None:
        self._final, self._staged = final, final.with_name(f".{final.name}.partial")
        self._old = final.with_name(f".{final.name}.old")

    def __enter__(self) -> Path:
        shutil.rmtree(self._staged, ignore_errors=True)  # of a process that was killed
        try:
            self._staged.mkdir(parents=True)
        except OSError as error:
            raise UserError(f"{self._final}: cannot be written ({error.strerror}); make room or check it") from None
        return self._staged

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is not None:
            shutil.rmtree(self._staged, ignore_errors=True)
            if isinstance(error, OSError):
                raise UserError(
                    f"{self._final}: cannot be written ({error.strerror}); make room, then run the command again"
                ) from None
            return
        flush_folder(self._staged)  # may take long, and there is no model between the two renames
        if self._final.exists():  # else a command was killed between its renames, and the old model is the only one
            shutil.rmtree(self._old, ignore_errors=True)
            os.rename(self._final, self._old)
        publish_folder(self._staged, self._final)
        shutil.rmtree(self._old, ignore_errors=True)


def _link_or_copy(source: str, target: str) -> None:
    """Give a file a second name; copy it if the file system has no hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
