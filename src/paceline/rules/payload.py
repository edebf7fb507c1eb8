# SPDX-License-Identifier: Apache-2.0
"""The second choice of a rule: what is exchanged?

    gradient:    g_i                              before the optimizer's step
    moment:      m_i = b1 m + (1 - b1) g_i        Adam's first moment, each worker's continued from the common one
    delta:       d_i = theta_i - theta^init       after a block: parameters now minus the start of the block
    parameters:  theta_i                          after a block: the parameters themselves (elastic averaging)

theta^init is the start *as the worker saw it*: where the model has 16 bits and the outer state 32, the start is rounded
to 16 bits before it is subtracted, so that the rounding of the start never passes for progress.

The local optimizer's state may be exchanged with the delta (`local_state`), as further fragments:

- `keep`, `auto`: no; each worker keeps its own state (DiLoCo), so that a block moves it as far as the program's own
  steps.
- `reset`: no; every block starts from empty state (CNTK's choice for SGD with momentum). A block of n minibatches then
  moves a worker less far: with a momentum of 0.9, 0.23 times as far for n = 4 and 0.36 times for n = 8.
- `average`: the workers' mean.
- `compensate`: the mean, aged by what the outer step adds to the parameters (:mod:`paceline.rules.outer.moments`). A
  momentum that still grows is then ahead of the program's.
- `fitting`: `compensate` for Adam and AdamW without amsgrad; `keep` for other optimizers.

Block momentum and Adam's own push the same way twice, so a rule may lower Adam's beta1 where several workers share the
work. Chen, Ding & Huo (ICASSP 2020) report that a smaller one is much better under BMUF.

Under overlap a worker has trained on from theta_i(t) to theta_i(t+d) when the new start s arrives. Two ways to join
them:

    keep the progress:   theta_i = s + (theta_i(t+d) - theta_i(t))         every minibatch counts once
    mixing alpha:        theta_i = alpha theta_i(t+d) + (1 - alpha) s      Streaming DiLoCo, arXiv 2501.18512

With p = theta_i(t+d) - theta_i(t), the progress, and e = theta_i(t) - s, what the worker was off the new start, the
first is s + p and the second s + alpha p + alpha e: it keeps the share alpha of the progress and of the distance alike.
alpha = 0 takes the start and drops the progress, alpha = 1 never takes anything. Either way the next delta is measured
from s. Without a delay (d = 0) mixing alpha keeps the share alpha of e all the same: workers do not start alike then.
The publication takes alpha = 0.5 and finds it robust for d (its tau) below 5.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch.optim import Optimizer

from paceline.core.optimizer_state import is_adam, keeps_maximum, keeps_state, lower_beta1, refuse_uncompensated
from paceline.core.parse import Checked, check_whole, fits, is_number
from paceline.errors import UnsupportedError

LOCAL_STATE = ("auto", "keep", "reset", "average", "compensate", "fitting")


class Payload(ABC):
    """What is exchanged."""

    spans_block = False
    """Whether it belongs to a block of minibatches of any period, not to a step."""

    mixing: float | None = None  # alpha, where local parameters are mixed with what an exchange returns

    @property
    def moments_after(self) -> int | None:
        """Steps after which Adam's first moment takes the gradient's place, and the rule makes Adam's step; None for
        never."""
        return None

    @property
    def changes_optimizer_state(self) -> bool:
        """Whether a block changes the local optimizer's state."""
        return False

    def rides(self, moments: int = 2) -> bool:
        """Whether the local optimizer's moments, of this number, are sent with the parameters."""
        return False

    def check(self, optimizer: Optimizer) -> None:  # noqa: B027
        """Raise `UnsupportedError` if this optimizer cannot be served; most payloads serve any."""

    @abstractmethod
    def describe(self, workers: int) -> str:
        """The choice in words, for `paceline explain`."""


@dataclass(frozen=True)
class Gradient(Payload):
    """The gradient of one step; the user's optimizer gets the workers' mean."""

    def describe(self, workers: int) -> str:
        return "the gradient"


