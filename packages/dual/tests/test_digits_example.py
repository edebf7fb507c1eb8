# SPDX-License-Identifier: Apache-2.0
"""Digits from few labels: the parts of the data, the auxiliary model's density, and one short comparison."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLE = Path(__file__).parents[3] / "examples" / "dual_digits"

if not EXAMPLE.is_dir():
    pytest.skip("the examples are not beside the package", allow_module_level=True)
pytest.importorskip("sklearn", reason="the digits come from scikit-learn")


@pytest.fixture(scope="module")
def program() -> Iterator[ModuleType]:
    """train.py as a module; the modules beside it go out of sight again."""
    spec = importlib.util.spec_from_file_location("dual_digits_train", EXAMPLE / "train.py")
    assert spec is not None and spec.loader is not None
    train = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLE))
        for name in ("data", "model"):
            patch.delitem(sys.modules, name, raising=False)
        spec.loader.exec_module(train)
        yield train
        for name in ("data", "model"):
            sys.modules.pop(name, None)


def test_the_parts_share_no_picture(program: ModuleType) -> None:
    digits = program.load(5, seed=3)
    assert digits.y.bincount().tolist() == [5] * 10
    assert (len(digits.x), len(digits.test_x)) == (50, 500)
    assert len(digits.x) + len(digits.unlabelled) + len(digits.test_x) == 1797
    known = {tuple(row) for row in digits.x.tolist()}
    assert known.isdisjoint(map(tuple, digits.test_x.tolist()))
    assert known.isdisjoint(map(tuple, digits.unlabelled.tolist()))
    assert not program.load(5, seed=4).test_x.equal(digits.test_x)


def test_the_auxiliary_models_density_and_samples_are_of_one_distribution(program: ModuleType) -> None:
    look = program.Look()
    digit = torch.tensor([4])
    covariance = (look.together @ look.together.T + torch.diag((look.alone.exp() + 0.2) ** 2)).detach()
    whole = torch.distributions.MultivariateNormal(look.mean[4].detach(), covariance)
    pictures = look.sample(digit, 4000, generator=torch.Generator().manual_seed(0))[0]
    found = look.log_prob(pictures, digit.expand(4000))
    torch.testing.assert_close(found.detach(), whole.log_prob(pictures), atol=1e-2, rtol=1e-4)
    # -E[log p] is the entropy; its standard error is sqrt(64 / 2 / 4000) = 0.09.
    assert -found.mean().item() == pytest.approx(whole.entropy().item(), abs=0.4)
    best, score = look.beam(digit, 2)
    assert best[0, 0].equal(look.mean[4].detach()) and score[0, 1] == -torch.inf
    assert score[0, 0] > found.max()


def test_a_comparison_learns_in_every_way(program: ModuleType) -> None:
    args = argparse.Namespace(rule=None, labels=5, steps=60, batch=50, share=1.0, rate=0.01)
    found = program.compare(args, seed=0)
    assert len(found) == len(program.WAYS)
    assert min(found) > 0.6  # by chance it is 0.1
