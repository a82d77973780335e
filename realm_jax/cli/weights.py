"""`realm weights`: export a run's networks as Hugging Face model folders, upload them, convert released checkpoints.

    OUTPUT/query_embedder/       model.safetensors, config.json, vocab.txt, tokenizer_config.json; the modules of
                                 sentence-transformers, and a README.md that says what text to encode
    OUTPUT/document_embedder/    or `embedder` for both, if the run has one shared encoder
    OUTPUT/reader/
    OUTPUT/README.md             a model card, of `export`

The folder is published in one step, and `config.init_from` takes it. Read next: `realm_jax/models/weights.py` for names
of tensors, `realm_jax/models/tf_checkpoints.py` for those of TensorFlow.
"""

import argparse
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from realm_jax.adaptation.record import RECORD as ADAPTED
from realm_jax.cli.argument_types import nonempty
from realm_jax.cli.arguments import add_run_arguments, config_changes, run_directory
from realm_jax.data.wordpiece import VOCABULARY_FILE, WordPiece
from realm_jax.errors import UserError, install_extra
from realm_jax.indexing.token_file import FILES as TOKEN_FILES
from realm_jax.mirror import url_of
from realm_jax.models import tf_checkpoints
from realm_jax.models.architectures.table import HF_REALM
from realm_jax.models.folders import SHARED, TOWERS, open_hub, upload_model
from realm_jax.models.layers import LAYER_NORM_EPSILON
from realm_jax.models.networks import Realm
from realm_jax.models.sentence_transformers import README
from realm_jax.models.weights import SETTINGS, WEIGHTS, encoder_settings, write_json
from realm_jax.storage import publish_folder, read_json
from realm_jax.tasks import TASKS
from realm_jax.train.exported_model import CONFIG, MANIFEST, MODEL, VECTORS, save_tokenizer, write_networks
from realm_jax.train.model_card import run_card
from realm_jax.train.trained_run import find_task, open_run_for_inference, reader_is_trained

logger = logging.getLogger(__name__)

