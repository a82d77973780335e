"""The output folder of `realm prepare` while it is being written: its owner, partial output, and completion.

Everything is written into a hidden folder beside the output, which takes the output's name at the very end; in a
bucket PREPARED.json comes last instead. Interrupted output is never taken for complete, and is resumed when the command
is run again.
"""

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from realm_jax.data.sources import FORMAT_VERSION
from realm_jax.data.staging import PREPARED
from realm_jax.data.store import MANIFEST as STORE
from realm_jax.errors import Resumable, UserError, full_disk
from realm_jax.storage import Folder, StorageError, exclusive_lock, open_folder, publish_folder

logger = logging.getLogger(__name__)

TOKENIZER = "tokenizer"
ARTICLES = "articles"  # while the work is not done
INPUTS, CLAIM = "INPUTS.json", "CLAIM.json"  # in it: what is prepared, and by which command
PARTIAL_ENTRIES = (ARTICLES, TOKENIZER, "passages", "pretraining", "questions")  # what an interrupted command may leave


class PreparedOtherwise(UserError):
    """A folder is prepared, from other inputs or with other settings."""


def is_prepared(output: str, inputs: dict[str, Any], skip_damage: bool) -> bool:
    """Whether `output` is already what would be made. Raises UserError when it is anything else."""
    folder = open_folder(output)
    names = folder.names()
    if not (names or os.path.lexists(output)):
        return False
    advice = "choose another --output or remove the folder"
    if PREPARED not in names:
        if "://" in output and INPUTS in folder.names(ARTICLES):
            return False  # begun, and not done
        raise UserError(f"{output} exists and is not a prepared folder; {advice}")
    manifest = folder.read_json(PREPARED)
    if not isinstance(manifest.get("inputs"), dict):
        raise UserError(f"{output}/{PREPARED} is damaged; {advice}")
    if manifest.get("format_version") != FORMAT_VERSION:
        raise UserError(f"{output} was prepared by another version of this program; {advice}")
    if "tagged" in manifest:
        raise UserError(f"{output} has the spans of a tagger that this version cannot run; {advice}")
    if manifest.get("inputs") != inputs:
        changed = [name for name, value in inputs.items() if manifest["inputs"].get(name) != value]
        raise PreparedOtherwise(f"{output} was prepared with other {' and '.join(changed)}; {advice}")
    lost = sum(sum(counts["damaged"].values()) for counts in manifest["counts"].values())
    if lost and not skip_damage:
        raise UserError(
            f"{output} was prepared with --skip-damage, which found damage in {lost} places; give the flag again to "
            "keep it as it is, or remove the folder"
        )
    for store in ("passages", "pretraining") if manifest.get("pretraining") else ("passages",):
        if STORE not in folder.names(store):
            raise UserError(f"{output} is damaged (no {store}/{STORE}); remove the folder")
    return True


@contextmanager
def staged_output(output: str, inputs: dict[str, Any], anywhere: bool, claim: str) -> Iterator[str]:
    """Where to work: a hidden folder beside `output`, which takes its name at the end, or the bucket itself.

    Partial output of the same inputs is resumed. After a UserError nothing stays, unless it can be resumed.
    """
    if "://" in output:
        if not anywhere:
            raise UserError(f"--output={output}: processes of this machine write to its disk; give --beam, or a path")
        _resume_or_reset(open_folder(output), inputs, claim)
        yield output
        open_folder(output).remove(ARTICLES)
        return
    final = Path(output)
    root = final.absolute().parent / f".{final.name}.partial"
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise UserError(f"cannot write into {root.parent} ({fault.strerror}); choose another --output") from None
    with exclusive_lock(root):
        _resume_or_reset(open_folder(root), inputs, claim)
        try:
            yield str(root)
        except (Resumable, StorageError):
            raise
        except UserError:
            shutil.rmtree(root, ignore_errors=True)
            raise
        except OSError as fault:
            if not (full := full_disk(fault)):
                raise
            place = Path(fault.filename or root).parent
            raise UserError(f"{place}: {full}; make room there, then run the command again to resume") from fault
        done = root.with_name(f".{final.name}.articles")
        shutil.rmtree(done, ignore_errors=True)
        (root / ARTICLES).rename(done)
        (root / ".lock").unlink()
        publish_folder(root, final)
        shutil.rmtree(done, ignore_errors=True)


def _resume_or_reset(folder: Folder, inputs: dict[str, Any], claim: str) -> None:
    """Resume what an earlier command with the same inputs left; remove partial output of other inputs."""
    record, found = f"{ARTICLES}/{INPUTS}", None
    if INPUTS in folder.names(ARTICLES):
        with suppress(UserError):
            found = folder.read_json(record)
    if found == inputs:
        logger.info("%s: resuming", folder.url)
    else:
        begun = sorted({*folder.names()} & {*PARTIAL_ENTRIES})
        if begun:
            logger.warning("%s: removing partial output of other inputs: %s", folder.url, ", ".join(begun))
        for name in begun:
            folder.remove(name)
        folder.write_json(record, inputs)
    folder.write_json(f"{ARTICLES}/{CLAIM}", {"command": claim})


def check_owner(root: str, claim: str) -> None:
    """Raise UserError if another command has taken over the folder: a bucket has no locks."""
    folder = open_folder(root)
    if CLAIM not in folder.names(ARTICLES) or folder.read_json(f"{ARTICLES}/{CLAIM}") != {"command": claim}:
        raise UserError(f"{root}: another command is writing there; wait for it, or stop it and repeat this one")
