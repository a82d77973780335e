"""Turn documents and questions into a prepared folder, which every other job reads. Read `prepare` from top to bottom.

    OUTPUT/passages/segment-00007/        a shard of the passages; STORE.json lists the shards
    OUTPUT/pretraining/…                  the same of the texts to pre-train on, if they are others
    OUTPUT/tokenizer/, questions/*.jsonl
    OUTPUT/PREPARED.json                  written last: inputs, settings, and what became of every record
    OUTPUT/articles/…                     while the work is not done: the articles of each shard, and where to resume

Where texts come from: `texts.py`. How articles are cut into passages: `build.py`. What does the work, processes of this
machine or Apache Beam: `Runner` in `articles.py`.
"""

import json
import logging
import os
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from realm_jax.console import StageProgress
from realm_jax.corpora.articles import Processes, Runner, read_shard
from realm_jax.corpora.build import PackingSummary, PassagePacker, check_limit, pack_shard, packed_name
from realm_jax.corpora.near_duplicates import COPIES, drop_near_duplicates, fingerprint_shard
from realm_jax.corpora.outcomes import Article, Counts
from realm_jax.corpora.partial_output import ARTICLES, TOKENIZER, check_owner, is_prepared, staged_output
from realm_jax.corpora.questions import QuestionFile, published_identity, question_files, read_all
from realm_jax.corpora.texts import identity, open_texts
from realm_jax.data import spans as span_finders
from realm_jax.data.packing import DEFAULT_LIMIT
from realm_jax.data.questions import has_judgments, queries_file, question_lines
from realm_jax.data.sources import FORMAT_VERSION
from realm_jax.data.staging import PREPARED
from realm_jax.data.store import MANIFEST as STORE
from realm_jax.data.store import new_version
from realm_jax.data.tokenizer_files import FoundTokenizer, are_complete, lower_case_of, tokenizer_file, tokenizer_of
from realm_jax.data.wordpiece import WordPiece, check_size
from realm_jax.errors import UserError
from realm_jax.storage import open_folder

logger = logging.getLogger(__name__)

Path_ = str | os.PathLike[str]

DEFAULT_VOCABULARY_SIZE = 30_522  # the size of bert-base-uncased's vocabulary
LEARN_FROM = 100_000_000  # characters of text to learn a vocabulary from: about a minute and a half
UNKNOWN_SHARE = 0.05  # more [UNK] than this says that the vocabulary is for another language


@dataclass(frozen=True)
class Options:
    """What to prepare and how: the flags of `realm prepare`, whose --help explains them."""

    passages: Path_
    output: Path_
    pretraining: Path_ | None = None
    questions: Sequence[Path_] = ()
    vocab: Path_ | None = None
    vocabulary_size: int = DEFAULT_VOCABULARY_SIZE
    limit: int = DEFAULT_LIMIT
    spans: str = "rules"
    question_sources: Sequence[str] = ()
    max_answer_words: int | None = None
    ignore_gold: bool = False
    workers: int | None = None
    shards: int | None = None
    skip_damage: bool = False
    beam: str | None = None


# Options that decide what is prepared, not how fast; PREPARED.json keeps them.
_SETTINGS = ("vocabulary_size", "limit", "spans", "question_sources", "max_answer_words", "ignore_gold")


@dataclass(frozen=True)
class Prepared:
    """What was made. counts, summaries: what became of the records and articles of each source, by its name."""

    manifest: dict[str, Any]
    counts: dict[str, Counts]
    summaries: dict[str, PackingSummary]
    questions: Counts
    vocabulary: int


