import sys
from types import SimpleNamespace

import pytest

from tests.training.small import burst, config, images
from torchpact_recipes.training import Trainer
from torchpact_recipes.training.run_files import Event

TRAIN, TEST = images(), images("test", 40)
BLOCKS = [f"train/expected_steps/block{k}" for k in (1, 2, 3)]
LEARNING = ["train/loss", "train/nll", "train/accuracy", "train/images_per_second"]


def trainer(folder, method="act", **options):
    return Trainer(config(method), folder, TRAIN, TEST, tensorboard=True, **options)


class FakeWriter:
    """Keeps what it is told, as (name, value, iteration)."""

    made: "list[FakeWriter]"

    def __init__(self, log_dir, purge_step=None):
        self.folder, self.purge_step = log_dir, purge_step
        self.scalars: list[tuple[str, float, int]] = []
        self.flushed, self.closed = 0, False
        self.made.append(self)

    def add_scalar(self, tag, scalar_value, global_step):
        assert not self.closed
        self.scalars.append((tag, scalar_value, global_step))

    def flush(self):
        self.flushed = len(self.scalars)

    def close(self):
        self.closed = True


@pytest.fixture
def writers(monkeypatch):
    FakeWriter.made = []
    module = SimpleNamespace(SummaryWriter=FakeWriter)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    return FakeWriter.made


def test_the_history_is_written_for_tensorboard(tmp_path, writers):
    events: list[Event] = []
    trainer(tmp_path, report=events.append).run()
    (writer,) = writers
    assert writer.folder == str(tmp_path / "tensorboard")
    assert writer.closed
    assert writer.flushed == len(writer.scalars)
    written = {(name, iteration): value for name, value, iteration in writer.scalars}
    assert len(written) == len(writer.scalars)
    modes = [
        f"validate/{mode}/{name}" for mode in ("act", "thresholded") for name in ("accuracy", "nll", "mflops")
    ]
    assert set(written) == {(name, i) for i in (4, 8, 12) for name in LEARNING + BLOCKS} | {
        (name, i) for i in (6, 12) for name in modes
    }
    last_train, last_validate = events[-2:]
    assert written["train/loss", 12] == last_train["loss"]
    assert written["train/expected_steps/block2", 12] == last_train["expected_steps"][1]
    assert written["validate/act/mflops", 12] * 1e6 == pytest.approx(last_validate["modes"]["act"]["flops"])


def test_a_plain_network_has_no_steps_to_show(tmp_path, writers):
    trainer(tmp_path, "plain").run()
    names = {name for name, _, _ in writers[0].scalars}
    assert names == {*LEARNING, "validate/plain/accuracy", "validate/plain/nll", "validate/plain/mflops"}


def test_resuming_hides_what_was_written_after_the_checkpoint(tmp_path, writers):
    first = trainer(tmp_path)
    burst(first)  # iteration 3: a checkpoint
    burst(first)  # iteration 4: logged, but not saved
    trainer(tmp_path, resume=True).run()
    assert [writer.purge_step for writer in writers] == [1, 4]
    assert {i for _, _, i in writers[0].scalars} == {4}
    assert {i for _, _, i in writers[1].scalars} == {4, 6, 8, 12}


def test_unasked_nothing_is_written(tmp_path, writers):
    Trainer(config("plain"), tmp_path, TRAIN, TEST).run()
    assert writers == []


def test_without_the_package_one_line_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match="expected the package tensorboard to be installed") as error:
        trainer(tmp_path / "run")
    assert str(error.value).endswith('(from a clone: pip install "./src/torchpact_recipes[train]")')
    assert not (tmp_path / "run").exists()


def test_tensorboard_reads_what_was_written(tmp_path):
    pytest.importorskip("tensorboard")
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    results = trainer(tmp_path).run()
    read = reader.EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [e.step for e in read.Scalars("train/loss")] == [4, 8, 12]
    nll = read.Scalars("validate/act/nll")
    assert [e.step for e in nll] == [6, 12]
    assert nll[-1].value == pytest.approx(results["act"]["nll"], rel=1e-6)
