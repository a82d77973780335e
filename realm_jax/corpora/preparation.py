"""Turn documents and questions into a prepared folder, which every other job reads. Read `prepare` from top to bottom.

    OUTPUT/passages/segment-00007/        a shard of the passages; STORE.json lists the shards
    OUTPUT/pretraining/…                  the same for the texts to pre-train on, if they are others
    OUTPUT/tokenizer/, questions/*.jsonl
    OUTPUT/PREPARED.json                  written last: inputs, settings, and counts of all records
    OUTPUT/articles/…                     while the work is not done: the articles of each shard, and where to resume

We write into a hidden folder next to the output, and rename it at the very end; in a bucket PREPARED.json comes last
instead. So nobody takes interrupted output for complete, and the same command resumes it. `texts.py` opens sources,
and `PassagePacker` makes passages of articles. Processes of this machine (`Processes` in `articles.py`) or Apache Beam
(`pipelines.py`) do the work.
"""

import json
import logging
import os
import resource
import shutil
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from realm_jax.console import StageProgress
from realm_jax.corpora.articles import Article, Counts, Processes, read_shard, shard_file
from realm_jax.corpora.near_duplicates import COPIES, drop_near_duplicates, fingerprint_shard
from realm_jax.corpora.packer import PACKED, PackingSummary, PassagePacker, check_limit, pack_shard
from realm_jax.corpora.question_files import QuestionFile, published_questions, question_files, read_all
from realm_jax.corpora.texts import identity, open_texts
from realm_jax.data import spans as span_finders
from realm_jax.data.languages import CHOICES as LANGUAGE_CHOICES
from realm_jax.data.languages import most_common_language
from realm_jax.data.lines import Path_
from realm_jax.data.passage_packing import DEFAULT_LIMIT
from realm_jax.data.questions import has_judgments, queries_file, question_lines
from realm_jax.data.sources import FORMAT_VERSION
from realm_jax.data.staging import PREPARED
from realm_jax.data.store import MANIFEST as STORE
from realm_jax.data.store import PassageStore, new_version
from realm_jax.data.tokenizer_files import TokenizerFile, tokenizer_file, tokenizer_of
from realm_jax.data.wordpiece import WordPiece, check_size
from realm_jax.errors import Resumable, UserError, full_disk
from realm_jax.storage import Folder, StorageError, exclusive_lock, open_folder, publish_folder

logger = logging.getLogger(__name__)

TOKENIZER = "tokenizer"
ARTICLES = "articles"  # while the work is not done
INPUTS, CLAIM = "INPUTS.json", "CLAIM.json"  # in it: inputs of the command, and its random name
PARTIAL_ENTRIES = (ARTICLES, TOKENIZER, "passages", "pretraining", "questions")  # that an interrupted command may leave
OTHER_FILES = 100  # that a process may have open in addition to the shards
DEFAULT_VOCABULARY_SIZE = 30_522  # the size of bert-base-uncased's vocabulary
LEARN_FROM = 100_000_000  # characters of text to learn a vocabulary from: about a minute and a half
LANGUAGE_SAMPLE = 100  # articles
UNKNOWN_SHARE = 0.05  # more [UNK] than this says that the vocabulary is for another language


@dataclass(frozen=True)
class Options:
    """Inputs and settings of a preparation: the flags of `realm prepare`, whose --help explains them."""

    passages: Path_
    output: Path_
    pretraining: Path_ | None = None
    questions: Sequence[Path_] = ()
    vocab: Path_ | None = None
    vocabulary_size: int = DEFAULT_VOCABULARY_SIZE
    limit: int = DEFAULT_LIMIT
    spans: str = "rules"
    language: str = ""
    question_sources: Sequence[str] = ()
    max_answer_words: int | None = None
    ignore_gold: bool = False
    workers: int | None = None
    shards: int | None = None
    skip_damage: bool = False
    beam: str | None = None


# Options that change the output, not only the speed; PREPARED.json records them.
_SETTINGS = ("vocabulary_size", "limit", "spans", "question_sources", "max_answer_words", "ignore_gold")


@dataclass(frozen=True)
class Prepared:
    """Result of a preparation.

    Attributes:
        manifest: PREPARED.json.
        counts: counts of the records of each source, by its name.
        summaries: summaries of the articles of each source, by its name.
        questions: counts of the records of questions.
        vocabulary: number of tokens.
    """

    manifest: dict[str, Any]
    counts: dict[str, Counts]
    summaries: dict[str, PackingSummary]
    questions: Counts
    vocabulary: int


