"""Small random encoders as public ones are stored: every architecture by its own library, and a BERT by our code.

`save_encoder` and `sentence_encoder` need `pip install '.[parity]'`.
"""

import functools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from tiny import loud_params
from tiny_run import tiny_config
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from weight_folders import edit_settings, save_network

from realm_jax.assemble import make_model, prompt_encoder
from realm_jax.cli.prepare import prepare
from realm_jax.config import INHERITED, Config, default
from realm_jax.data import layouts
from realm_jax.data.sources import open_sources
from realm_jax.data.tokenizer import Tokenizer
from realm_jax.data.tokenizer_files import TokenizerFile, tokenizer_file
from realm_jax.models.inputs import PassageBatch
from realm_jax.models.layers import Params
from realm_jax.models.networks import Realm
from realm_jax.models.weights import read
from realm_jax.train.init_from import fill_from_pretrained, find_source

QUERY, DOCUMENT, LONGEST = 24, 56, 126
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "initializer_range": 0.3,
}
TITLES = ["The harbor", "Tides", "", "Lighthouse keepers of Ålesund"]
BODIES = [
    "In winter the harbor is closed, and ships wait outside for the ice to break.",
    "The moon raises the water twice a day; sailors read tables to know when.",
    "Nobody knows who lit the first fire.",
    "Eleven keepers lived here, with their families, until the lamp became electric in 1953.",
]
QUESTIONS = ["When is the harbor closed?", "Why does the water rise", "Who lit it?", "How many keepers lived there?"]
TEXTS = *TITLES, *BODIES, *QUESTIONS, "query: passage: search_query: search_document: | text:"


