"""From a prepared folder to batches: what each kind of example promises, and the order they come in."""

import itertools
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from capitals import write_lines
from hypothesis import given, settings
from hypothesis import strategies as st

from realm_jax.cli.prepare import prepare
from realm_jax.data import evidence, layouts
from realm_jax.data import examples as data
from realm_jax.data.evidence import recurring_spans
from realm_jax.data.examples import Examples, Lengths, batches, dataset, lengths_from
from realm_jax.data.questions import Question
from realm_jax.data.sources import Sources, open_sources
from realm_jax.data.store import PassageStore, Segment, remove_documents
from realm_jax.errors import UserError
from realm_jax.models.inputs import contains_phrase
from realm_jax.storage import read_json, write_json_atomic
from realm_jax.tasks import ict, mlm, qa_examples, realm

NAMES = ("Ada Lovelace", "Karl Marx", "Marie Curie", "Alan Turing", "Emmy Noether", "Isaac Newton", "Niels Bohr")
PLACES = ("London", "Trier", "Warsaw", "Wilmslow", "Erlangen", "Cambridge", "Copenhagen")
LENGTHS = Lengths(query=24, document=64, predictions=4, answers=2, span_width=3)


def article(number: int) -> dict[str, str]:
    """Six sentences: the name in two of them, the place in two, a year in one, and one that says nothing."""
    name, place = NAMES[number], PLACES[number]
    text = (
        f"The scholar {name} was born in {place} on a cold day. The family moved in {1800 + number} to a small house. "
        f"It was a quiet life. Many people in {place} knew them well. Yes. "
        f"In the end the work of {name} was read by all of them."
    )
    return {"id": f"article-{number}", "title": f"Life {number}", "text": text}


@pytest.fixture(scope="session")
def prepared(tmp_path_factory) -> Path:
    """A folder whose corpus is its pre-training text, with two questions."""
    folder = tmp_path_factory.mktemp("data")
    passages = write_lines(folder / "passages.jsonl", [article(number) for number in range(len(NAMES))])
    questions = write_lines(folder / "questions.jsonl", [{"question": "who was born in London", "answers": [NAMES[0]]}])
    prepare(passages, folder / "ready", questions=[f"train={questions}"], vocabulary_size=400, limit=64, workers=1)
    return folder / "ready"


@pytest.fixture(scope="session")
def sources(prepared) -> Sources:
    return open_sources(prepared)


@pytest.fixture(scope="module")
def salient(sources) -> Examples:
    """REALM's queries: a sentence with one of its salient spans hidden."""
    return realm.MaskedSentences(sources.passages, sources.tokenizer, LENGTHS, "salient", True).examples()


def decode(sources: Sources, ids: np.ndarray, length: int) -> str:
    return sources.tokenizer.decode(ids[:length].tolist())


def rngs(count: int):
    return (np.random.default_rng(seed) for seed in range(count))


# --- the folder -------------------------------------------------------------------------------------------------------


def test_a_folder_without_pretraining_text_trains_on_its_own_passages(sources):
    assert sources.pretraining_is_corpus and sources.pretraining is sources.passages
    assert len(sources.passages) == len(NAMES)
    assert [question.answers for question in sources.questions["train"]] == [["Ada Lovelace"]]


def test_a_folder_with_pretraining_text_has_none_of_its_own(tmp_path):
    passages = write_lines(tmp_path / "passages.jsonl", [article(0), article(1)])
    pretraining = write_lines(tmp_path / "news.jsonl", [article(2)])
    prepare(passages, tmp_path / "ready", pretraining=pretraining, vocabulary_size=400, limit=64, workers=1)
    opened = open_sources(tmp_path / "ready")
    assert not opened.pretraining_is_corpus
    assert (len(opened.passages), len(opened.pretraining)) == (2, 1)
    assert opened.questions == {}