def prepare(options: Options) -> Prepared | None:
    """Write the prepared folder `options.output`.

    Returns:
        What was made; None if the folder was prepared from the same inputs with the same settings.

    Raises:
        UserError: a fault in the options or inputs, or `output` holds something else. Partial output is removed.
        Resumable: the work ended early; the same call goes on.
    """
    # --- Check the options, before anything is read -------------------------------------------------------------------
    if not os.fspath(options.output):
        raise UserError("--output: is empty; name a folder to make")
    check_limit(options.limit)
    finder = span_finders.finder(options.spans)
    vocabulary = None if options.vocab is None else vocabulary_file(os.fspath(options.vocab))
    if vocabulary is None:
        check_size(options.vocabulary_size)
    if not options.questions and (options.question_sources or options.max_answer_words or options.ignore_gold):
        raise UserError("--question-sources, --max-answer-words and --ignore-gold need --questions; add it")
    runner = _runner(options.workers, options.beam)

    # --- Open the inputs, and see whether they are prepared already ---------------------------------------------------
    question_inputs = [file for argument in options.questions for file in question_files(argument)]
    sources = {"passages": open_texts(options.passages)}
    if options.pretraining:
        sources["pretraining"] = open_texts(options.pretraining)
    shards = {name: options.shards or source.shards for name, source in sources.items()}
    runner.check(max(shards.values()))
    inputs: dict[str, Any] = {"passages": None, "pretraining": None, "vocab": None}
    inputs |= {name: source.identity for name, source in sources.items()}
    settings = {name: getattr(options, name) for name in _SETTINGS} | {"shards": shards}
    if vocabulary is not None:
        inputs["vocab"] = identity(vocabulary.path)
        settings |= {"vocabulary_size": None} | vocabulary.settings()
    if (finder_identity := finder.identity) is not None:
        settings["spans_identity"] = finder_identity
    inputs["questions"] = [{"split": file.split} | _question_identity(file) for file in question_inputs]
    inputs["settings"] = settings
    inputs = json.loads(json.dumps(inputs))  # as it will be read again, for comparing
    output = os.fspath(options.output)
    if is_prepared(output, inputs, options.skip_damage):
        return None
    given_tokenizer = None if vocabulary is None else vocabulary.read()
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
            lost = questions.note_absent_golds(
                article.id for article in _articles(article_folders["passages"], shards["passages"])
            )
            if lost and not options.skip_damage:
                gold, name = next(iter(lost[0].question.gold)), sources["passages"].name
                raise UserError(
                    f"{lost[0].where}: gold_passage_id {gold!r} is not in {name}; correct it, or use --ignore-gold"
                )
            questions.drop(lost)

        # --- The tokenizer: one that an interrupted command left, the given one, or one that is learned ---------------
        if are_complete(names := folder.names(TOKENIZER)):
            tokenizer = tokenizer_of({name: folder.read(f"{TOKENIZER}/{name}") for name in names}, TOKENIZER)
        else:
            every_article = chain.from_iterable(_articles(article_folders[name], shards[name]) for name in sources)
            # From all articles, or from every n-th if they have too many characters.
            step = 1 + sum(count.characters for count in counts.values()) // LEARN_FROM
            texts = (f"{article.title}\n{article.text}" for article in islice(every_article, 0, None, step))
            tokenizer = given_tokenizer or WordPiece.train(texts, options.vocabulary_size)
            for name, content in tokenizer.files().items():
                folder.write(f"{TOKENIZER}/{name}", content)

        # --- Passages: a worker packs a shard; shards that an interrupted command packed stay -------------------------
        packer = PassagePacker(tokenizer, options.limit, options.spans)
        summaries: dict[str, PackingSummary] = {}
        stores: dict[str, dict[str, Any]] = {}
        for name in sources:
            check_owner(root, claim)
            article_folder = open_folder(article_folders[name])
            with StageProgress(name, counts[name].articles) as bar:
                done = {*article_folder.names()}
                missing = [shard for shard in range(shards[name]) if packed_name(shard) not in done]
                if missing:
                    runner.each(
                        partial(pack_shard, packer, f"{root}/{name}"), article_folders[name], missing, bar.update
                    )
            packed_shards = [article_folder.read_json(packed_name(shard)) for shard in range(shards[name])]
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
        for split, of_split in splits.items():
            folder.write(f"questions/{split}.jsonl", question_lines(of_split))

        # --- PREPARED.json, last --------------------------------------------------------------------------------------
        manifest: dict[str, Any] = {"format_version": FORMAT_VERSION, "tokenizer": tokenizer.fingerprint}
        manifest |= {"passages": None, "pretraining": None} | stores
        manifest["questions"] = {split: len(of_split) for split, of_split in splits.items()}
        manifest |= {"limit": options.limit, "inputs": inputs}
        manifest["counts"] = {
            name: count.to_json()
            | {"notes": count.notes_to_json(), "unknown_token_share": round(summaries[name].unknown_share, 4)}
            for name, count in counts.items()
        }
        if question_inputs:
            manifest["counts"]["questions"] = questions.to_manifest()
        check_owner(root, claim)
        folder.write_json(PREPARED, manifest)
    return Prepared(manifest, counts, summaries, questions.counts, tokenizer.size)


def _articles(folder: str, shards: int) -> Iterator[Article]:
    """The articles of a source, shard after shard, once they are extracted."""
    return chain.from_iterable(read_shard(open_folder(folder), shard) for shard in range(shards))


def _runner(workers: int | None, beam: str | None) -> Runner:
    """What does the work, by --workers or by the options of --beam. Raises UserError for both at once."""
    if beam is None:
        return Processes(workers or os.cpu_count() or 1)
    if workers is not None:
        raise UserError("--workers: Beam's runners have options of their own for it; leave it out, or leave --beam out")
    from realm_jax.corpora.pipelines import Beam  # here, since few have Apache Beam

    return Beam.of(beam)


def _question_identity(file: QuestionFile) -> dict[str, Any]:
    """What tells questions from others; judgments have their texts in a file of their own."""
    if (published := published_identity(file)) is not None:
        return published
    texts = {"queries": identity(queries_file(file.path))["sha256"]} if has_judgments(file.path) else {}
    return identity(file.path) | texts


def vocabulary_file(name: str) -> FoundTokenizer:
    """Find the tokenizer that --vocab names: a file, or a model as `config.init_from` takes it.

    Text is put in lower case unless the tokenizer that the file belongs to keeps capitals. Raises UserError if the
    model is not there, or has no tokenizer.
    """
    path = Path(name)
    if not path.is_file():
        from realm_jax.models.folders import resolve_model_path, tokenizer_folder  # here, since it brings JAX along

        path = resolve_model_path(name, "--vocab")
        if path.is_dir():
            folder = tokenizer_folder(path)
            if (found := tokenizer_file(folder)) is None:
                raise UserError(
                    f"--vocab={name}: {folder} has no vocab.txt and no tokenizer.json; name an encoder with one"
                )
            path = found
    said = lower_case_of(path.parent)
    return FoundTokenizer(path, said is None or said.value)
