"""Where tests of experiments keep runs and what is made of them."""

import pytest

from torchpact_recipes.experiments import Archive


@pytest.fixture
def archive(tmp_path):
    return Archive(tmp_path / "results", tmp_path / "work")
