"""Keys that are declared once: the config, what is refused, what may change on resume, and the text that lists them."""

from dataclasses import dataclass

import pytest
from ml_collections import ConfigDict

from realm_jax.errors import UserError
from realm_jax.schema import POSITIVE, check_values, help_text, inherited, key, one_of, science, to_config_dict


@dataclass(frozen=True)
class Top:
    """What there is at the top."""

    name: str = key("first", "of the run")


@dataclass(frozen=True)
class Net:
    """One of two networks."""

    width: int = key(64, "size of a hidden state", POSITIVE, inherit=0)
    rate: float = key(0.5, "of learning", POSITIVE)
    remat: str = key("none", "what is computed again", one_of("none", "all"), operations=True)


SECTIONS = {"": Top(), "one": Net(), "two": Net(width=32)}


def config(changes: dict[str, object] | None = None) -> ConfigDict:
    made = to_config_dict(SECTIONS)
    made.update_from_flattened_dict(changes or {})
    return made


def test_sections_of_one_type_have_defaults_of_their_own():
    net = {"rate": 0.5, "remat": "none"}
    assert config().to_dict() == {"name": "first", "one": net | {"width": 64}, "two": net | {"width": 32}}


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("one.width", -1, "must be positive, not -1"),
        ("two.rate", float("inf"), "must be a finite number"),
        ("two.remat", "some", "must be one of 'none', 'all', not 'some'"),
    ],
)
def test_a_value_beyond_its_limit_is_named(key, value, message):
    with pytest.raises(UserError) as fault:
        check_values(config({key: value}), SECTIONS)
    assert str(fault.value) == f"config.{key}: {message}"


def test_a_value_that_a_model_is_to_give_is_not_looked_at():
    assert inherited(SECTIONS) == {"one.width": 0, "two.width": 0}
    check_values(config({"one.width": 0}), SECTIONS, skip=["one.width"])


def test_science_is_what_may_not_change():
    assert science(config({"one.remat": "all"}), SECTIONS) == science(config(), SECTIONS)
    assert science(config({"one.width": 8}), SECTIONS) != science(config(), SECTIONS)


def test_the_text_of_all_keys():
    assert help_text(SECTIONS) == (
        "### At the top\n\nWhat there is at the top.\n\n* `name` (`'first'`): of the run\n\n"
        "### `one`, `two`\n\nOne of two networks.\n\n"
        "* `<section>.width` (`64`, `32`; positive; `0`: as the model of `init_from`): size of a hidden state\n"
        "* `<section>.rate` (`0.5`; positive): of learning\n"
        "* `<section>.remat` (`'none'`; one of 'none', 'all'; operations): what is computed again\n"
    )
