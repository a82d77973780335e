"""Keys that are declared once: the config, what is refused, what may change on resume, and the text that lists them."""

from dataclasses import dataclass

import pytest
from ml_collections import ConfigDict

from realm_jax.errors import UserError
from realm_jax.schema import POSITIVE, check_values, help_text, inherited, key, keys, one_of, science, to_config_dict


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


def config(**changes: object) -> ConfigDict:
    made = to_config_dict(SECTIONS)
    made.update_from_flattened_dict({name.replace("__", "."): value for name, value in changes.items()})
    return made


def test_sections_of_one_type_have_defaults_of_their_own():
    net = {"rate": 0.5, "remat": "none"}
    assert config().to_dict() == {"name": "first", "one": net | {"width": 64}, "two": net | {"width": 32}}
    assert keys(SECTIONS)["two.width"].default == 32


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"one__width": -1}, "config.one.width: must be positive, not -1"),
        ({"two__rate": float("inf")}, "config.two.rate: must be a finite number"),
        ({"two__remat": "some"}, "config.two.remat: must be one of 'none', 'all', not 'some'"),
    ],
)
def test_a_value_beyond_its_limit_is_named(changes, message):
    with pytest.raises(UserError) as fault:
        check_values(config(**changes), SECTIONS)
    assert str(fault.value) == message


def test_a_value_that_a_model_is_to_say_is_not_looked_at():
    assert inherited(SECTIONS) == {"one.width": 0, "two.width": 0}
    check_values(config(one__width=0), SECTIONS, skip=["one.width"])


def test_science_is_what_may_not_change():
    assert science(config(one__remat="all"), SECTIONS) == science(config(), SECTIONS)
    assert science(config(one__width=8), SECTIONS) != science(config(), SECTIONS)


def test_the_text_of_all_keys():
    assert help_text(SECTIONS) == (
        "### At the top\n\nWhat there is at the top.\n\n* `name` (`'first'`): of the run\n\n"
        "### `one`, `two`\n\nOne of two networks.\n\n"
        "* `<section>.width` (`64`, `32`; positive; `0`: as the model of `init_from`): size of a hidden state\n"
        "* `<section>.rate` (`0.5`; positive): of learning\n"
        "* `<section>.remat` (`'none'`; one of 'none', 'all'; operations): what is computed again\n"
    )
