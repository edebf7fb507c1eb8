# SPDX-License-Identifier: Apache-2.0
"""The modules that an optimizer trains, among those that live."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline_plugins.zero import module_discovery
from paceline_plugins.zero.refusals import Refusal


def test_the_outermost_module_that_owns_the_parameters() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 2)))
    bystander = nn.Linear(2, 2)
    assert module_discovery.modules([torch.optim.SGD(model.parameters(), lr=0.1)]) == [model]
    assert module_discovery.modules([torch.optim.SGD(bystander.parameters(), lr=0.1)]) == [bystander]


def test_several_modules_stand_in_the_order_of_the_optimizer() -> None:
    decoder, encoder, head = nn.Linear(2, 1), nn.Linear(3, 2), nn.Linear(1, 1)
    head.requires_grad_(False)
    parameters = [*encoder.parameters(), *decoder.parameters(), *head.parameters()]
    assert module_discovery.modules([torch.optim.Adam(parameters)]) == [encoder, decoder]


def test_a_tensor_of_nobody_is_refused() -> None:
    loose = torch.zeros(2, 3, requires_grad=True)
    with pytest.raises(Refusal, match=r"SGD trains a tensor of shape \(2, 3\) that no torch module has"):
        module_discovery.modules([torch.optim.SGD([loose], lr=0.1)])
