"""The synthetic encyclopedia: what a caller may rely on, and what makes it a fair test of retrieval."""

import json
import re
from collections import Counter
from dataclasses import asdict, replace
from itertools import chain
from typing import NamedTuple

import pytest

from realm_jax.data.encyclopedia import PHRASINGS, RELATIONS, Encyclopedia, EncyclopediaSettings, write
from realm_jax.errors import UserError


class Made(NamedTuple):
    """All records of an encyclopedia."""

    settings: EncyclopediaSettings
    passages: list[dict]
    pretraining: list[dict]
    train_questions: list[dict]
    dev_questions: list[dict]


def generate(seed, entities=3200, held_out=200, **settings) -> Made:
    made = Encyclopedia(EncyclopediaSettings(seed, entities, held_out, **settings))
    parts = made.passages(), made.pretraining(), made.train_questions(), made.dev_questions()
    return Made(made.settings, *map(list, parts))


@pytest.fixture(scope="module")
def encyclopedia():
    return generate(seed=7)


@pytest.fixture(scope="module")
def world(encyclopedia):
    return Encyclopedia(encyclopedia.settings)


def words(text):
    return re.findall(r"\w+", text)


def sentences(text):
    return re.split(r"(?<=\.) ", text)


def spoken_pairs(world, text):
    """Every name in `text` as plain words, synonyms undone."""
    plain = {synonym: word for word, synonym in world.synonyms.items()}
    tokens = [plain.get(token, token) for token in words(text)]
    firsts, seconds = set(world.firsts), set(world.seconds)
    return [pair for pair in zip(tokens, tokens[1:], strict=False) if pair[0] in firsts and pair[1] in seconds]


def values_in(world, text):
    pools = {value for pool in world.pools.values() for value in pool}
    tokens = words(text)
    singles = [token for token in tokens if token in pools]
    pairs = [" ".join(pair) for pair in zip(tokens, tokens[1:], strict=False) if " ".join(pair) in pools]
    return singles + pairs


def test_same_seed_gives_the_same_json_lines_and_another_seed_other_facts(tmp_path):
    made = generate(1, entities=200, held_out=20, train_questions=100)
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        paths = write(Encyclopedia(replace(made.settings, seed=seed)), tmp_path / folder)
    for path in paths:
        content = (tmp_path / "a" / path.name).read_bytes()
        assert content == (tmp_path / "b" / path.name).read_bytes() != path.read_bytes()
    names = ["passages", "pretraining", "questions-train", "questions-dev"]
    assert [path.name for path in paths] == [f"{name}.jsonl" for name in names]
    read = [[*map(json.loads, (tmp_path / "a" / path.name).read_text(encoding="utf-8").splitlines())] for path in paths]
    assert read == [*made[1:]]
    assert set(read[0][0]) == set(read[1][0]) == {"id", "title", "text"}
    assert set(read[2][0]) == {"question", "answers", "gold_passage_id", "relation", "replaced_words", "entity"}


def test_default_sizes(encyclopedia):
    assert len(encyclopedia.passages) == 3200
    assert len(encyclopedia.train_questions) == 4000
    assert len(encyclopedia.dev_questions) == 600
    tokens = re.compile(r"\w+|[^\w\s]").findall  # as many as a tokenizer that knows every word makes of a text
    assert max(len(tokens(passage["text"])) for passage in encyclopedia.passages) <= 60
    texts = [record["text"] for record in chain(encyclopedia.passages, encyclopedia.pretraining)]
    asked = [record["question"] for record in chain(encyclopedia.train_questions, encyclopedia.dev_questions)]
    distinct = {token for text in texts + asked for token in tokens(text.lower())}
    assert len(distinct) <= 1500  # so that a vocabulary of 2,000 pieces keeps nearly every word whole


def test_names_are_unique_lower_case_pairs_of_shared_words(encyclopedia):
    titles = [passage["title"] for passage in encyclopedia.passages]
    assert len(set(titles)) == len(titles)
    assert all(re.fullmatch(r"[a-z]+ [a-z]+", title) for title in titles)
    uses = Counter(chain.from_iterable(title.split() for title in titles))
    assert min(uses.values()) >= 5 and max(uses.values()) <= 60


def test_words_of_names_synonyms_values_and_phrasings_are_distinct(world):
    groups = [
        world.firsts,
        world.seconds,
        list(world.synonyms.values()),
        *({word.lower() for value in pool for word in words(value)} for pool in world.pools.values()),
        {word.lower() for kinds in PHRASINGS.values() for text in chain(*kinds) for word in words(text)},
    ]
    counted = Counter(word for group in groups for word in group)
    assert max(counted.values()) == 1


def test_passage_states_every_fact_repeats_one_and_uses_no_synonyms(encyclopedia, world):
    synonyms = set(world.synonyms.values())
    assert not any(synonyms.intersection(words(passage["text"])) for passage in encyclopedia.passages)
    for index in range(0, 3200, 50):
        text = encyclopedia.passages[index]["text"]
        told = Counter(values_in(world, text))
        assert set(told) == set(world.entity(index).values)
        assert sorted(told.values()) == [1, 1, 2]
        assert len(set(sentences(text))) == 4
        assert encyclopedia.passages[index]["title"] in sentences(text)[0]


