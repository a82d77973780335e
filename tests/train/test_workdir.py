"""What a run folder records of places on this machine."""

from realm_jax.train.workdir import PATH_KEYS, with_absolute_paths


def recorded(key: str, value: str) -> str:
    """What is recorded of a config with one value."""
    section, _, name = key.rpartition(".")
    config = with_absolute_paths({section: {name: value}} if section else {name: value})
    return config[section][name] if section else config[name]


def test_a_folder_is_recorded_absolute_and_other_names_as_they_are(tmp_path, monkeypatch):
    """Also a folder that is yet to be made, and a file with a colon in its name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hf:notes").mkdir()
    for key in PATH_KEYS:
        for value in ("runs/meeting", "hf:notes"):
            assert recorded(key, value) == str(tmp_path / value)
        for value in ("", "gs://bucket/run", "hf:google-bert/bert-base-uncased@v2", "py:my_encoder"):
            assert recorded(key, value) == value
