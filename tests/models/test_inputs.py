"""The layouts on the device against those of `text.layouts`, and token matching against plain loops."""

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import SPECIAL, document_rows, query_rows

from realm_jax.data import layouts
from realm_jax.models import inputs
from realm_jax.models.inputs import PassageBatch, ReaderInput

join = jax.jit(inputs.reader_inputs)
contains = jax.jit(inputs.contains_phrase)
find_answers = jax.jit(inputs.answer_spans, static_argnames="span_width")
hold_answers = jax.jit(inputs.has_answer_span, static_argnames="span_width")
document_segments = jax.jit(inputs.document_segments)

QUERY, DOCUMENT = 8, 12
JOINT = QUERY + DOCUMENT - 2
few = st.integers(4, 6)  # a vocabulary of three words, so that phrases do recur
words = lambda most: st.lists(few, max_size=most)  # noqa: E731
passages = st.lists(st.tuples(words(4), words(14)), min_size=4, max_size=4)  # two for each of two queries
settle = settings(max_examples=60, deadline=None)


def two_by_two(documents: PassageBatch) -> PassageBatch:
    return PassageBatch(*(part.reshape(2, 2, *part.shape[1:]) for part in documents))


def join_texts(queries: list[list[int]], texts) -> ReaderInput:
    query = query_rows(queries, QUERY)
    return join(query["query"], query["query_length"], two_by_two(document_rows(texts, DOCUMENT)))


