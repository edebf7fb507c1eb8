# SPDX-License-Identifier: Apache-2.0
"""State dictionaries as JSON plus tensors, so that loading a checkpoint executes nothing.

Tensors go into a flat dictionary for safetensors. The rest becomes JSON, with tags for types that JSON lacks: tuples,
dictionaries whose keys are not strings, counters, non-finite numbers, bytes, dtypes and devices.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.errors import CheckpointError

_TAG = "paceline."


def flatten(value: Any, tensors: dict[str, Tensor], path: str) -> Any:
    """`value` as JSON; adds its tensors to `tensors` under names that start with `path`."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Tensor):
        return {_TAG + "tensor": _put(value.detach(), tensors, path)}
    if isinstance(value, np.ndarray):
        whole = torch.from_numpy(np.ascontiguousarray(value)).reshape(value.shape)  # else a scalar is a row
        return {_TAG + "array": _put(whole, tensors, path)}
    if isinstance(value, (np.integer, np.floating, np.bool_)):
        return flatten(value.item(), tensors, path)
    if isinstance(value, (int, float)):
        if isinstance(value, float) and not math.isfinite(value):
            return {_TAG + "float": repr(value)}
        return value
    if isinstance(value, bytes):
        return {_TAG + "bytes": base64.b64encode(value).decode()}
    if isinstance(value, (torch.dtype, torch.device)):
        kind = "dtype" if isinstance(value, torch.dtype) else "device"
        return {_TAG + kind: str(value).removeprefix("torch.")}
    if isinstance(value, (list, tuple)):
        items = [flatten(item, tensors, f"{path}.{number}") for number, item in enumerate(value)]
        return items if isinstance(value, list) else {_TAG + "tuple": items}
    if isinstance(value, dict):
        return _flatten_dict(value, tensors, path)
    raise CheckpointError(
        f"{path or 'the state'} holds a {type(value).__name__}, which a checkpoint cannot hold without pickle; "
        "leave it out, or give an object whose state_dict holds tensors, numbers, text, lists and dictionaries"
    )


def _put(tensor: Tensor, tensors: dict[str, Tensor], path: str) -> str:
    """Add a tensor under a unique name: {"a": {"b": t}, "a.b": u} has two tensors at the path a.b."""
    if hasattr(tensor, "to_local"):
        raise CheckpointError(
            f"{path.lstrip('.')} is sharded (a DTensor), which paceline's checkpoints do not hold yet; save such "
            "a model with torch.distributed.checkpoint"
        )
    name = path or "value"
    while name in tensors:
        name += "'"
    tensors[name] = tensor
    return name


def _flatten_dict(value: dict[Any, Any], tensors: dict[str, Tensor], path: str) -> Any:
    if type(value) not in (dict, OrderedDict, Counter, defaultdict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}; only plain dictionaries can be saved")
    plain = type(value) is not Counter and all(isinstance(k, str) and not k.startswith(_TAG) for k in value)
    if plain:
        return {key: flatten(item, tensors, f"{path}.{key}") for key, item in value.items()}
    pairs = [
        [flatten(key, tensors, f"{path}.key"), flatten(item, tensors, f"{path}.{key}")] for key, item in value.items()
    ]
    return {_TAG + ("counter" if type(value) is Counter else "dict"): pairs}


def build(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The inverse of `flatten`; raises `CheckpointError` for input that `flatten` does not produce."""
    try:
        return _build(value, tensors)
    except CheckpointError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"the checkpoint holds what no state is: {type(error).__name__}: {error}") from error


def _build(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_build(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((key, inner),) = value.items()
        if key.startswith(_TAG):
            return _build_tagged(key.removeprefix(_TAG), inner, tensors)
    return {key: _build(item, tensors) for key, item in value.items()}


def _build_tagged(kind: str, inner: Any, tensors: dict[str, Tensor]) -> Any:
    if kind == "tensor":
        return tensors[inner]
    if kind == "array":
        return tensors[inner].numpy()
    if kind == "float":
        return float(inner)
    if kind == "bytes":
        return base64.b64decode(inner)
    if kind == "dtype":
        value = vars(torch).get(inner)  # not getattr, which may import a module
        if not isinstance(value, torch.dtype):
            raise CheckpointError(f"the checkpoint names the dtype {inner!r}, which this torch does not have")
        return value
    if kind == "device":
        return torch.device(inner)
    if kind == "tuple":
        return tuple(_build(item, tensors) for item in inner)
    if kind in ("dict", "counter"):
        pairs = {_build(key, tensors): _build(item, tensors) for key, item in inner}
        return Counter(pairs) if kind == "counter" else pairs
    raise CheckpointError(f"the checkpoint holds the unknown tag {kind!r}; it was made by a newer paceline")
