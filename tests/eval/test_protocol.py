"""The page of adaptation results: every number of its tables follows from the stored ranks."""

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from scripts import script

ROOT = Path(__file__).parents[2]
FOLDER, PAGE = ROOT / "docs" / "results" / "adaptation", ROOT / "docs" / "results" / "adaptation.md"


@pytest.fixture(scope="module")
def protocol() -> ModuleType:
    return script("benchmarks/protocol.py")


def test_tables_and_plot_of_the_page_follow_from_the_stored_ranks(protocol):
    """`benchmarks/protocol.py --page --plot` writes both."""
    results, page = protocol.Results(FOLDER), PAGE.read_text("utf-8")
    assert page.count("<!-- table: ") >= 4
    assert protocol.filled_page(page, results) == page
    names = [name for name in protocol.REPORTED if name in results.clusters]
    assert protocol.forest_plot(results, names, reach=0.1) == PAGE.with_suffix(".svg").read_text("utf-8")


def test_ranks_of_a_run_are_added_and_subsets_follow(protocol, tmp_path):
    """Other methods of the file stay, and a subset has the ranks and clusters of its members."""
    stored, output = tmp_path / "stored" / "corpus.npz", tmp_path / "run"
    stored.parent.mkdir()
    output.mkdir()
    earlier = {"all/other/0/vectors": np.array([9, 9, 9], np.uint8), "few/all/members": np.array([2, 0], np.uint16)}
    np.savez(stored, **earlier)
    np.savez(output / "start-0.npz", **{"all/clusters": np.arange(3), "all/vectors": np.array([1, 2, 3], np.uint8)})
    np.savez(output / "certain-1.npz", **{"all/vectors": np.array([4, 0, 1], np.uint8), "seconds": 2.5})
    protocol.add(stored, output)
    results = protocol.Results(stored.parent)
    assert results.seconds == {"certain": {"corpus": [2.5]}} and results.seeds("few", "certain", "vectors") == [1]
    assert results.seeds("all", "other", "vectors") == [0]
    np.testing.assert_array_equal(results.clusters["few"], [2, 0])
    np.testing.assert_allclose(results.ndcg("few", "certain", "vectors"), [1.0, 1 / np.log2(5)])


def test_ndcg_of_one_relevant_document(protocol):
    ranks = np.array([1, 2, 3, 10, 11, 0], np.uint8)
    wanted = [1.0, 1 / np.log2(3), 0.5, 1 / np.log2(11), 0.0, 0.0]
    np.testing.assert_allclose(protocol.ndcg(ranks), wanted)
    np.testing.assert_array_equal(protocol.ndcg(np.float32([0.25])), [0.25])


@pytest.mark.parametrize(("count", "size"), [(200, 5), (8, 125)])
def test_an_interval_treats_the_questions_of_a_cluster_as_one(protocol, count, size):
    """1,000 questions whose changes are the same within a cluster are as many as there are clusters."""
    rng = np.random.default_rng(0)
    by_cluster = rng.normal(0.05, 0.2, count)
    changes, clusters = by_cluster.repeat(size), np.arange(count).repeat(size)
    found = protocol.change(np.zeros(len(changes)), changes, clusters)
    error = by_cluster.std(ddof=1) / np.sqrt(count)
    assert found.value == pytest.approx(by_cluster.mean())
    assert (found.high - found.low) / 2 == pytest.approx(error * (1.96 if count > 20 else 2.365), rel=0.05)
    assert (found.p < 0.05) == (found.low > 0 or found.high < 0)
    naive = protocol.change(np.zeros(len(changes)), changes, np.arange(len(changes)))
    assert naive.high - naive.low < 0.6 * (found.high - found.low)


def test_no_change_is_not_significant(protocol):
    assert protocol.change(np.ones(50), np.ones(50), np.arange(50)) == (0.0, 0.0, 0.0, 1.0)


def test_holm_multiplies_by_what_is_left_and_never_falls(protocol):
    np.testing.assert_allclose(protocol.holm([0.04, 0.01, 0.03, 0.8]), [0.09, 0.04, 0.09, 0.8])
    assert protocol.holm([0.5, 0.9]) == [1.0, 1.0] and protocol.holm([]) == []