def prepare(options: Options) -> Prepared | None:
    """Write the prepared folder `options.output`.

    Returns:
        The result; None if the folder was prepared from the same inputs with the same settings.

    Raises:
        UserError: the options or inputs are wrong, or `output` is another folder. Partial output is removed.
        Resumable: the work ended early; the same call resumes it.
    """
    # --- Check the options, before anything is read -------------------------------------------------------------------
    if not os.fspath(options.output):
        raise UserError("--output: is empty; name a folder to create")
    check_limit(options.limit)
    if options.language not in ("", *LANGUAGE_CHOICES):
        raise UserError(f"--language={options.language}: is not one of {', '.join(LANGUAGE_CHOICES)}; choose one")
    finder = span_finders.finder(options.spans)
    vocabulary = None if options.vocab is None else vocabulary_file(os.fspath(options.vocab))
    if vocabulary is None:
        check_size(options.vocabulary_size)
    if not options.questions and (options.question_sources or options.max_answer_words or options.ignore_gold):
        raise UserError("--question-sources, --max-answer-words and --ignore-gold need --questions; add it")
    runner: Any = Processes(options.workers or os.cpu_count() or 1)
    if options.beam is not None:
        if options.workers is not None:
            raise UserError("--workers: Beam runners have their own options for this; leave out --workers or --beam")
        from realm_jax.corpora.pipelines import Beam  # here, since few have Apache Beam

        runner = Beam.of(options.beam)

    # --- Open the inputs, and stop if they are prepared already -------------------------------------------------------
    question_inputs = [file for argument in options.questions for file in question_files(argument)]
    sources = {"passages": open_texts(options.passages)}
    if options.pretraining:
        sources["pretraining"] = open_texts(options.pretraining)
    shards = {name: options.shards or source.shards for name, source in sources.items()}
    most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - OTHER_FILES
    if options.beam is None and (most := max(shards.values())) > most_files:
        raise UserError(
            f"--shards={most}: this machine can open only {most_files} files; use fewer, or raise `ulimit -n`"
        )
    inputs: dict[str, Any] = {"passages": None, "pretraining": None, "vocab": None}
    inputs |= {name: source.identity for name, source in sources.items()}
    settings = {name: getattr(options, name) for name in _SETTINGS} | {"shards": shards}
    settings |= {"language": options.language} if options.language else {}
    if vocabulary is not None:
        inputs["vocab"] = identity(vocabulary.path)
        settings |= {"vocabulary_size": None} | vocabulary.settings()
    if (finder_identity := finder.identity) is not None:
        settings["spans_identity"] = finder_identity
    inputs["questions"] = [*map(_question_identity, question_inputs)]
    inputs["settings"] = settings
    inputs = json.loads(json.dumps(inputs))  # to compare with inputs that were read from JSON
    output = os.fspath(options.output)
    if is_prepared(output, inputs, options.skip_damage):
        return None
    vocab_tokenizer = None if vocabulary is None else vocabulary.read()
    filters = options.question_sources, options.max_answer_words, options.ignore_gold
    questions = read_all(question_inputs, *filters, options.skip_damage)

    claim = uuid.uuid4().hex
    with staged_output(output, inputs, options.beam is not None, claim) as root:
        folder = open_folder(root)
        article_folders = {name: f"{root}/{ARTICLES}/{name}" for name in sources}

        # --- Articles: every record of the sources is read, cleaned and sent to a shard by its id ---------------------
        counts: dict[str, Counts] = {}
        for name, source in sources.items():
            with StageProgress(f"reading {name}", None) as bar:
                counts[name] = runner.extract(
                    source, article_folders[name], shards[name], options.skip_damage, bar.update
                )
            if source.without_copies:
                if COPIES not in open_folder(article_folders[name]).names():
                    with StageProgress(f"comparing {name}", counts[name].articles) as bar:
                        runner.each(fingerprint_shard, article_folders[name], range(shards[name]), bar.update)
                copies = drop_near_duplicates(article_folders[name], shards[name])
                counts[name].dropped += copies
                counts[name].articles -= copies.total()

        # --- Gold passages have to exist, or the question is damage; checked before the slow part ---------------------
        if questions.gold():
            ids = (article.id for article in _articles(article_folders["passages"], shards["passages"]))
            questions.check_golds(ids, sources["passages"].name, options.skip_damage)

        # --- The tokenizer: one that an interrupted command left, the given one, or one that is learned ---------------
        tokenizer_files = {name: folder.read(f"{TOKENIZER}/{name}") for name in folder.names(TOKENIZER)}
        tokenizer = tokenizer_of(tokenizer_files, TOKENIZER)
        if tokenizer is None:
            every_article = chain.from_iterable(_articles(article_folders[name], shards[name]) for name in sources)
            # From all articles, or from every n-th if they have too many characters.
            step = 1 + sum(count.characters for count in counts.values()) // LEARN_FROM
            texts = (f"{article.title}\n{article.text}" for article in islice(every_article, 0, None, step))
            tokenizer = vocab_tokenizer or WordPiece.train(texts, options.vocabulary_size)
            for name, content in tokenizer.files().items():
                folder.write(f"{TOKENIZER}/{name}", content)

        # --- The language: the given one, or that of most articles of a sample, which ids decide ----------------------
        language = options.language
        if not language:
            each_shard = -(-LANGUAGE_SAMPLE // shards["passages"])
            sample = chain.from_iterable(
                islice(read_shard(open_folder(article_folders["passages"]), shard), each_shard)
                for shard in range(shards["passages"])
            )
            language, _ = most_common_language(article.text for article in islice(sample, LANGUAGE_SAMPLE))

        # --- Passages: a worker packs a shard; shards that an interrupted command packed stay -------------------------
        packer = PassagePacker(tokenizer, options.limit, options.spans, language)
        if finder.uses_devices and options.beam is None:
            runner = Processes(1)  # a network has the devices of this process; workers would each need their memory
        summaries: dict[str, PackingSummary] = {}
        stores: dict[str, dict[str, Any]] = {}
        for name in sources:
            check_owner(root, claim)
            article_folder = open_folder(article_folders[name])
            with StageProgress(name, counts[name].articles) as bar:
                done = {*article_folder.names()}
                missing = [shard for shard in range(shards[name]) if shard_file(shard, PACKED) not in done]
                if missing:
                    pack = partial(pack_shard, packer, f"{root}/{name}")
                    runner.each(pack, article_folders[name], missing, bar.update)
            packed_shards = [article_folder.read_json(shard_file(shard, PACKED)) for shard in range(shards[name])]
            summary, entries = PackingSummary(), [packed["entry"] for packed in packed_shards]
            for packed in packed_shards:
                summary.add(PackingSummary.from_json(packed["summary"]))
            if not summary.passages:
                raise UserError(f"none of {summary.articles} articles has words to store; check the texts")
            if summary.unknown_share > UNKNOWN_SHARE:
                logger.warning(
                    "%s: %.0f %% of the tokens are %s: the vocabulary does not cover this text; choose a tokenizer for "
                    "its language with --vocab",
                    name,
                    100 * summary.unknown_share,
                    tokenizer.pieces([tokenizer.unk_id])[0],
                )
            store = new_version({"limit": options.limit, "tokenizer": tokenizer.fingerprint}, entries)
            open_folder(f"{root}/{name}").write_json(STORE, store)
            rows, documents = (sum(entry[key] for entry in entries) for key in ("rows", "documents"))
            stores[name] = {"rows": rows, "documents": documents, "fingerprint": store["fingerprint"]}
            summaries[name] = summary
            counts[name].dropped += Counter({"no words in the text": len(summary.wordless)})

        # --- Questions, without those whose gold passage has no words -------------------------------------------------
        splits = questions.with_stored_golds(summaries["passages"].wordless)
        for split, split_questions in splits.items():
            folder.write(f"questions/{split}.jsonl", question_lines(split_questions))

        # --- PREPARED.json, last --------------------------------------------------------------------------------------
        manifest: dict[str, Any] = {"format_version": FORMAT_VERSION, "tokenizer": tokenizer.fingerprint}
        manifest |= {"passages": None, "pretraining": None} | stores
        manifest["questions"] = {split: len(split_questions) for split, split_questions in splits.items()}
        manifest |= {"limit": options.limit, "language": language, "inputs": inputs}
        manifest["counts"] = {
            name: count.to_json()
            | {"notes": count.common_notes(), "unknown_token_share": round(summaries[name].unknown_share, 4)}
            for name, count in counts.items()
        }
        if question_inputs:
            manifest["counts"]["questions"] = _question_counts(questions.counts)
        check_owner(root, claim)
        folder.write_json(PREPARED, manifest)
    return Prepared(manifest, counts, summaries, questions.counts, tokenizer.size)


def _articles(folder: str, shards: int) -> Iterator[Article]:
    """Yield the extracted articles of a source, shard after shard."""
    return chain.from_iterable(read_shard(open_folder(folder), shard) for shard in range(shards))


def _question_identity(file: QuestionFile) -> dict[str, Any]:
    """Return split and identity of questions, including the file with the texts of judged queries."""
    if (questions := published_questions(file)) is not None:
        from realm_jax.data import open_qa  # here, because TFDS takes a second to import

        return {"split": file.split, "file": file.path, "sha256": open_qa.fingerprint(questions)}
    texts = {"queries": identity(queries_file(file.path))["sha256"]} if has_judgments(file.path) else {}
    return {"split": file.split} | identity(file.path) | texts


def _question_counts(counts: Counts) -> dict[str, Any]:
    """Return the counts of questions as PREPARED.json has them."""
    counted, notes = counts.to_json(), counts.common_notes()
    return {key: counted[key] for key in ("records", "dropped", "damaged", "samples")} | (
        {"notes": notes} if notes else {}
    )


def replace_questions(data: Path, questions: Sequence[Path_]) -> None:
    """Replace the questions of a prepared folder, whose passages stay.

    Questions that cannot be read, or whose gold passage is not there, are skipped and counted.

    Args:
        data: the prepared folder.
        questions: files, as in `Options`; empty to remove all questions.

    Raises:
        UserError: a file cannot be read, or no question is left.
    """
    folder = open_folder(data)
    manifest = folder.read_json(PREPARED)
    files = [file for argument in questions for file in question_files(argument)]
    identities = json.loads(json.dumps([*map(_question_identity, files)]))  # to compare with what was read from JSON
    if manifest["inputs"]["questions"] == identities:
        return
    selected = read_all(files, (), None, ignore_gold=False, skip_damage=True)
    store = PassageStore.open(data / "passages")
    selected.check_golds(map(store.document_id, range(len(store))), os.fspath(data), skip_damage=True)
    splits = selected.with_stored_golds(())
    # The record has no questions while their files are written, so that it never describes other ones.
    folder.write_json(PREPARED, manifest | {"questions": {}, "inputs": manifest["inputs"] | {"questions": []}})
    for split, split_questions in splits.items():
        folder.write(f"questions/{split}.jsonl", question_lines(split_questions))
    manifest["questions"] = {split: len(split_questions) for split, split_questions in splits.items()}
    manifest["inputs"]["questions"] = identities
    manifest["counts"].pop("questions", None)
    manifest["counts"] |= {"questions": _question_counts(selected.counts)} if files else {}
    folder.write_json(PREPARED, manifest)


def vocabulary_file(name: str) -> TokenizerFile:
    """Find the tokenizer that --vocab names: a file, or a model as `config.init_from` takes it.

    Raises UserError if the model is not there, or has no tokenizer.
    """
    path = Path(name)
    if not path.is_file():
        from realm_jax.models.folders import resolve_model_path, tokenizer_folder  # here, since it brings JAX along

        path = resolve_model_path(name, "--vocab")
        if path.is_dir():
            folder = tokenizer_folder(path)
            if (file := tokenizer_file(folder)) is None:
                raise UserError(
                    f"--vocab={name}: {folder} has no vocab.txt and no tokenizer.json; name an encoder with one"
                )
            path = file
    return TokenizerFile.of(path)


# --- The output folder while it is being written ----------------------------------------------------------------------


class PreparedOtherwise(UserError):
    """A folder is prepared, from other inputs or with other settings."""


def is_prepared(output: str, inputs: dict[str, Any], skip_damage: bool) -> bool:
    """Return True if the output exists and was made from the same inputs.

    Args:
        output: folder or URL.
        inputs: inputs of the command, as PREPARED.json records them.
        skip_damage: accept output with damage.

    Raises:
        UserError: the output exists and is something else.
    """
    folder = open_folder(output)
    names = folder.names()
    if not (names or os.path.lexists(output)):
        return False
    advice = "choose another --output or remove the folder"
    if PREPARED not in names:
        if "://" in output and INPUTS in folder.names(ARTICLES):
            return False  # begun, and not done
        raise UserError(f"{output} exists and is not a prepared folder; {advice}")
    manifest = folder.read_json(PREPARED)
    if not isinstance(manifest.get("inputs"), dict):
        raise UserError(f"{output}/{PREPARED} is damaged; {advice}")
    if manifest.get("format_version") != FORMAT_VERSION:
        raise UserError(f"{output} was prepared by another version of this program; {advice}")
    if "tagged" in manifest:
        raise UserError(f"{output} was prepared with a tagger that this version cannot run; {advice}")
    if manifest.get("inputs") != inputs:
        changed = [name for name, value in inputs.items() if manifest["inputs"].get(name) != value]
        raise PreparedOtherwise(f"{output} was prepared with other {' and '.join(changed)}; {advice}")
    lost = sum(sum(counts["damaged"].values()) for counts in manifest["counts"].values())
    if lost and not skip_damage:
        raise UserError(
            f"{output} was prepared with --skip-damage, which skipped {lost} damaged records; pass the flag again to "
            "keep the folder as it is, or remove it"
        )
    for store in ("passages", "pretraining") if manifest.get("pretraining") else ("passages",):
        if STORE not in folder.names(store):
            raise UserError(f"{output} is damaged (no {store}/{STORE}); remove the folder")
    return True


@contextmanager
def staged_output(output: str, inputs: dict[str, Any], anywhere: bool, claim: str) -> Iterator[str]:
    """Give the folder to work in: a hidden one next to `output`, which is renamed at the end, or the bucket itself.

    We resume partial output of the same inputs. After a UserError nothing stays, unless the work can be resumed.

    Args:
        output: folder or URL.
        inputs: inputs of the command, as PREPARED.json will record them.
        anywhere: workers can write into a bucket.
        claim: random name of the command.

    Raises:
        UserError: the output is in a bucket and workers cannot write there, or its parent folder cannot be written.
    """
    if "://" in output:
        if not anywhere:
            raise UserError(f"--output={output}: only --beam writes to a bucket; add --beam, or name a local folder")
        _resume_or_reset(open_folder(output), inputs, claim)
        yield output
        open_folder(output).remove(ARTICLES)
        return
    # A name that begins with a dot and is on the same file system, so that renaming is atomic.
    final = Path(output)
    root = final.absolute().parent / f".{final.name}.partial"
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write into {root.parent} ({error.strerror}); choose another --output") from None
    with exclusive_lock(root):
        _resume_or_reset(open_folder(root), inputs, claim)
        try:
            yield str(root)
        except (Resumable, StorageError):
            raise
        except UserError:
            shutil.rmtree(root, ignore_errors=True)
            raise
        except OSError as error:
            if not (full := full_disk(error)):
                raise
            full_folder = Path(error.filename or root).parent
            raise UserError(f"{full_folder}: {full}; make room there, then run the command again to resume") from error
        # Articles are not part of the output; we remove them last, since that may take a while.
        done = root.with_name(f".{final.name}.articles")
        shutil.rmtree(done, ignore_errors=True)
        (root / ARTICLES).rename(done)
        (root / ".lock").unlink()
        publish_folder(root, final)
        shutil.rmtree(done, ignore_errors=True)


def _resume_or_reset(folder: Folder, inputs: dict[str, Any], claim: str) -> None:
    """Resume partial output of the same inputs; remove partial output of other inputs."""
    record, earlier_inputs = f"{ARTICLES}/{INPUTS}", None
    if INPUTS in folder.names(ARTICLES):
        with suppress(UserError):
            earlier_inputs = folder.read_json(record)
    if earlier_inputs == inputs:
        logger.info("%s: resuming", folder.url)
    else:
        begun = sorted({*folder.names()} & {*PARTIAL_ENTRIES})
        if begun:
            logger.warning("%s: removing partial output of other inputs: %s", folder.url, ", ".join(begun))
        for name in begun:
            folder.remove(name)
        folder.write_json(record, inputs)
    folder.write_json(f"{ARTICLES}/{CLAIM}", {"command": claim})


def check_owner(root: str, claim: str) -> None:
    """Check that no other command writes into the folder, because a bucket has no locks.

    Args:
        root: folder or URL.
        claim: random name of this command.

    Raises:
        UserError: another command writes there.
    """
    folder = open_folder(root)
    if CLAIM not in folder.names(ARTICLES) or folder.read_json(f"{ARTICLES}/{CLAIM}") != {"command": claim}:
        raise UserError(f"{root}: another command is writing there; wait for it, or stop it and repeat this one")
