"""What a run folder records of places on this machine."""

import pytest

from realm_jax.train.workdir import PLACES, with_absolute_paths


def recorded(key: str, value: str) -> str:
    """What is recorded of a config with one value."""
    section, _, name = key.rpartition(".")
    found = with_absolute_paths({section: {name: value}} if section else {name: value})
    return found[section][name] if section else found[name]


@pytest.mark.parametrize("key", PLACES)
def test_a_folder_that_is_yet_to_be_made_is_recorded_absolute(key, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert recorded(key, "runs/meeting") == str(tmp_path / "runs" / "meeting")


@pytest.mark.parametrize("value", ["", "gs://bucket/run", "hf:google-bert/bert-base-uncased@v2", "py:my_encoder"])
def test_what_lies_in_no_folder_is_recorded_as_it_is(value):
    assert recorded("refresh.shared", value) == recorded("init_from", value) == value


def test_a_file_with_a_colon_in_its_name_is_recorded_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hf:notes").mkdir()
    assert recorded("data.path", "hf:notes") == str(tmp_path / "hf:notes")