@pytest.mark.parametrize(
    "manifest, message",
    [
        (None, "not a prepared folder .*realm prepare"),
        ("[]", "unknown format version"),
        ('{"format_version": 99}', "unknown format version"),
        ('{"format_version": 2}', "PREPARED.json is damaged"),
    ],
)
def test_a_folder_without_a_whole_manifest_is_named(tmp_path, manifest, message):
    if manifest:
        (tmp_path / "PREPARED.json").write_text(manifest)
    with pytest.raises(UserError, match=rf"{tmp_path}.*{message}"):
        open_sources(tmp_path)


def test_a_tokenizer_that_the_passages_were_not_built_with_is_refused(prepared, tmp_path):
    """Every id would mean another word."""
    folder = Path(shutil.copytree(prepared, tmp_path / "ready"))
    vocabulary = folder / "tokenizer" / "vocab.txt"
    pieces = vocabulary.read_text().splitlines()
    vocabulary.write_text("\n".join([*pieces[:-2], pieces[-1], pieces[-2]]) + "\n")
    with pytest.raises(UserError, match=r"passages: built with tokenizer .* prepare the folder again"):
        open_sources(folder)


# --- arrays -----------------------------------------------------------------------------------------------------------


def test_queries_and_documents_have_the_text_layouts(sources):
    store, special = sources.passages, sources.tokenizer.special
    title, body = store.title_tokens(0), store.body_tokens(0)
    for length in (8, 20, 128):
        query = data.query_arrays(body, length, sources.tokenizer)
        wanted = layouts.query(body, length, special)
        np.testing.assert_array_equal(query["query"], wanted.ids)
        assert query["query"].dtype == np.uint16 and query["query_length"] == wanted.used
        document = data.document_arrays(title, body, length, sources.tokenizer)
        wanted = layouts.document(title, body, length, special)
        np.testing.assert_array_equal(document["document"], wanted.ids)
        assert document["document_length"] == wanted.used
        assert wanted.ids[document["document_title_length"] + 1] == special.sep  # cut or not, [SEP] follows the title


def test_a_sentence_with_nothing_to_mask_weighs_nothing(sources):
    sentence = sources.passages.body_tokens(0)[:6]
    none = np.zeros((0, 2), np.int32)
    arrays = data.masked_arrays(sentence, none, "salient", np.random.default_rng(0), LENGTHS, sources.tokenizer)
    assert not arrays["weights"].any() and not arrays["positions"].any()
    np.testing.assert_array_equal(arrays["query"][1:7], sentence)


def test_predictions_are_sized_to_the_masking():
    assert lengths_from(96, 288, "salient", 0, 8, 10).predictions == 10
    assert lengths_from(96, 288, "uniform", 0, 8, 10).predictions == round(0.15 * 94)
    assert lengths_from(96, 288, "salient", 3, 8, 10) == Lengths(96, 288, 3, 8, 10)


# --- spans that recur -------------------------------------------------------------------------------------------------


Sentences = list[list[int]]


def store_of(passages: list[Sentences]) -> SimpleNamespace:
    """The columns of passages made of sentences of pieces, each with a title of the same pieces before it."""
    bodies = [list(itertools.chain(*sentences)) for sentences in passages]
    spans = [[span for _, span in runs_of(sentences)] for sentences in passages]
    segment = Segment.__new__(Segment)
    segment.start, segment.rows = 0, len(passages)
    segment.columns = {
        "tokens": np.array([piece for body in bodies for piece in body[:2] + body], np.uint16),
        "sentences": np.array([pair for one in passages for pair in ranges_of(one)], np.int32).reshape(-1, 2),
        "spans": np.array([(*span, 0) for row_spans in spans for span in row_spans], np.int32).reshape(-1, 3),
        "title_lengths": np.array([len(body[:2]) for body in bodies], np.uint16),
    }
    counts = {"tokens": [len(body[:2] + body) for body in bodies]}
    counts |= {"sentences": [len(one) for one in passages], "spans": [len(row_spans) for row_spans in spans]}
    segment.offsets = {name: np.cumsum([0, *values]) for name, values in counts.items()}
    return SimpleNamespace(segments=[segment], rows_at=lambda stored: stored)


