"""The table of claims."""

import json

from tests.experiments.judging import SCALE, SEEDS, all_modes, write, write_fig5, write_fig6
from tests.experiments.synthetic import evaluation
from tests.experiments.synthetic import write as write_events
from torchpact_recipes.experiments import claims, fig3, fig4, variants


def test_without_runs_nothing_is_judged_but_what_is_exact(archive, tmp_path):
    found = claims.findings(archive, SCALE, SEEDS)
    assert {f.verdict for f in found[1:]} == {"not measured yet"}
    assert found[0].verdict == "holds"
    table, numbers = claims.draw(archive, SCALE, SEEDS, tmp_path / "figures")
    assert len(json.loads(numbers.read_text())) == len(found) == len(table.read_text().splitlines()) - 2


def test_every_row_says_of_how_many_seeds_it_is(archive):
    write_fig5(archive, lambda run: all_modes((0.9 + 0.01 * run.config.seed, 1e8 - 4e8 * run.config.tau)))
    variance = dict.fromkeys(("latents", "halting", "total"), 1.0)
    labelled = (
        variants.temperatures(SCALE, SEEDS) + variants.heads(SCALE, SEEDS) + variants.heads(SCALE, SEEDS, 110)
    )
    for run in [*fig3.runs(SCALE, SEEDS), *(run for _, run in labelled)]:
        write(archive, run, all_modes((0.9, 1e8 - 4e8 * run.config.tau)))
    for run in fig4.runs(SCALE, SEEDS):
        known = evaluation(90, 100) | {"undecided": [0.1, 0.1, 0.1]}
        write_events(archive, run, {1000: {"modes": {"discrete": known}, "gradient_variance": variance}})
    write_fig6(archive, 0.6, 0.6)
    exact, *rows = claims.findings(archive, SCALE, SEEDS)
    assert exact.measured.endswith("exact, without a seed")
    for row in rows:
        assert row.verdict != "not measured yet", row.claim
        if row.where == "fig. 6":
            assert row.measured.endswith("400 images, 1 seed")
        else:
            assert "2 seeds" in row.measured, row.claim
            assert "±" in row.measured, row.claim