def byte_pairs(special: tuple[str, ...], size: int, corpus: Sequence[str]) -> tokenizers.Tokenizer:
    """A byte-level BPE, as RoBERTa and ModernBERT have: a word after a space has other tokens than one at the start."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[*special], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(corpus, trainer)
    return made


def unigram(special: tuple[str, ...], size: int, corpus: Sequence[str]) -> tokenizers.Tokenizer:
    """A Unigram model, as XLM-R has: characters and words of the texts, and filler up to its size."""
    words = {f"▁{word}" for text in corpus for word in text.split()} | {"▁query", "▁passage"}
    pieces = [*special[:4], "▁", *sorted({*"".join(corpus)} - {" "}), *sorted(words)]
    pieces = [*dict.fromkeys(pieces)]
    pieces += [f"▁zq{number}" for number in range(size - len(pieces) - 1)]
    scored = [(piece, -5.0 - len(piece) / 99) for piece in pieces]
    made = tokenizers.Tokenizer(models.Unigram(scored, unk_id=3, byte_fallback=False))
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    made.decoder = decoders.Metaspace()
    made.add_special_tokens([*special])
    return made


def word_pieces(special: tuple[str, ...], size: int, corpus: Sequence[str]) -> tokenizers.Tokenizer:
    """WordPiece, as DistilBERT and MPNet have."""
    letters = sorted({*"".join(corpus).lower()} - {" "})
    words = sorted({word for text in corpus for word in re.findall(r"\w+", text.lower())} - {*letters})
    pieces = [*special, *letters, *(f"##{letter}" for letter in letters), *words]
    pieces += [f"zq{number}" for number in range(size - len(pieces))]
    ids = {piece: number for number, piece in enumerate(pieces)}
    made = tokenizers.Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.add_special_tokens([*special])
    return made


FAIRSEQ = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
BERT = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
KINDS: dict[str, tuple[str, Any, tuple[str, ...], int, dict[str, Any]]] = {
    # architecture → prefix of transformers' classes, tokenizer, special tokens, number of tokens, and other sizes
    "roberta": ("Roberta", byte_pairs, FAIRSEQ, 400, {"type_vocab_size": 1, "layer_norm_eps": 1e-5}),
    "xlm-roberta": ("XLMRoberta", unigram, FAIRSEQ, 300, {"type_vocab_size": 1, "layer_norm_eps": 1e-5}),
    "distilbert": ("DistilBert", word_pieces, BERT, 300, {"hidden_dim": 48}),
    "mpnet": ("MPNet", word_pieces, (*FAIRSEQ, *BERT), 320, {"layer_norm_eps": 1e-5}),
    "modernbert": ("ModernBert", byte_pairs, BERT, 400, {"local_attention": 16, "num_hidden_layers": 4}),
}


def save_encoder(
    folder: Path,
    kind: str,
    head: str = "Model",
    vocabulary: int | None = None,
    corpus: Sequence[str] = TEXTS,
    **sizes: Any,
) -> Any:
    """Save a random network and its tokenizer, and return the network of transformers.

    Args:
        folder: to write.
        kind: a key of KINDS.
        head: end of the class's name.
        vocabulary: number of tokens; None for the number in KINDS.
        corpus: texts whose words the tokenizer knows.
        sizes: further keys of the config.
    """
    import torch
    import transformers

    name, make, special, size, own = KINDS[kind]
    made = make(special, vocabulary or size, corpus)
    is_fairseq = special[0] == "<s>"
    cls, sep = ("<s>", "</s>") if is_fairseq else ("[CLS]", "[SEP]")
    ends = [(token, made.token_to_id(token)) for token in (cls, sep)]
    made.post_processor = processors.TemplateProcessing(f"{cls} $A {sep}", f"{cls} $A {sep} {sep} $B {sep}", ends)
    named = {
        "cls_token": cls,
        "sep_token": sep,
        "unk_token": special[3] if special == FAIRSEQ else "[UNK]",
    }
    named |= {f"{kind}_token": next(t for t in special if kind in t.lower()) for kind in ("pad", "mask")}
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=LONGEST, **named)
    fast.save_pretrained(folder)
    settings = {"vocab_size": made.get_vocab_size(), "pad_token_id": made.token_to_id(named["pad_token"])}
    settings |= SIZES | {"max_position_embeddings": LONGEST + 2} | own | sizes
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}{head}")(getattr(transformers, f"{name}Config")(**settings)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # a new network has biases of 0 and scales of 1
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder)
    return model


def sentence_encoder(folder: Path, kind: str, pooling: str = "mean", **options: Any) -> Any:
    """Save a model of sentence-transformers with a random network, and return it."""
    import sentence_transformers
    from sentence_transformers import models  # older versions have it only under this name

    save_encoder(folder / "network", kind, **options.pop("sizes", {}))
    modules = [models.Transformer(str(folder / "network")), models.Pooling(32, pooling_mode=pooling)]
    made = sentence_transformers.SentenceTransformer(
        modules=[*modules, *options.pop("modules", [models.Normalize()])], device="cpu", **options
    )
    made.save(str(folder / "model"))
    return made


def save_sentence_bert(documents: Path) -> Path:
    """Save a BERT with the words of some documents as a model of sentence-transformers, in their folder."""
    prepare(documents, documents.parent / "vocabulary", vocabulary_size=600, limit=64, workers=1)
    tokenizer = open_sources(documents.parent / "vocabulary").tokenizer
    config = tiny_config(documents.parent / "vocabulary")
    config.data.update(query_length=33, document_length=64)
    model = make_model(config, tokenizer.size)
    folder = save_network(documents.parent / "encoder", model, "reader", loud_params(model, 0), parts=1)
    tokenizer.save(folder)
    edit_settings(folder, retriever_proj_size=None, projection_layer_norm_eps=None)
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for kind, path in kinds.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 16, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def folder_tokenizer(folder: Path) -> Tokenizer:
    path = tokenizer_file(folder)
    assert path is not None
    return TokenizerFile.of(path).read()


def config_of(folder: Path, **changes: Any) -> Config:
    """The default config, whose inherited keys come from a folder. changes: dotted keys."""
    config = default()
    config.init_from, config.tasks = str(folder), "ict"
    config.data.update(path="-", query_length=QUERY, document_length=DOCUMENT)
    config.update_from_flattened_dict(INHERITED | changes)
    return fill_from_pretrained(config)


@functools.lru_cache(maxsize=4)
def _shapes(model: Realm) -> Any:
    return jax.eval_shape(model.init, jax.random.key(0))


def load(config: Config, tokenizer: Tokenizer) -> tuple[Realm, Params]:
    """The encoders of the model in `init_from`, as a run loads them, and a reader of zeros."""
    model = make_model(config, tokenizer.size, prompt_encoder(tokenizer))
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), _shapes(model))
    files = find_source(config.init_from).files(model, tokenizer)
    return model, {name: zeros[name] | read(files[name]) if name in files else zeros[name] for name in zeros}


def query_vectors(model: Realm, params: Params, tokenizer: Tokenizer, queries: list[str]) -> np.ndarray:
    is_prompted = bool(model.query_template and model.query_template.before)
    encodings = tokenizer.placed(behind_space=is_prompted).encode_batch(queries)
    rows = [layouts.query(encoding.ids, QUERY, tokenizer.special) for encoding in encodings]
    ids, lengths = np.stack([row.ids for row in rows]), np.array([row.used for row in rows])
    return np.asarray(jax.jit(model.query_vectors)(params, ids, lengths))


def passage_vectors(model: Realm, params: Params, tokenizer: Tokenizer) -> np.ndarray:
    """Vectors of TITLES with BODIES."""
    of_passages = tokenizer.placed(behind_space=True)
    pieces = [*zip(encoded(of_passages, TITLES), encoded(of_passages, BODIES), strict=True)]
    rows = [layouts.document(title, body, DOCUMENT, tokenizer.special) for title, body in pieces]
    ids, lengths = np.stack([row.ids for row in rows]), np.array([row.used for row in rows])
    passages = PassageBatch(*map(jnp.asarray, (ids, lengths, np.array([len(title) for title, _ in pieces]))))
    return np.asarray(jax.jit(model.embed_documents)(params, passages))


def passage_texts(config: Config, prompt: str = "") -> list[str]:
    """The texts whose vectors by sentence-transformers, after its prompt, are those of TITLES with BODIES."""
    template = config.encoder.passage_prompt.removeprefix(prompt)
    before = template.partition("{")[0]
    return [before + f"{title} {body}".strip() for title, body in zip(TITLES, BODIES, strict=True)]


def encoded(tokenizer: Tokenizer, texts: list[str]) -> Iterator[list[int]]:
    return (encoding.ids for encoding in tokenizer.encode_batch(texts))
