"""The released checkpoints of REALM and ORQA: names and shapes of their variables, and where each goes."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from tiny import VOCABULARY, loud_params, tiny_realm
from weight_folders import assert_same_bits

from realm_jax.cli import main as cli
from realm_jax.cli import weights as job
from realm_jax.errors import UserError
from realm_jax.models import tf_checkpoints
from realm_jax.models.layers import BertConfig, Params
from realm_jax.models.networks import Realm
from realm_jax.models.reader import Reader
from realm_jax.models.weights import find, networks, read

TOWERS = ICT, TOWER, QUESTION = "module/", "module/module/", "module/module/module/"
BERT, READER = "", "reader/"
PREFIX = {scope: f"{scope}module/" for scope in TOWERS} | {BERT: "", READER: "reader/module/"}
BASE = Realm(BertConfig(30_522), reader=Reader(BertConfig(30_522)))


def variables(scope: str, model: Realm = BASE, word_head: bool = True) -> dict[str, tuple[int, ...]]:
    """Name → shape of every variable under a scope, as the published conversion code finds them."""
    c, prefix = model.bert, PREFIX[scope]
    width, hidden = c.width, c.feed_forward
    dense, norms = {"pooler/dense": (width, width)}, {"embeddings/LayerNorm": width}
    for number in range(c.layers):
        layer = f"encoder/layer_{number}"
        dense |= {f"{layer}/attention/self/{part}": (width, width) for part in ("query", "key", "value")}
        dense |= {f"{layer}/attention/output/dense": (width, width)}
        dense |= {f"{layer}/intermediate/dense": (width, hidden), f"{layer}/output/dense": (hidden, width)}
        norms |= {f"{layer}/attention/output/LayerNorm": width, f"{layer}/output/LayerNorm": width}
    dense = {f"{prefix}bert/{name}": shape for name, shape in dense.items()}
    norms = {f"{prefix}bert/{name}": size for name, size in norms.items()}
    tables = {"word": c.vocabulary_size, "position": c.max_length, "token_type": 2}
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}bert/embeddings/{name}_embeddings": (rows, width) for name, rows in tables.items()
    }
    if word_head:
        dense[f"{prefix}cls/predictions/transform/dense"] = (width, width)
        norms[f"{prefix}cls/predictions/transform/LayerNorm"] = width
        shapes[f"{prefix}cls/predictions/output_bias"] = (c.vocabulary_size,)
    if scope in TOWERS:
        dense[f"{scope}dense"], norms[f"{scope}LayerNorm"] = (width, model.projection), model.projection
    if scope == READER:
        size = model.reader.span_hidden
        dense |= {"reader/dense": (width, 2 * size), "reader/dense_1": (size, 1)}
        norms["reader/layer_normalization"] = size
    for name, shape in dense.items():
        shapes |= {f"{name}/kernel": shape, f"{name}/bias": shape[1:]}
    for name, size in norms.items():
        shapes |= {f"{name}/gamma": (size,), f"{name}/beta": (size,)}
    return shapes


def tensors_of(network: str, parts: int = 3) -> dict[str, tuple[int, ...]]:
    """Hugging Face's name → our shape of the first parts of a network of BERT-base."""
    listed = [tensor for part in networks(BASE)[network][:parts] for tensor in part.tensors]
    return {t.name if t.name.startswith(("cls.", "qa_")) else f"bert.{t.name}": t.shape for t in listed}


@pytest.mark.parametrize(
    "scope, network, ours, count",
    [
        *((scope, "embedder", tensors_of("query_embedder"), 203) for scope in TOWERS),
        (BERT, "reader", tensors_of("reader", 2), 204),
        (READER, "reader", tensors_of("reader"), 210),
    ],
)
def test_every_tensor_of_a_network_is_a_variable_of_its_shape(scope, network, ours, count):
    """Of BERT-base, whose shapes the released checkpoints have. A kernel is [input, output] there and here."""
    shapes = variables(scope)
    found = tf_checkpoints.map_variables(shapes, "checkpoint")
    assert set(found) == {network}
    assert {name: shapes[found[network][name]] for name in ours} == ours
    assert set(found[network]) - set(ours) <= {"bert.pooler.dense.weight", "bert.pooler.dense.bias"}
    assert len(found[network]) == count