def ranges_of(sentences: Sentences) -> list[tuple[int, int]]:
    ends = np.cumsum([len(sentence) for sentence in sentences]).tolist()
    return [(end - len(sentence), end) for sentence, end in zip(sentences, ends, strict=True)]


def runs_of(sentences: Sentences) -> list[tuple[int, tuple[int, int]]]:
    """Every run of one to five pieces within a sentence: the sentence's number, and start and end."""
    runs = [
        (number, (start, start + length))
        for number, (first, end) in enumerate(ranges_of(sentences))
        for length in range(1, 6)
        for start in range(first, end - length + 1)
    ]
    return sorted(runs, key=lambda run: run[1])


def recurring_by_loops(row: int, sentences: Sentences, spans: list[tuple[int, tuple[int, int]]], room: int):
    body, ranges, found = list(itertools.chain(*sentences)), ranges_of(sentences), []
    for place, (number, (start, end)) in enumerate(spans):
        run = body[start:end]
        others = [
            i
            for i, (first, last) in enumerate(ranges)
            if i != number and any(body[j : j + len(run)] == run for j in range(first, last - len(run) + 1))
        ]
        if others and end - ranges[number][0] <= room:
            found.append([row, number, place, others[0]])
    return found


# Few pieces, so that runs recur; their bytes occur across the bounds of one another: 0x0102 in 0x02__ 0x__01.
pieces = st.sampled_from([0x0101, 0x0102, 0x0201, 0x0202])
sentences_of_pieces = st.lists(st.lists(pieces, min_size=1, max_size=6), min_size=1, max_size=4)


