# SPDX-License-Identifier: Apache-2.0
"""Which adapter to use instead of zero lines with a framework that owns the training loop or the cluster."""

from __future__ import annotations

FORCE = (
    "--force-zero-lines hides the cluster from it (RANK, WORLD_SIZE and the like), so that it runs as on one device "
    "and paceline splits its data"
)
MOVE = "take the cluster out and add the two lines (docs/moving.md says what stands where)"
DOORS = (
    (
        ("lightning.fabric", "lightning.Fabric", "lightning_fabric"),
        "use Fabric(strategy=PacelineFabricStrategy(..)) of paceline.doors.adapters.fabric",
    ),
    (
        ("lightning", "pytorch_lightning"),
        "use Trainer(strategy=PacelineStrategy(..)) of paceline.doors.adapters.lightning",
    ),
    (
        ("transformers", "trl"),
        "use Trainer(.., callbacks=[PacelineCallback(..)]) of paceline.doors.adapters.hugging_face",
    ),
    (("accelerate",), "use PacelineAccelerator(..) of paceline.doors.adapters.accelerate for Accelerator(..)"),
    (("keras",), "use the callback Paceline(..) of paceline.doors.adapters.keras"),
    (("jax", "flax", "optax"), "use run = attach(params) and run.sync(params) of paceline.doors.adapters.jax"),
    (("sklearn",), "use attach(model) and run.step() of paceline.doors.adapters.sklearn around partial_fit"),
    (
        ("tensorflow",),
        "use run = paceline.attach_arrays(variables) and run.step() after each step, or for Keras's fit the callback "
        "Paceline(..) of paceline.doors.adapters.keras",
    ),
    (("chainer", "cupy"), "use run = paceline.attach_arrays(arrays) and run.step() after each step"),
    (("xgboost", "lightgbm", "catboost"), "paceline has no door for it"),
)
OWN_LOOPS = (
    "keras",
    "jax",
    "flax",
    "optax",
    "sklearn",
    "tensorflow",
    "chainer",
    "cupy",
    "xgboost",
    "lightgbm",
    "catboost",
)
"""Frameworks that train without torch, or with its arrays alone."""


def of_cluster(name: str) -> str:
    """What to do with a program that sets up a cluster by the library `name`."""
    found = _find(name)
    return found if found else f"{FORCE}; or {MOVE}"


def of_framework(names: set[str]) -> tuple[str, str]:
    """The framework that trains without an optimizer of torch, and its adapter; empty where none is known."""
    tops = {name.split(".")[0] for name in names}
    if any(name.startswith(("torch.optim", "torch.utils.data")) for name in names):
        return "", ""
    first = next((name for name in OWN_LOOPS if name in tops), "")
    return first, _find(first) if first else ""


def _find(name: str) -> str:
    for beginnings, door in DOORS:
        if any(name == beginning or name.startswith(f"{beginning}.") for beginning in beginnings):
            return f"{door} (docs/frameworks.md)" if "no door" not in door else door
    return ""
