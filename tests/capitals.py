"""Three capitals and three questions about them, for tests of `realm prepare` and of what reads its folders."""

import bz2
import gzip
import hashlib
import json
import lzma
from pathlib import Path

TEXTS = {
    "paris": "Paris is the capital of France. The city has grown since 1850 along the river Seine.",
    "rome": "Rome is the capital of Italy. The city was founded in 753 BC on the river Tiber.",
    "oslo": "Oslo is the capital of Norway. The city burned in 1624 and was built again.",
}
QUESTIONS = [
    {"question": "what is the capital of france", "answers": ["Paris"], "gold_passage_id": "paris", "split": "train"},
    {
        "question": "when did oslo burn",
        "answers": ["1624", "in the year 1624"],
        "gold_passage_id": "oslo",
        "split": "dev",
    },
    {"question": "where is rome", "answers": ["on the river Tiber in Italy"], "split": "train", "source": "squad"},
]


def write(path: Path, content: bytes | str) -> Path:
    """Write a file and its folders, packed if its name says so."""
    content = content.encode("utf-8") if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    packed = {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}.get(path.suffix, bytes)
    path.write_bytes(packed(content))
    return path


def write_lines(path: Path, records: list[dict]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