@settle
@given(st.lists(words(10), min_size=2, max_size=2), passages)
def test_the_joint_of_the_device_is_that_of_the_text_layouts(queries, texts):
    """Also where the query and the passage are cut: both keep what the embedders saw of them."""
    joint = join_texts(queries, texts)
    for place, (title, body) in enumerate(texts):
        seen = body[: DOCUMENT - 3 - min(len(title), DOCUMENT - 3)]
        wanted = layouts.joint(queries[place // 2], seen, JOINT, SPECIAL, max_query=QUERY - 2)
        here = ReaderInput(*(np.asarray(part)[place // 2, place % 2] for part in joint))
        np.testing.assert_array_equal(here.ids, wanted.ids)
        np.testing.assert_array_equal(here.segments, wanted.segments)
        np.testing.assert_array_equal(here.mask, np.arange(JOINT) < wanted.used)
        assert here.lengths == wanted.used
        assert here.body_start == 2 + len(queries[place // 2][: QUERY - 2])


@settle
@given(passages)
def test_segments_of_documents_are_those_of_the_text_layouts(texts):
    found = document_segments(document_rows(texts, DOCUMENT))
    wanted = [layouts.document(title, body, DOCUMENT, SPECIAL).segments for title, body in texts]
    np.testing.assert_array_equal(found, wanted)


def test_the_null_document_is_empty_and_the_joint_with_it_ends_in_two_separators():
    query, null = query_rows([[7, 8], [9]], 6), inputs.null_passages(2, (SPECIAL.cls, SPECIAL.sep))
    np.testing.assert_array_equal(null.ids, [layouts.document([], [], 3, SPECIAL).ids] * 2)
    np.testing.assert_array_equal(document_segments(null), [[0, 0, 1]] * 2)
    joint = inputs.reader_inputs(query["query"], query["query_length"], PassageBatch(*(part[:, None] for part in null)))
    cls, sep = SPECIAL.cls, SPECIAL.sep
    assert joint.ids[:, 0].tolist() == [[cls, 7, 8, sep, sep, 0, 0], [cls, 9, sep, sep, 0, 0, 0]]
    assert joint.segments[:, 0].tolist() == [[0, 0, 0, 0, 1, 0, 0], [0, 0, 0, 1, 0, 0, 0]]
    assert joint.lengths.tolist() == [[5], [4]]


def occurs(phrase: list[int], text: list[int]) -> bool:
    return any(text[i : i + len(phrase)] == phrase for i in range(len(text) - len(phrase) + 1))


@settle
@given(st.lists(words(5), min_size=2, max_size=2), passages)
def test_contains_is_a_plain_search_for_the_phrase(phrases, texts):
    documents = two_by_two(document_rows(texts, DOCUMENT)).ids
    padded = np.array([phrase + [0] * (5 - len(phrase)) for phrase in phrases], np.uint16)
    found = contains(documents, padded, np.array([len(phrase) for phrase in phrases]))
    for example, phrase in enumerate(phrases):
        for place in range(2):
            wanted = bool(phrase) and occurs(phrase, documents[example, place].tolist())
            assert bool(found[example, place]) == wanted


def test_a_phrase_at_the_very_end_of_a_row_is_found_and_one_that_runs_over_is_not():
    documents = np.array([[[1, 4, 5, 6]]], np.uint16)
    for phrase, length, wanted in (([5, 6, 0], 2, True), ([5, 6, 1], 3, False), ([6, 1, 4], 3, False)):
        assert bool(contains(documents, np.array([phrase], np.uint16), np.array([length]))[0, 0]) == wanted


WIDTH = 3
answer_lists = st.lists(st.lists(st.lists(few, max_size=4), min_size=3, max_size=3), min_size=2, max_size=2)


def answer_arrays(answers: list[list[list[int]]], width: int) -> tuple[np.ndarray, np.ndarray]:
    pieces = np.zeros((len(answers), len(answers[0]), width), np.int32)
    for example, some in enumerate(answers):
        for place, answer in enumerate(some):
            pieces[example, place, : len(answer)] = answer
    return pieces, np.array([[len(answer) for answer in some] for some in answers], np.int32)


def spans_by_loops(ids: list[int], body: range, answers: list[list[int]]) -> tuple[set, set]:
    """Spans (first, pieces − 1) that lie in the body, and those among them that spell an answer."""
    allowed = {(i, w) for w in range(WIDTH) for i in body if i + w in body}
    return allowed, {(i, w) for i, w in allowed if ids[i : i + w + 1] in answers}


@settle
@given(st.lists(words(6), min_size=2, max_size=2), passages, answer_lists)
def test_answers_are_found_as_by_plain_loops(queries, texts, answers):
    """Answers longer than a span may be, empty ones, and ones in the query are never found; nor is a final [SEP]."""
    joint = join_texts(queries, texts)
    allowed, correct = find_answers(joint, *answer_arrays(answers, 4), span_width=WIDTH)
    for example in range(2):
        for place in range(2):
            ids = joint.ids[example, place].tolist()
            body = range(int(joint.body_start[example, place]), int(joint.lengths[example, place]) - 1)
            found = [{tuple(span) for span in np.argwhere(x[example, place]).tolist()} for x in (allowed, correct)]
            assert tuple(found) == spans_by_loops(ids, body, answers[example])
    holding = hold_answers(two_by_two(document_rows(texts, DOCUMENT)), *answer_arrays(answers, 4), span_width=WIDTH)
    assert holding.tolist() == correct.any(axis=(2, 3)).tolist()


def test_a_joint_with_titles_has_them_before_the_body_and_no_span_in_them():
    """[CLS] 4 [SEP] 5 [SEP] 6 5 [SEP]: the title says 5 as well."""
    query, documents = query_rows([[4]], 4), document_rows([([5], [6, 5]), ([], [6])], length=8)
    documents = PassageBatch(*(part[None] for part in documents))
    joint = inputs.reader_inputs(query["query"], query["query_length"], documents, titles=True)
    assert joint.ids[0].tolist() == [[1, 4, 2, 5, 2, 6, 5, 2, 0, 0, 0], [1, 4, 2, 2, 6, 2, 0, 0, 0, 0, 0]]
    assert joint.segments[0].tolist() == [[0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0]]
    assert joint.body_start.tolist() == [[5, 4]] and joint.lengths.tolist() == [[8, 6]]
    _, correct = inputs.answer_spans(joint, *answer_arrays([[[5]]], 2), 2)
    assert np.argwhere(correct[0]).tolist() == [[0, 6, 0]]


def test_no_span_reaches_into_the_final_separator():
    """Not even when an answer spells one."""
    joint = join_texts([[4], [4]], [([], [5, 6])] * 4)
    answers = answer_arrays([[[6, SPECIAL.sep]], [[SPECIAL.sep]]], 4)
    allowed, correct = find_answers(joint, *answers, span_width=WIDTH)
    assert np.argwhere(allowed[0, 0]).tolist() == [[3, 0], [3, 1], [4, 0]]  # [CLS] 4 [SEP] 5 6 [SEP]
    assert not correct.any()


def test_the_reference_case_of_a_question_and_two_blocks():
    """Question 7 8, blocks 21…24 and 31 32, answers 22 23 and 40, at eight places: the block is cut, [SEP] is last."""
    query = query_rows([[7, 8]], 4)
    documents = document_rows([([], [21, 22, 23, 24]), ([], [31, 32])], length=6)
    joint = inputs.reader_inputs(
        query["query"], query["query_length"], PassageBatch(*(part[None] for part in documents))
    )
    assert joint.ids[0].tolist() == [[1, 7, 8, 2, 21, 22, 23, 2], [1, 7, 8, 2, 31, 32, 2, 0]]
    _, correct = inputs.answer_spans(joint, *answer_arrays([[[22, 23], [40]]], 10), 10)
    assert np.argwhere(correct[0]).tolist() == [[0, 5, 1]]  # the first block, pieces 5 to 6; nothing in the second
