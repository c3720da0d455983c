"""Fig. 6 from weights of runs that were made up."""

import json
from dataclasses import replace

import pytest

from tests.viz.networks import write_checkpoint
from torchpact_recipes.experiments import EXPERIMENTS, SCALES, fig5_resnet110, fig6

SMOKE = SCALES["smoke"]


def finish(archive, run):
    files = archive.files(run)
    write_checkpoint(files.last, run.config)
    files.run.write_text(json.dumps({"status": "finished", "config": run.config.to_dict()}))


@pytest.mark.parametrize("scale", ["smoke", "fast", "paper"])
def test_its_networks_are_two_of_those_of_fig5(scale):
    runs = EXPERIMENTS["fig6"].runs(SCALES[scale], [0, 1])
    assert [run.config.method for run in runs] == ["act", "relaxed"]
    assert {run.name for run in runs} <= {run.name for run in fig5_resnet110.runs(SCALES[scale], [0])}
    if scale != "smoke":
        assert all(run.name.startswith("resnet110-") and "tau0.005-seed0" in run.name for run in runs)


def test_it_has_three_rows_and_ten(archive, tmp_path):
    runs = fig6.runs(SMOKE, [0])
    for run in runs:
        finish(archive, run)
    paths = fig6.draw(archive, SMOKE, [0], tmp_path / "figures")
    names = [f"{name}.{kind}" for name in ("fig6", "fig6-extended") for kind in ("png", "pdf", "json")]
    assert [path.name for path in paths] == names
    short, long = (json.loads((tmp_path / "figures" / f"{n}.json").read_text()) for n in fig6.ROWS)
    assert (len(short["images"]), len(long["images"])) == (6, 20)
    assert long["images"][:6] == short["images"]
    assert [one["run"] for one in long["networks"]] == [run.name for run in runs]
    assert [one["quantity"] for one in long["networks"]] == ["ponder cost", "expected units"]
    blocks = long["networks"][1]["blocks"]
    assert len(blocks) == 20
    assert all(1 <= mean <= 3 for image in blocks for mean in image)


def test_it_says_whose_weights_are_missing(archive, tmp_path):
    sact, psact = fig6.runs(SMOKE, [0])
    finish(archive, sact)
    with pytest.raises(ValueError, match=f"^expected the weights of {psact.name} in .*, got none$"):
        fig6.draw(archive, SMOKE, [0], tmp_path / "figures")
    assert not (tmp_path / "figures").exists()


def test_the_zoo_has_its_networks(archive):
    """So that it can be drawn without training anything."""
    runs = fig6.runs(SCALES["fast"], [0])
    found = [archive.pretrained(run) for run in runs]
    assert [path.stem for path in found if path] == ["resnet110-sact-tau0.005", "resnet110-tau0.005"]
    finish(archive, runs[0])
    assert archive.pretrained(runs[0]) == archive.files(runs[0]).last
    other = replace(runs[1], config=replace(runs[1].config, seed=7))
    assert archive.pretrained(other) is None