def test_answer_stands_in_the_gold_passage(encyclopedia):
    texts = {passage["id"]: passage for passage in encyclopedia.passages}
    for question in chain(encyclopedia.train_questions, encyclopedia.dev_questions):
        gold = texts[question["gold_passage_id"]]
        assert question["answers"][0] in gold["text"]
        assert question["entity"] == gold["title"]


def test_more_than_half_of_the_questions_replace_a_name_word(encyclopedia, world):
    for questions in (encyclopedia.train_questions, encyclopedia.dev_questions):
        assert sum(question["replaced_words"] > 0 for question in questions) > len(questions) / 2
        for question in questions:
            left = set(question["entity"].split()) & set(words(question["question"]))
            assert len(left) == 2 - question["replaced_words"]
            assert spoken_pairs(world, question["question"]) == [tuple(question["entity"].split())]


def test_plain_training_questions_teach_no_synonyms(encyclopedia):
    plain = generate(**asdict(replace(encyclopedia.settings, plain_questions=True)))
    for field in ("passages", "pretraining", "dev_questions"):
        assert list(getattr(plain, field)) == list(getattr(encyclopedia, field))
    for question, other in zip(plain.train_questions, encyclopedia.train_questions, strict=True):
        assert question["entity"] in question["question"] and question["replaced_words"] == 0
        assert {**other, "question": "", "replaced_words": 0} == {**question, "question": ""}


def test_held_out_entities_are_asked_only_in_dev(encyclopedia, world):
    numbers = [int(question["gold_passage_id"].split("-")[1]) for question in encyclopedia.dev_questions]
    held_out_entities = [world.entity(number) for number in numbers]
    held_out = {entity.name for entity in held_out_entities}
    asked = Counter((question["entity"], question["relation"]) for question in encyclopedia.dev_questions)
    assert len(held_out) == 200 and len(asked) == 600 and set(asked.values()) == {1}
    spoken = {pair for item in encyclopedia.pretraining for pair in spoken_pairs(world, item["text"])}
    trained = {tuple(question["entity"].split()) for question in encyclopedia.train_questions}
    assert not held_out & (spoken | trained)
    passages = {passage["title"] for passage in encyclopedia.passages}
    assert {tuple(title.split()) for title in passages} == held_out | spoken
    seen = Counter(token for item in encyclopedia.pretraining for token in words(item["text"]))
    for entity in held_out_entities:  # their words and values are learned from others
        for word in entity.name:
            assert seen[world.synonyms.get(word, word)] >= 5
        assert all(seen[token] for value in entity.values for token in words(value))


def test_every_pretraining_sentence_has_its_name_and_one_value(encyclopedia, world):
    told = Counter()
    for item in encyclopedia.pretraining:
        lines = sentences(item["text"])
        assert 1 <= len(lines) <= 3
        for line in lines:
            [name], [value] = spoken_pairs(world, line), values_in(world, line)
            told[name, value] += 1
    assert len(told) == 3000 * len(RELATIONS)
    assert set(told.values()) == {2}


def test_pretraining_repeats_no_passage_sentence_and_its_titles_reveal_nothing(encyclopedia):
    stated = {line for passage in encyclopedia.passages for line in sentences(passage["text"])}
    told = [line for item in encyclopedia.pretraining for line in sentences(item["text"])]
    assert not stated.intersection(told)
    assert all(re.fullmatch(r"dispatch \d+", item["title"]) for item in encyclopedia.pretraining)
    assert len({item["id"] for item in encyclopedia.pretraining}) == len(encyclopedia.pretraining)


def test_no_answer_is_common_enough_to_be_guessed(encyclopedia):
    told = {relation: Counter() for relation in RELATIONS}
    for question in encyclopedia.train_questions:
        told[question["relation"]].update(question["answers"])
    guesses = {relation: answers.most_common(1)[0][0] for relation, answers in told.items()}
    right = sum(guesses[question["relation"]] in question["answers"] for question in encyclopedia.dev_questions)
    assert right / len(encyclopedia.dev_questions) < 0.04


def test_no_fact_is_asked_twice_before_all_were_asked_once():
    made = generate(5, entities=60, held_out=10, train_questions=300)
    asked = [(question["entity"], question["relation"]) for question in made.train_questions]
    assert len(set(asked[:150])) == 150 and Counter(asked) == dict.fromkeys(asked, 2)


@pytest.mark.parametrize("entities, held_out", [(2, 1), (10, 3), (101, 7), (97, 90), (64, 32)])
def test_any_share_of_held_out_entities_splits_the_whole(entities, held_out):
    world = Encyclopedia(EncyclopediaSettings(seed=1, entities=entities, held_out=held_out, train_questions=1))
    asked = {question["gold_passage_id"] for question in world.dev_questions()}
    told = {f"entity-{world._known_entity(position)}" for position in range(entities - held_out)}
    assert len(asked) == held_out and not asked & told and len(asked | told) == entities


@pytest.mark.parametrize(
    "change", [{"held_out": 3200}, {"synonym_share": -0.1}, {"train_questions": 40_000}, {"entities": 1}]
)
def test_settings_that_cannot_be_kept_are_named(change):
    with pytest.raises(UserError, match=next(iter(change))):
        replace(EncyclopediaSettings(seed=1), **change)
