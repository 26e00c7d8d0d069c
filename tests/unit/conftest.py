"""Fixtures of the tests of training."""

import pytest


@pytest.fixture
def interrupt(monkeypatch):
    """A function that makes the next run end as by a signal after some steps."""
    from equipoise.train import loop
    from equipoise.train.checkpoint import GracefulStop

    def after(steps):
        class Interrupted(GracefulStop):
            reads = 0

            @property
            def requested(self):
                self.reads += 1  # read once before the first step and once after each
                if self.reads > steps:
                    self.request("a test")
                return self.reason is not None

        monkeypatch.setattr(loop, "GracefulStop", Interrupted)

    def never():
        monkeypatch.setattr(loop, "GracefulStop", GracefulStop)

    after.never = never
    return after


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A finished run of six steps, evaluated at 4 and 6; not to be changed."""
    from equipoise.train.loop import train
    from tests.runs import COPY, recipe

    out = tmp_path_factory.mktemp("finished") / "run"
    return out, train(recipe(COPY), out)
