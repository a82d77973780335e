"""Table 2 of the paper on the synthetic encyclopedia, and more rows of its kind, three seeds of each.

    realm ablate --config=ablations --workdir=runs/ablations

`table` names the rows that are shown, in order; others are only started from. A row is `title`; `tasks`; `start`, the
row whose parameters it begins with ("" for the start of the base); `reader`, the row that its reader is from instead;
`changes` of the base, as on the command line; `paper`, exact match and recall@5 there, or nothing. Add one of your own:

    config = recipes.ablations()
    config.rows.wider = dict(
        title="32 candidates", tasks="realm,qa", start="start", reader="", paper=(),
        changes=("realm.candidates=32",),
    )
    config.table = (*config.table, "wider")

`encyclopedia` holds settings of `realm_jax/data/encyclopedia.py`, and nothing where `base.data.path` names a prepared
folder. `seeds` are those of training; the encyclopedia is the same for all. Hardware: two CPU cores. What came of it,
and the time: `docs/results/ablations.md`.
"""

from ml_collections import ConfigDict

from realm_jax import recipes


def get_config() -> ConfigDict:
    return recipes.ablations()
