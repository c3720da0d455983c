"""Engines that do what a test says."""

from torchpact.engines import Engine, NetworkRunner
from torchpact.engines.registry import ENGINES
from torchpact.specs import BlockSpec, NetworkSpec


class ConvEngine(Engine):
    """The dense engine by another name, or one that refuses."""

    name = "fake"

    def __init__(self, name, reason=None):
        self.name, self.reason, self.inner = name, reason, ENGINES["dense"]  # type: ignore[misc]

    def supports(self, spec, example):
        return self.reason if isinstance(spec, BlockSpec) else "for blocks only"

    def build(self, spec, example):
        return self.inner.build(spec, example)


class NetworkEngine(Engine):
    """Runs networks as a whole, by a function of the images."""

    name, whole = "fake", True

    def __init__(self, name, run, tune=None, see=None):
        self.name, self.run, self.tuned, self.see = name, run, tune, see  # type: ignore[misc]

    def concerns(self, spec):
        return isinstance(spec, NetworkSpec)

    def supports(self, spec, example):
        return None if isinstance(spec, NetworkSpec) else f"{self.name}: for networks only"

    def build(self, spec, example):
        if self.see is not None:
            self.see(spec)
        engine = self

        class Run(NetworkRunner):
            def __call__(self, images, bounds=None):
                return engine.run(images)

            def tune(self, images):
                if engine.tuned is not None:
                    engine.tuned(images)

        return Run()