EXAMPLES = """examples:
  realm weights export --workdir=runs/wiki --output=weights/wiki
  realm weights export --workdir=runs/wiki --output=weights/wiki-realm --names=realm      for transformers 4
  realm weights push --workdir=runs/wiki --repo=me/wiki-realm --private
  realm weights convert --embedder=cc_news_pretrained/embedder --bert=cc_news_pretrained/bert --output=weights/cc_news
  realm train --config=qa_wiki --config.init_from=weights/cc_news --config.data.path=data/wiki --workdir=runs/qa
"""
CONVERTED = {  # flag → its help
    "embedder": "convert both encoders from the folder of a released module, or from the prefix of a checkpoint",
    "bert": "convert the reader from such a module or checkpoint, or from a BERT of google-research/bert",
    "finetuned": "convert the query encoder and the reader with its span head from the prefix of an ORQA checkpoint",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `realm weights`."""
    parser.epilog = EXAMPLES
    actions = parser.add_subparsers(dest="action", metavar="export|push|convert", required=True)
    export, push, convert = (
        actions.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.", allow_abbrev=False)
        for name, summary in (
            ("export", "write a run's networks to folders that transformers and sentence-transformers load"),
            (
                "push",
                "upload a run's networks, or the model of `realm adapt`, with a model card to the Hugging Face hub",
            ),
            ("convert", "convert released TensorFlow checkpoints to folders that training starts from"),
        )
    )
    for action in (export, push):
        add_run_arguments(action)
    push.add_argument("--repo", type=nonempty, required=True, metavar="NAME",
        help="repository as USER/NAME, created if it does not exist")  # fmt: skip
    push.add_argument(
        "--private", action="store_true",
        help="upload only to a private repository (default: a new repository has the visibility that your organization "
        "sets, else it is public). Log in with `hf auth login`, or set HF_TOKEN",
    )  # fmt: skip
    export.add_argument("--task", choices=tuple(TASKS),
        help="use the parameters from the end of this task (default: the last task trained)")  # fmt: skip
    export.add_argument(
        "--names", choices=("bert", HF_REALM), default="bert",
        help="naming of tensors: 'bert' for sentence-transformers, BertModel (encoders) and BertForMaskedLM (reader), "
        "'realm' for RealmEmbedder and RealmReader of transformers 4 (default: bert)",
    )  # fmt: skip
    for name, summary in CONVERTED.items():
        convert.add_argument(f"--{name}", metavar="PATH", help=summary)
    convert.add_argument(
        "--vocab", metavar="FILE", help="vocab.txt of the checkpoint (default: the one in the module's assets)"
    )
    for action in (export, convert):
        action.add_argument("--output", required=True, metavar="DIR", help="folder to write")


def run(args: argparse.Namespace) -> None:
    """Write the folder, or upload it and print its address."""
    if args.action == "push":
        print(push(run_directory(args.workdir), args.repo, args.private, config_changes(args)))
        return
    output = Path(args.output)
    if os.path.lexists(output):
        raise UserError(f"--output={output} already exists; remove it or choose another folder")
    if args.action == "export":
        export(run_directory(args.workdir, args.task), output, args.names, args.task, config_changes(args))
    else:
        convert({name: getattr(args, name) for name in CONVERTED if getattr(args, name)}, output, args.vocab)


def export(
    workdir: Path, output: Path, names: str = "bert", task: str | None = None, changes: dict[str, Any] | None = None
) -> None:
    """Write the networks of a run's exported model.

    Args:
        workdir: the run directory.
        output: the folder to write.
        names: names of the tensors, 'bert' or 'realm'.
        task: whose final parameters are written; None for the last finished task.
        changes: overrides of the run's config, as `config_changes` returns them.

    Raises:
        UserError: there is no exported model, or RealmEmbedder cannot represent the encoders.
    """
    opened = open_run_for_inference(workdir, changes)
    model, sources = opened.model, opened.sources
    if names == HF_REALM:
        _check_realm(model)
    exported = find_task(opened, task)
    name, step = exported.task, exported.step
    params = exported.params(model, exported.manifest["networks"])
    with _staged_output(output) as folder:
        reads = reader_is_trained(workdir, name)
        write_networks(folder, opened.config, model, params, sources.tokenizer, names, reads)
        networks = sorted(path.name for path in folder.iterdir())
        (folder / README).write_text(run_card(opened, name, step, networks, names), "utf-8")
    logger.info("%s: %s of %s at step %d of %s", output, ", ".join(params), url_of(workdir), step, name)


def push(workdir: Path, repository: str, private: bool, changes: dict[str, Any]) -> str:
    """Upload the networks of a run as `export` writes them, or the exported model of an adaptation; return the address.

    Args:
        workdir: the run directory.
        repository: USER/NAME on the Hugging Face hub.
        private: whether the repository must be private.
        changes: overrides of the run's config; an adaptation accepts none.

    Raises:
        UserError: as `export` and `upload_model`, or the adaptation is not finished.
    """
    hub = open_hub(f"--repo={repository}")  # first, because it fails at once without a token or a package
    if (workdir / ADAPTED).is_file():
        if not read_json(workdir / ADAPTED).get("export"):
            raise UserError(f"--workdir={url_of(workdir)}: the adaptation is not done; run its command again")
        if changes:
            raise UserError(f"--config.{next(iter(changes))}: changes nothing in an adapted model; leave it out")
        # Without the vectors, which reveal the documents, and the config, which names folders of this machine.
        secret = (VECTORS, *TOKEN_FILES, CONFIG, MANIFEST)
        return upload_model(hub, workdir / MODEL, repository, private, "--repo", secret)
    with tempfile.TemporaryDirectory() as work:
        export(workdir, Path(work) / MODEL, changes=changes)
        return upload_model(hub, Path(work) / MODEL, repository, private, "--repo")


def _check_realm(model: Realm) -> None:
    """Raise UserError for encoders that RealmEmbedder cannot represent."""
    if (architecture := model.bert.architecture) != "bert":
        raise UserError(
            f"--names=realm: RealmEmbedder is a BERT, but the run has config.model.architecture={architecture}; give "
            "--names=bert"
        )
    if model.norm_epsilon != LAYER_NORM_EPSILON:
        raise UserError(
            f"--names=realm: RealmEmbedder has LayerNorm's epsilon {LAYER_NORM_EPSILON:g} on its vectors, but the run "
            f"has config.encoder.norm_epsilon={model.norm_epsilon:g}; give --names=bert"
        )
    required = {"pooling": "pooler", "normalization": "layer", "query_template": None, "passage_template": None}
    different = next((name for name, value in required.items() if getattr(model, name) != value), None)
    if different or not model.projection:
        name = (different or "projection").replace("template", "prompt")
        raise UserError(
            f"--names=realm: RealmEmbedder is the paper's encoder, but the run has another config.encoder.{name}; "
            "give --names=bert"
        )


# --- TensorFlow's checkpoints -----------------------------------------------------------------------------------------


def convert(paths: dict[str, str], output: Path, vocabulary: str | None = None) -> None:
    """Write the networks of released checkpoints.

    A fine-tuned checkpoint has the query encoder and the reader; its passage encoder is the pre-trained one.

    Args:
        paths: flag, a key of CONVERTED → folder of a module or prefix of a checkpoint.
        output: the folder to write.
        vocabulary: vocab.txt; None for that of a module.

    Raises:
        UserError: a checkpoint cannot be read, or lacks the networks of its flag.
    """
    if not paths:
        raise UserError("realm weights convert: name a checkpoint with --embedder, --bert or --finetuned")
    if "finetuned" in paths and "bert" in paths:
        raise UserError("--finetuned: has a reader already; leave out --bert")
    assets = [Path(path) / "assets" / VOCABULARY_FILE for path in paths.values()]
    file = vocabulary or next((asset for asset in assets if asset.is_file()), None)
    if file is None:
        raise UserError(f"there is no {assets[0]}; name the vocabulary of the weights with --vocab")
    tokenizer = WordPiece.from_vocab(file, lower_case=not WordPiece.from_vocab(file, lower_case=False).cased)

    checkpoints: dict[str, dict[str, NDArray]] = {}  # flag → name → variable
    networks: dict[str, dict[str, dict[str, str]]] = {}  # flag → network → Hugging Face's name → name of the variable
    for flag, path in paths.items():
        inner = Path(path) / "variables" / "variables"  # the checkpoint of a module's folder
        checkpoints[flag] = read_checkpoint(inner if inner.parent.is_dir() else Path(path))
        networks[flag] = tf_checkpoints.map_variables(checkpoints[flag], f"--{flag}={path}")
    query, document = TOWERS
    sources = {  # folder → flag and network of its tensors
        (document if "finetuned" in paths else SHARED): ("embedder", tf_checkpoints.EMBEDDER),
        query: ("finetuned", tf_checkpoints.EMBEDDER),
        "reader": ("finetuned" if "finetuned" in paths else "bert", tf_checkpoints.READER),
    }
    sources = {name: source for name, source in sources.items() if source[0] in paths}
    with _staged_output(output) as work:
        for name, (flag, network) in sources.items():
            if network not in networks[flag]:
                raise UserError(f"--{flag}={paths[flag]}: has no {network}; it has {', '.join(networks[flag])}")
            variables, folder = networks[flag][network], work / name
            folder.mkdir()
            tensors = {
                tensor: np.ascontiguousarray(
                    tf_checkpoints.transposed(variable, checkpoints[flag][variable]), np.float32
                )
                for tensor, variable in variables.items()
            }
            save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
            bert = tf_checkpoints.bert_config(tensors)
            if bert.vocabulary_size != tokenizer.size:
                raise UserError(
                    f"--vocab: has {tokenizer.size} word pieces, but {name} has {bert.vocabulary_size}; name its "
                    "vocab.txt"
                )
            # The settings that shapes do not determine are those of the released networks: tanh-GELU and the epsilons.
            settings = {"model_type": "bert"} | encoder_settings(bert)
            settings |= tf_checkpoints.epsilons(network, variables.values()) | {"pad_token_id": tokenizer.pad_id}
            write_json(folder / SETTINGS, settings)
            save_tokenizer(folder, tokenizer, bert.max_length)
    logger.info("%s: %s", output, ", ".join(sources))


def read_checkpoint(prefix: Path) -> dict[str, NDArray]:
    """Return the networks' variables in a checkpoint of TensorFlow, by name.

    Raises UserError if TensorFlow is not installed or cannot read the checkpoint.
    """
    try:
        import tensorflow  # here, because it is optional
    except ImportError:
        raise UserError(f"{prefix}: reading it needs TensorFlow; {install_extra('tensorflow')}") from None
    try:
        reader = tensorflow.train.load_checkpoint(str(prefix))
        names = [name for name in reader.get_variable_to_shape_map() if tf_checkpoints.network_of(name)]
        return {name: reader.get_tensor(name) for name in names}
    except (ValueError, tensorflow.errors.OpError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{prefix}: is not a readable TensorFlow checkpoint ({reason}); name the prefix of one"
        ) from None


# --- The output folder ------------------------------------------------------------------------------------------------


@contextmanager
def _staged_output(output: Path) -> Iterator[Path]:
    """Yield a temporary folder, which becomes `output` if the block succeeds and is removed otherwise."""
    parent = output.absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        staging = tempfile.TemporaryDirectory(prefix=f".{output.name}.", suffix=".partial", dir=parent)
    except OSError as error:
        raise UserError(f"--output={output}: cannot be written ({error.strerror}); choose another folder") from None
    with staging as work:
        yield Path(work)
        publish_folder(work, output)
