"""Seconds of a question in a warm service: no rerank, token rerank with stored vectors, and with encoded passages.

    realm index DOCUMENTS --from=MODEL --output=RUN --store-tokens
    python benchmarks/token_rerank_seconds.py RUN QUESTIONS.jsonl

The modes alternate from question to question, so that other load on the machine slows them alike. It also prints how
many of the first ten passages both kinds of token vectors have in common, and how often they agree on the first one.
"""

import argparse
import dataclasses
import time
from pathlib import Path

import numpy as np

from realm_jax.data.questions import read_questions
from realm_jax.serving.service import Service
from realm_jax.train.trained_run import encoder_params

TOP = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="directory of an index with token vectors")
    parser.add_argument("questions", help="file of questions")
    parser.add_argument("--count", type=int, default=30, help="questions to ask (default: 30)")
    args = parser.parse_args()
    texts = [question.question for question in read_questions(args.questions, need_right=False)[: args.count + 1]]

    services = {
        name: Service(args.run, {"rerank": rerank}, 1) for name, rerank in (("none", "none"), ("stored", "tokens"))
    }
    services["encoded"] = Service(args.run, {"rerank": "tokens"}, 1)
    model = services["encoded"].model
    assert model.trained.index.tokens is not None, "the index has no token vectors"
    params = {**model.trained.params, **encoder_params(model.trained)}
    index = model.trained.index._replace(tokens=None)
    model.trained = dataclasses.replace(model.trained, params=params, index=index)

    seconds: dict[str, list[float]] = {name: [] for name in services}
    found: dict[str, list[list[tuple[str, int]]]] = {name: [] for name in services}
    for text in texts:  # the first question compiles and is not counted
        for name, service in services.items():
            began = time.perf_counter()
            (reply,) = service.work("search", [text])
            seconds[name].append(time.perf_counter() - began)
            found[name].append([(passage["id"], passage["part"]) for passage in reply["candidates"][:TOP]])
    for name, times in seconds.items():
        low, median, high = np.quantile(times[1:], [0.1, 0.5, 0.9])
        print(
            f"{name:8} median {median:.3f} s per question, 10 % to 90 %: {low:.3f} to {high:.3f} s, n={len(times) - 1}"
        )
    pairs = [*zip(found["stored"], found["encoded"], strict=True)]
    shared = np.mean([len({*stored} & {*encoded}) for stored, encoded in pairs])
    same_first = np.mean([stored[:1] == encoded[:1] for stored, encoded in pairs])
    print(f"stored and encoded: {shared:.1f} of {TOP} passages in common, the same first passage for {same_first:.0%}")


if __name__ == "__main__":
    main()
