# SPDX-License-Identifier: Apache-2.0
"""State dictionaries as JSON plus tensors."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from paceline.core.state_tree import build, flatten
from paceline.errors import CheckpointError


def there_and_back(value: Any) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(flatten(value, tensors, ""), allow_nan=False)
    assert all(isinstance(name, str) and name for name in tensors)
    return build(json.loads(text), tensors)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        2.5,
        1e-300,
        "text",
        [],
        {},
        (),
        [1, (2, "x"), {"a": [None]}],
        {1: "one", 2.5: "two", ("a", 1): "pair", None: 0},
        {"paceline.tensor": "not ours"},
        {"paceline.tensor": 1, "b": 2},
        b"\x00\xff",
        torch.float32,
        torch.device("cpu"),
        float("inf"),
        -float("inf"),
        [float("inf")],
        {"é": "ü"},
        {"": {"": 1}},
        {True: "yes"},
    ],
)
def test_values_come_back_equal(value: Any) -> None:
    found = there_and_back(value)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
def test_tensors(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[1, 0], [1, 1]]).to(dtype)
    for value in (tensor, [tensor, {"x": tensor}], {"a": {"b": tensor, 0: tensor + tensor}}):
        flat_found, flat_value = str(there_and_back(value)), str(value)
        assert flat_found == flat_value


def test_names_do_not_collide() -> None:
    value = {"a": {"b": torch.tensor(1)}, "a.b": torch.tensor(2), "x": [torch.tensor(3)], "x.0": torch.tensor(4)}
    found = there_and_back(value)
    assert [int(found["a"]["b"]), int(found["a.b"]), int(found["x"][0]), int(found["x.0"])] == [1, 2, 3, 4]


def test_keys_of_several_types_do_not_collide() -> None:
    found = there_and_back({0: torch.tensor(1), "0": torch.tensor(2)})
    assert int(found[0]) == 1 and int(found["0"]) == 2


@pytest.mark.parametrize(("value", "said"), [(object(), "object"), ({1, 2}, "set"), ({"f": print}, "builtin_function")])
def test_what_would_need_pickle_is_refused_by_name(value: Any, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        flatten({"mine": value}, {}, "state")
    with pytest.raises(CheckpointError, match=r"state\.mine"):
        flatten({"mine": value}, {}, "state")


def test_unknown_tags_are_refused() -> None:
    with pytest.raises(CheckpointError, match="unknown tag"):
        build({"paceline.spell": 1}, {})
    with pytest.raises(CheckpointError, match="float99"):
        build({"paceline.dtype": "float99"}, {})
    with pytest.raises(CheckpointError, match="nn"):
        build({"paceline.dtype": "nn"}, {})