@pytest.mark.parametrize(
    "name",
    [
        "global_step",
        "block_emb",
        "bert/embeddings/LayerNorm/beta/adam_m",
        "reader/dense/kernel/AdamWeightDecayOptimizer_1",
        "cls/seq_relationship/output_weights",
        "module/module/module/cls/predictions/output_bias",
    ],
)
def test_what_is_no_parameter_of_a_network_is_passed_over(name):
    assert tf_checkpoints.network_of(name) is None


def test_other_checkpoints_are_refused():
    names = variables(BERT)
    with pytest.raises(UserError, match="here: has module/lstm/kernel, which no released checkpoint has"):
        tf_checkpoints.map_variables([*names, "module/lstm/kernel"], "here")
    with pytest.raises(
        UserError, match="here: module/bert/a/kernel and module/module/bert/a/kernel are both bert.a.we"
    ):
        tf_checkpoints.map_variables([*names, "module/bert/a/kernel", "module/module/bert/a/kernel"], "here")
    with pytest.raises(UserError, match="here: has no bert.embeddings.word_embeddings.weight for its network; name"):
        tf_checkpoints.map_variables(["global_step"], "here")
    with pytest.raises(UserError, match="here: has no bert.embeddings.word_embeddings.weight for its embedder; name"):
        tf_checkpoints.map_variables([*names, "module/dense/kernel"], "here")


# ---- converting


MODEL = tiny_realm(max_length=12, heads=1)


def checkpoint(scope: str, seed: int, **options) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = variables(scope, MODEL, **options)
    arrays = {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    return arrays | {"global_step": np.int64(7)}


def vocabulary(folder) -> str:
    pieces = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]"]
    path = folder / "vocab.txt"
    path.write_text("".join(f"{piece}\n" for piece in [*pieces, *(f"w{n}" for n in range(VOCABULARY - 5))]))
    return str(path)


def read_back(folder, network: str, parts: int = 3) -> Params:
    return read(find(folder, MODEL.bert, networks(MODEL)[network][:parts]))


@pytest.fixture
def tensorflow(monkeypatch):
    """A stand-in that reads checkpoints from a dictionary, path → variables."""
    stored: dict[str, dict[str, np.ndarray]] = {}

    def load_checkpoint(path: str) -> SimpleNamespace:
        if path not in stored:
            raise ValueError(f"Couldn't find 'checkpoint' file or checkpoints in given directory {path}")
        shapes = {name: list(array.shape) for name, array in stored[path].items()}
        return SimpleNamespace(get_variable_to_shape_map=lambda: shapes, get_tensor=stored[path].__getitem__)

    fake = SimpleNamespace(
        train=SimpleNamespace(load_checkpoint=load_checkpoint), errors=SimpleNamespace(OpError=OSError)
    )
    monkeypatch.setitem(sys.modules, "tensorflow", fake)
    return stored


def test_pre_trained_modules_become_a_tower_and_a_reader(tensorflow, tmp_path):
    module = tmp_path / "embedder"
    (module / "variables").mkdir(parents=True)
    (module / "assets").mkdir()
    vocabulary(module / "assets")
    tensorflow[str(module / "variables" / "variables")] = tower = checkpoint(TOWER, 0)
    tensorflow["bert.ckpt"] = bert = checkpoint(BERT, 1)
    paths = (f"--embedder={module}", "--bert=bert.ckpt", f"--output={tmp_path / 'out'}")
    assert cli.main(["weights", "convert", *paths]) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["embedder", "reader"]
    found = read_back(tmp_path / "out" / "embedder", "query_embedder")
    np.testing.assert_array_equal(found["projection"]["kernel"], tower["module/module/dense/kernel"])
    np.testing.assert_array_equal(found["projection_norm"]["scale"], tower["module/module/LayerNorm/gamma"])
    words = tower["module/module/module/bert/embeddings/word_embeddings"]
    np.testing.assert_array_equal(found["bert"]["words"]["embedding"], words)
    found = read_back(tmp_path / "out" / "reader", "reader")
    np.testing.assert_array_equal(found["mlm_bias"], bert["cls/predictions/output_bias"])
    kernel = bert["bert/encoder/layer_1/intermediate/dense/kernel"]
    np.testing.assert_array_equal(found["bert"]["layer_1"]["intermediate"]["kernel"], kernel)
    assert "span_score" not in found