@dataclass(frozen=True)
class FirstMoment(Payload):
    """Adam's first moment, after `warmup` steps of plain Adam, which exchange the gradient.

    Attributes:
        warmup: T_w, steps before the second moment is frozen.
    """

    warmup: int = 1000

    def __post_init__(self) -> None:
        check_whole("warmup", self.warmup, 1, "of steps (Adam's second moment has to be known before it is frozen)")

    @property
    def moments_after(self) -> int:
        return self.warmup

    def check(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer that has no such moment."""
        if not is_adam(optimizer):
            raise UnsupportedError(
                f"this rule exchanges Adam's first moment, and the optimizer is {type(optimizer).__name__}; "
                "use torch.optim.Adam or AdamW, or the rule one_bit"
            )
        if any(group.get("amsgrad") for group in optimizer.param_groups):
            raise UnsupportedError("amsgrad keeps a running maximum that is not defined here; use amsgrad=False")

    def describe(self, workers: int) -> str:
        return f"Adam's first moment, after {self.warmup} steps with the gradient"


_WORD = fits(lambda word: word in LOCAL_STATE, f"one of {', '.join(LOCAL_STATE)}")
_SHARE = fits(lambda one: one is None or (is_number(one) and 0 <= one < 1), "a number from 0 to below 1, or None")


@dataclass(frozen=True)
class Delta(Checked, Payload):
    """The parameters' displacement over a block, and the local optimizer's state, if it is exchanged.

    Attributes:
        local_state: what a block starts from in the local optimizer: auto, keep, reset, average, compensate or
            fitting.
        adam_only: True where the method is defined for Adam's moments alone.
        mixing: alpha, the share of the local parameters that stays when an exchange lands, whatever its delay; None
            keeps the progress made meanwhile instead.
        beta1: what the beta1 of Adam and AdamW is lowered to where it is larger and there are several workers; None
            leaves it.
    """

    spans_block = True
    checks: ClassVar = {"local_state": _WORD, "mixing": _SHARE, "beta1": _SHARE}

    local_state: str = "auto"
    adam_only: bool = False
    mixing: float | None = None
    beta1: float | None = None

    @property
    def changes_optimizer_state(self) -> bool:
        """Whether momentum or moments are restarted, averaged or compensated, whatever the optimizer."""
        return self.adam_only or self.local_state in ("average", "compensate", "reset")

    def rides(self, moments: int = 2) -> bool:
        return self.local_state in ("average", "compensate") or (self.local_state == "fitting" and moments == 2)

    def check(self, optimizer: Optimizer) -> None:
        self.resolve(optimizer)

    def fit(self, optimizer: Optimizer) -> bool:
        """Adapt a local optimizer's settings to the rule, where several workers train; whether that was needed."""
        if self.beta1 is None or not is_adam(optimizer):
            return False
        lower_beta1(optimizer, self.beta1)
        return True

    def hold(self, optimizer: Optimizer) -> None:
        """Before a step of an optimizer that was adapted: adapt once more what a scheduler writes at each step."""
        assert self.beta1 is not None
        lower_beta1(optimizer, self.beta1, cycled=True)

    def resolve(self, optimizer: Optimizer) -> str:
        """The effect of `local_state` on this optimizer; raises `UnsupportedError` if it cannot be served."""
        if self.adam_only and not is_adam(optimizer):
            raise UnsupportedError(
                f"this rule averages Adam's moments, and the optimizer is {type(optimizer).__name__}; "
                'use torch.optim.Adam or AdamW, or the rule "bmuf"'
            )
        choice = self.local_state
        if choice == "fitting":
            choice = "compensate" if is_adam(optimizer) and not keeps_maximum(optimizer) else "keep"
        if choice == "compensate":
            refuse_uncompensated(optimizer)
        return choice if choice != "auto" and keeps_state(optimizer) else "keep"

    def describe(self, workers: int) -> str:
        words = {
            "fitting": "Adam's moments are averaged and compensated, other optimizers keep their state",
            "auto": "the local optimizer keeps its state",
            "keep": "the local optimizer keeps its state",
            "reset": "the local optimizer's state restarts with each block",
            "average": "the local optimizer's state is averaged",
            "compensate": "the local optimizer's moments are averaged and compensated",
        }
        mixed = f"; mixed with alpha {self.mixing:g} when it lands" if self.mixing is not None else ""
        lowered = f"; beta1 at most {self.beta1:g}" if self.beta1 is not None and workers > 1 else ""
        return f"the block's delta; {words[self.local_state]}{lowered}{mixed}"


@dataclass(frozen=True)
class Parameters(Payload):
    """The worker's parameters themselves, for elastic averaging; its optimizer keeps its state."""

    spans_block = True

    def describe(self, workers: int) -> str:
        return "the parameters"