@settings(max_examples=100, deadline=None)
@given(st.lists(sentences_of_pieces, max_size=4), st.integers(1, 6))
def test_recurring_spans_are_those_of_plain_loops(passages, room):
    """Found in another sentence of the same passage, wholly inside it; not across two, nor in a title. Hashes of
    different runs may be equal, because what they propose is compared."""
    expected = [recurring_by_loops(row, one, runs_of(one), room) for row, one in enumerate(passages)]
    for base in (evidence.HASH_BASE, np.uint64(0)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(evidence, "HASH_BASE", base)
            found = recurring_spans(store_of(passages), room)
        assert found.tolist() == list(itertools.chain(*expected))


def test_recurring_spans_of_a_prepared_folder(sources):
    """Of each article the name and the place, in both of their sentences; the year stands in one only."""
    store, expected = sources.passages, []
    for row in range(len(store)):
        ranges, body = store.sentences(row).tolist(), store.body_tokens(row).tolist()
        spans = [(start, end) for start, end, _ in store.spans(row).tolist()]
        owners = [next(i for i, (a, b) in enumerate(ranges) if a <= start and end <= b) for start, end in spans]
        sentences, owned = [body[a:b] for a, b in ranges], list(zip(owners, spans, strict=True))
        expected += recurring_by_loops(row, sentences, owned, 62)
    assert recurring_spans(store, 62).tolist() == expected
    runs = [store.body_tokens(row)[slice(*store.spans(row)[place, :2])] for row, _, place, _ in expected]
    texts = Counter(sources.tokenizer.decode(run) for run in runs)
    assert texts["london"] == 2 and texts["ada lovelace"] == 2 and texts["1800"] == 0


def test_recurring_spans_of_a_version_are_those_of_the_documents_that_are_left(prepared, tmp_path):
    """Rows are numbered anew."""
    folder = Path(shutil.copytree(prepared, tmp_path / "data")) / "passages"
    before = recurring_spans(PassageStore.open(folder), 62)
    store = remove_documents(folder, ["article-2"])
    gone = PassageStore.open(prepared / "passages").rows_of("article-2")
    left = before[~np.isin(before[:, 0], gone)]
    left[:, 0] -= np.where(left[:, 0] > gone.start, len(gone), 0)
    np.testing.assert_array_equal(recurring_spans(store, 62), left)


def test_salient_sentences_and_rows_are_those_with_a_span_in_reach(sources, prepared, tmp_path):
    """How far a row's first span reaches is a column that an older store may lack; no fingerprint covers it."""
    older = Path(shutil.copytree(prepared / "passages", tmp_path / "passages"))
    manifest = read_json(older / "STORE.json")
    for entry in manifest["segments"]:
        (older / entry["folder"] / "salient_reach.npy").unlink()
        del entry["files"]["salient_reach.npy"]
    write_json_atomic(older / "STORE.json", manifest)
    store, whole = PassageStore.open(older), sources.passages
    assert store == whole
    for room in (0, 3, 4, 6, 62):
        found = data.salient_sentences(whole, room + 2)
        for row, number in np.stack(found, axis=1).tolist():
            assert data.spans_of(whole, row, number)[1][:, 1].min() <= room
        for some in (whole, store):
            np.testing.assert_array_equal(data.salient_rows(some, room), np.unique(found.rows))
    assert Counter(found.rows.tolist()) == dict.fromkeys(range(len(NAMES)), 4)  # name, year, place, name
    assert len(data.salient_rows(store, 0)) == 0
    left = remove_documents(older, ["article-2"])
    assert data.salient_rows(left, 62).tolist() == list(range(len(NAMES) - 1))
    assert set(data.salient_sentences(left, 64).rows.tolist()) == {*range(len(NAMES) - 1)}


# --- warm-up ----------------------------------------------------------------------------------------------------------


def warmup(sources: Sources, null_rate: float, unrelated_rate: float) -> Examples:
    store = sources.passages
    return mlm.warmup_examples(store, sources.pretraining, sources.tokenizer, LENGTHS, null_rate, unrelated_rate)


def answer_of(example: dict) -> list[int]:
    return example["targets"][example["weights"] > 0].tolist()


def body_of(example: dict) -> list[int]:
    return example["document"][example["document_title_length"] + 2 : example["document_length"] - 1].tolist()


def holds(body: list[int], phrase: list[int]) -> bool:
    return any(body[i : i + len(phrase)] == phrase for i in range(len(body) - len(phrase) + 1))


def test_the_warm_up_reads_the_masked_span_off_its_passage(sources):
    examples = warmup(sources, 0.0, 0.0)
    assert examples.total == len(recurring_spans(sources.passages, LENGTHS.query - 2))
    for index, rng in itertools.product(range(0, examples.total, 3), rngs(5)):
        example = examples.make(index, rng)
        answer = answer_of(example)
        assert answer and holds(body_of(example), answer)
        masked = example["query"][example["positions"][: len(answer)]]
        assert (masked == sources.tokenizer.mask_id).all()


def test_the_warm_up_s_excerpts_vary_and_keep_the_order_of_sentences(sources):
    examples, store = warmup(sources, 0.0, 0.0), sources.passages
    row = int(recurring_spans(store, LENGTHS.query - 2)[0, 0])
    sentences = [store.body_tokens(row)[start:end].tolist() for start, end in store.sentences(row)]
    possible = {tuple(itertools.chain(*chosen)) for n in range(1, 7) for chosen in itertools.combinations(sentences, n)}
    bodies = {tuple(body_of(examples.make(0, rng))) for rng in rngs(40)}
    assert len(bodies) > 5 and bodies <= possible


def test_the_warm_up_s_shares(sources):
    """Beside nothing, beside a passage that is probably another one, and beside one that tells."""
    examples = warmup(sources, 0.3, 0.4)
    made = [examples.make(seed % examples.total, rng) for seed, rng in enumerate(rngs(400))]
    empty = np.mean([example["document_length"] == 3 for example in made])
    told = np.mean([holds(body_of(example), answer_of(example)) for example in made])
    assert 0.23 < empty < 0.37
    assert 0.25 < told < 0.45  # 0.3, and what the 0.4 share tells by chance
    # Beside nothing there is the null document.
    example = warmup(sources, 1.0, 0.0).make(0, np.random.default_rng(0))
    cls, sep = sources.tokenizer.cls_id, sources.tokenizer.sep_id
    assert example["document"][:4].tolist() == [cls, sep, sep, 0]
    assert (example["document_length"], example["document_title_length"]) == (3, 0)
    assert example["weights"].any()


# --- inverse cloze ----------------------------------------------------------------------------------------------------


def test_the_inverse_cloze_task_removes_the_sentence(sources):
    """All other sentences stay, in order; short ones such as "Yes." are not asked."""
    store = sources.passages
    examples = ict.ict_examples(store, sources.tokenizer, LENGTHS, 1.0, ict.sentence_rows(store))
    assert examples.total == len(store)
    for index, rng in itertools.product(range(examples.total), rngs(6)):
        example = examples.make(index, rng)
        sentence = example["query"][1 : example["query_length"] - 1].tolist()
        sentences = [store.body_tokens(index)[start:end].tolist() for start, end in store.sentences(index)]
        number = [one[: LENGTHS.query - 2] for one in sentences].index(sentence)
        assert len(sentence) >= data.MINIMUM_SENTENCE
        assert body_of(example) == list(itertools.chain(*(s for i, s in enumerate(sentences) if i != number)))


def test_the_inverse_cloze_task_leaves_a_share_of_sentences_in(sources):
    rows = ict.sentence_rows(sources.passages)
    whole = ict.ict_examples(sources.passages, sources.tokenizer, LENGTHS, 0.0, rows)
    example = whole.make(2, np.random.default_rng(0))
    np.testing.assert_array_equal(body_of(example), sources.passages.body_tokens(2))
    mostly = ict.ict_examples(sources.passages, sources.tokenizer, LENGTHS, 0.9, rows)
    full = len(sources.passages.body_tokens(2))
    kept = np.mean([len(body_of(mostly.make(2, rng))) == full for rng in rngs(300)])
    assert 0.05 < kept < 0.16


# --- REALM's queries --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["salient", "uniform", "random_span"])
def test_masked_queries_are_their_sentence_but_for_the_predictions(sources, kind):
    store = sources.passages
    examples = realm.MaskedSentences(store, sources.tokenizer, LENGTHS, kind, pretraining_is_corpus=True).examples()
    assert examples.total == len(store)
    for index, rng in itertools.product(range(examples.total), rngs(5)):
        example = examples.make(index, rng)
        length = int(example["sentence_length"])
        sentence, query = example["sentence"][:length].tolist(), example["query"][1 : length + 1].tolist()
        assert holds(store.body_tokens(index).tolist(), sentence)
        count = int(example["weights"].sum())
        assert count > 0 and example["weights"][:count].all()
        places = (example["positions"][:count] - 1).tolist()
        assert [sentence[place] for place in places] == answer_of(example)
        untouched = set(range(min(length, LENGTHS.query - 2))) - set(places)
        if kind != "salient":  # of a salient span that is longer than the predictions the rest is hidden too
            assert all(query[place] == sentence[place] for place in untouched)
        if kind != "uniform":  # which leaves some and replaces others
            assert all(query[place] == sources.tokenizer.mask_id for place in places)


def test_a_whole_span_is_hidden_which_is_chosen_uniformly_over_its_passage(sources, salient):
    """Sentences with two spans are drawn twice as often as those with one."""
    store = sources.passages
    spans = {tuple(store.body_tokens(0)[start:end].tolist()[: LENGTHS.predictions]) for start, end, _ in store.spans(0)}
    counts, drawn = np.zeros(len(store.sentences(0))), set()
    for rng in rngs(600):
        example = salient.make(0, rng)
        sentence = example["sentence"]
        drawn.add(tuple(answer_of(example)))
        (number,) = (
            i
            for i, (start, end) in enumerate(store.sentences(0))
            if sentence[: end - start].tolist() == store.body_tokens(0)[start:end].tolist()
        )
        counts[number] += 1
    assert drawn == spans
    of_sentences = np.array([len(data.spans_of(store, 0, number)[1]) for number in range(len(counts))])
    assert of_sentences.max() == 2 and (counts[of_sentences == 0] == 0).all()
    np.testing.assert_allclose(counts / counts.sum(), of_sentences / of_sentences.sum(), atol=0.06)


def test_the_own_row_is_set_only_where_the_text_is_the_corpus(sources, salient):
    other = realm.MaskedSentences(sources.passages, sources.tokenizer, LENGTHS, "salient", False).examples()
    assert [examples.make(3, np.random.default_rng(0))["own_row"] for examples in (salient, other)] == [3, -1]


def test_the_sentence_is_found_in_its_own_row_on_the_device(sources, salient):
    """The two rules of exclusion agree: the row of an example is the one passage that holds its sentence."""
    ids, _, _ = sources.passages.document_matrix(LENGTHS.document, sources.tokenizer.special)
    made = [salient.make(index, np.random.default_rng(index)) for index in range(salient.total)]
    sentences, lengths = (np.stack([one[name] for one in made]) for name in ("sentence", "sentence_length"))
    found = np.asarray(contains_phrase(np.broadcast_to(ids, (len(made), *ids.shape)), sentences, lengths))
    for row, holders in enumerate(found):
        # "It was a quiet life." has no span and is never asked; all other sentences name their article's own things.
        assert np.flatnonzero(holders).tolist() == [row]


# --- questions --------------------------------------------------------------------------------------------------------


def test_answers_that_are_longer_than_a_span_are_dropped_and_make_room(sources):
    """`LENGTHS` has room for two answers of at most three pieces."""
    long = "in the end the work was read by all of them"
    question = Question("who was born in London", [long, "London", "", "Marie Curie", "Trier"])
    examples = qa_examples.question_examples([question], sources.tokenizer, LENGTHS)
    example = examples.make(0, np.random.default_rng(0))
    wanted = [sources.tokenizer.encode(answer).ids for answer in ("London", "Marie Curie")]
    assert all(len(ids) <= LENGTHS.span_width for ids in wanted)
    assert example["answer_lengths"].tolist() == [len(ids) for ids in wanted]
    kept = zip(example["answers"].tolist(), example["answer_lengths"], strict=True)
    assert [ids[:size] for ids, size in kept] == wanted
    assert decode(sources, example["query"][1:], int(example["query_length"]) - 2) == "who was born in london"
    examples = qa_examples.question_examples([Question("who", [long])], sources.tokenizer, LENGTHS)
    assert examples.make(0, np.random.default_rng(0))["answer_lengths"].tolist() == [0, 0], "all are too long"


def test_questions_that_cannot_be_learned_from_are_refused(sources):
    with pytest.raises(UserError, match="no training questions .* --questions train=FILE"):
        qa_examples.question_examples([], sources.tokenizer, LENGTHS)
    questions = [Question("when", ["19[67]9"], fields={"match": "regex"}), Question("who", ["a king"])]
    with pytest.raises(UserError, match="1 of 2 training questions have regular expressions"):
        qa_examples.question_examples(questions, sources.tokenizer, LENGTHS)


@pytest.mark.parametrize(
    "make, missing",
    [
        (lambda store, s: ict.sentence_rows(store), "two or more sentences"),
        (
            lambda store, s: realm.MaskedSentences(store, s.tokenizer, LENGTHS, "salient", True).examples(),
            "a salient span",
        ),
        (lambda store, s: mlm.warmup_examples(store, store, s.tokenizer, LENGTHS, 0.1, 0.1), "in two sentences"),
    ],
)
def test_a_corpus_that_a_task_cannot_use_is_named(tmp_path, make, missing):
    passages = write_lines(tmp_path / "passages.jsonl", [{"id": "a", "title": "", "text": "nothing is named here"}])
    prepare(passages, tmp_path / "ready", vocabulary_size=200, limit=32, workers=1)
    opened = open_sources(tmp_path / "ready")
    with pytest.raises(UserError, match=rf"{tmp_path}.*passages: .* needs at least one passage with .*{missing}"):
        make(opened.passages, opened)


# --- order and batches ------------------------------------------------------------------------------------------------

REALM, ICT, MLM = realm.RealmTask.stream, ict.Ict.stream, mlm.Mlm.stream


def counting(total: int) -> Examples:
    """Examples that tell their number and a draw from their generator."""
    return Examples(total, lambda index, rng: {"index": np.int32(index), "draw": rng.random()})


def steps(*arguments, **named) -> list[dict[str, np.ndarray]]:
    return list(batches(*arguments, **named))


@pytest.mark.parametrize("start", [0, 1, 5, 11, 12])
def test_the_batch_of_a_step_is_the_same_wherever_a_run_begins(salient, start):
    whole = steps(salient, 3, REALM, 4, start=0, stop=12)
    resumed = steps(salient, 3, REALM, 4, start=start, stop=12)
    assert len(resumed) == 12 - start
    for wanted, found in zip(whole[start:], resumed, strict=True):
        assert wanted.keys() == found.keys()
        for name, array in wanted.items():
            np.testing.assert_array_equal(array, found[name])
            assert len(array) == 4


@pytest.mark.parametrize("seed", [0, 1])
def test_examples_of_a_group_come_together_in_every_epoch(seed):
    ordered = dataset(counting(12)._replace(group=4), seed, ICT, 8)
    groups = np.concatenate([ordered[step]["index"] for step in range(3)]).reshape(-1, 4)
    assert (groups == groups[:, :1] + np.arange(4)).all() and (groups[:, 0] % 4 == 0).all()
    for epoch in groups.reshape(2, 3, 4):
        assert sorted(epoch.ravel().tolist()) == list(range(12))


@settings(max_examples=20, deadline=None)
@given(total=st.integers(1, 12), batch_size=st.integers(1, 5), seed=st.integers(0, 99))
def test_every_epoch_visits_every_example_once(total, batch_size, seed):
    epochs = 3
    ordered = dataset(counting(total), seed, ICT, batch_size)
    needed = -(-epochs * total // batch_size)
    indices = np.concatenate([ordered[step]["index"] for step in range(needed)])[: epochs * total]
    for epoch in indices.reshape(epochs, total):
        assert sorted(epoch.tolist()) == list(range(total))


def draws(seed: int, stream: int, batch_size: int, total: int = 20) -> dict[tuple[int, int], float]:
    """The draw of each (epoch, example) in the first two epochs."""
    ordered = dataset(counting(total), seed, stream, batch_size)
    found = [ordered[step] for step in range(2 * total // batch_size)]
    indices, values = (np.concatenate([batch[name] for batch in found]) for name in ("index", "draw"))
    return {(place // total, int(i)): float(v) for place, (i, v) in enumerate(zip(indices, values, strict=True))}


def test_a_mask_depends_on_seed_epoch_and_example_alone():
    """Not on the batch size nor on the place in the epoch; another seed or task draws otherwise."""
    wanted = {
        (epoch, example): np.random.default_rng((7, REALM, epoch, example)).random()
        for epoch in range(2)
        for example in range(20)
    }
    assert draws(7, REALM, 4) == draws(7, REALM, 10) == wanted
    assert not set(wanted.values()) & set(draws(8, REALM, 4).values())
    assert not set(wanted.values()) & set(draws(7, MLM, 4).values())
    first, second = (dataset(counting(50), 0, REALM, 50)[step]["index"].tolist() for step in range(2))
    assert first != second, "epochs differ in order"


def test_a_fault_in_an_example_reaches_the_run():
    """Although examples are made ahead in a thread."""

    def make(index, rng):
        raise UserError("passages/segment-00000: damaged")

    with pytest.raises(UserError, match="damaged"):
        steps(Examples(3, make), 0, REALM, 2, start=0, stop=2)