def test_a_tower_of_the_published_code_says_that_its_epsilon_is_another(tensorflow, tmp_path):
    renamed = {name.replace("LayerNorm/", "layer_normalization/") if "module/module/LayerNorm/" in name else name: array
               for name, array in checkpoint(TOWER, 0).items()}  # fmt: skip
    tensorflow["tower.ckpt"] = renamed
    vocabulary(tmp_path)
    job.convert({"embedder": "tower.ckpt"}, tmp_path / "out", str(tmp_path / "vocab.txt"))
    with pytest.raises(UserError, match="projection_layer_norm_eps is 0.001, but config.encoder.norm_epsilon is 1e-12"):
        read_back(tmp_path / "out" / "embedder", "query_embedder")


def test_a_fine_tuned_checkpoint_has_the_questions_tower_and_the_reader(tensorflow, tmp_path):
    tensorflow["model.ckpt-7"] = tuned = checkpoint(QUESTION, 0) | checkpoint(READER, 1)
    tensorflow["embedder"] = checkpoint(TOWER, 2)
    paths = {"finetuned": "model.ckpt-7", "embedder": "embedder"}
    job.convert(paths, tmp_path / "out", vocabulary(tmp_path))
    names = ["document_embedder", "query_embedder", "reader"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    found = read_back(tmp_path / "out" / "reader", "reader")
    np.testing.assert_array_equal(found["span_score"]["kernel"], tuned["reader/dense_1/kernel"])
    np.testing.assert_array_equal(found["span_norm"]["bias"], tuned["reader/layer_normalization/beta"])
    question = read_back(tmp_path / "out" / "query_embedder", "query_embedder")
    np.testing.assert_array_equal(question["projection"]["bias"], tuned["module/module/module/dense/bias"])


def test_converting_says_what_is_wrong_and_leaves_nothing(tensorflow, tmp_path):
    out, words = tmp_path / "out", vocabulary(tmp_path)
    tensorflow["bert.ckpt"] = checkpoint(BERT, 0)
    wrong = {
        "--embedder=bert.ckpt: has no embedder; it has reader": ({"embedder": "bert.ckpt"}, words),
        "nowhere: is not a readable TensorFlow checkpoint .*; name the prefix": ({"bert": "nowhere"}, words),
        "there is no bert.ckpt/assets/vocab.txt; name .* --vocab": ({"bert": "bert.ckpt"}, None),
        "--finetuned: has a reader already": ({"bert": "bert.ckpt", "finetuned": "bert.ckpt"}, words),
        "name a checkpoint with": ({}, words),
    }
    for says, (paths, vocab) in wrong.items():
        with pytest.raises(UserError, match=says):
            job.convert(paths, out, vocab)
    (tmp_path / "vocab.txt").write_text("[PAD]\n[CLS]\n[SEP]\n[MASK]\n[UNK]\nword\n")
    with pytest.raises(UserError, match=f"--vocab: has 6 word pieces, but reader has {VOCABULARY}"):
        job.convert({"bert": "bert.ckpt"}, out, words)
    assert [path.name for path in tmp_path.iterdir()] == ["vocab.txt"]


def test_without_tensorflow_one_line_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(
        UserError, match=r"model.ckpt: reading it needs TensorFlow; run `pip install -e '.\[tensorflow\]'`"
    ):
        job.convert({"bert": "model.ckpt"}, tmp_path / "out", vocabulary(tmp_path))


@pytest.mark.slow
def test_a_checkpoint_that_tensorflow_wrote_is_read_bit_for_bit(tmp_path):
    tf = pytest.importorskip("tensorflow")
    params = loud_params(MODEL, 0)["query_embedder"]
    arrays = checkpoint(TOWER, 0)
    arrays["module/module/dense/kernel"] = params["projection"]["kernel"]
    tf.raw_ops.SaveV2(
        prefix=str(tmp_path / "model.ckpt-1"),
        tensor_names=list(arrays),
        shape_and_slices=[""] * len(arrays),
        tensors=[tf.constant(array) for array in arrays.values()],
    )
    job.convert({"embedder": str(tmp_path / "model.ckpt-1")}, tmp_path / "out", vocabulary(tmp_path))
    found = read_back(tmp_path / "out" / "embedder", "query_embedder")
    assert_same_bits(found["projection"]["kernel"], params["projection"]["kernel"])
    np.testing.assert_array_equal(
        found["bert"]["positions"]["embedding"], arrays["module/module/module/bert/embeddings/position_embeddings"]
    )
