"""Metrics on disk: JSON lines always, TensorBoard files beside them. Read next: `journal.py`, which writes them.

A resumed run cuts its records back to the step it goes on from, so that a file never tells of a step twice.
"""

import json
from pathlib import Path
from typing import IO, Any

from realm_jax.processes import is_process_0
from realm_jax.storage import write_atomic


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All whole records of a JSON-lines file; [] when there is none. A last line that was cut off is left out."""
    if not path.is_file():
        return []
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


class MetricsWriter:
    """Appends records {"step": …, name: value, …} to `folder/name.jsonl` and, for numbers, to TensorBoard files.

    Of several processes the first one writes.
    """

    def __init__(self, folder: Path, name: str, last: int):
        """`last`: records of later steps are removed; those that stay are `kept`."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.jsonl"
        self.kept = [record for record in read_lines(path) if record["step"] <= last]
        self._stream: IO[str] | None = None
        if not is_process_0():
            return
        write_atomic(path, "".join(json.dumps(record) + "\n" for record in self.kept))
        self._stream = path.open("a")
        from tensorboardX import SummaryWriter  # here, since it imports torch where that is installed: seconds

        self._board = SummaryWriter(str(folder / "tensorboard" / name), purge_step=last + 1)

    def write(self, step: int, values: dict[str, Any]) -> None:
        """One record, flushed, so that a killed run keeps it."""
        if self._stream is None:
            return
        self._stream.write(json.dumps({"step": step} | values) + "\n")
        self._stream.flush()
        for name, value in values.items():
            if isinstance(value, int | float):
                self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Close the files; nothing can be written afterwards."""
        if self._stream is not None:
            self._stream.close()
            self._board.close()
