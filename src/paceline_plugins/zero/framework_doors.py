# SPDX-License-Identifier: Apache-2.0
"""Which adapter to use instead of zero lines with a framework that owns the training loop or the cluster."""

from __future__ import annotations

FORCE = "--force-zero-lines runs it as on one device"
IF_TORCH = "--force-zero-lines takes it as a torch program"
MOVE = "take the cluster out and add the two lines (docs/guide/frameworks.md)"
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
    (("keras",), "use the callback Paceline(..) of paceline_plugins.frameworks.keras"),
    (("jax", "flax", "optax"), "use run = attach(params) and run.sync(params) of paceline_plugins.frameworks.jax"),
    (("sklearn",), "use attach(model) and run.step() of paceline_plugins.frameworks.sklearn around partial_fit"),
    (
        ("tensorflow",),
        "use run = paceline.attach_arrays(variables) and run.step() after each step, or for Keras's fit the callback "
        "Paceline(..) of paceline_plugins.frameworks.keras",
    ),
    (("chainer", "cupy"), "use run = paceline.attach_arrays(arrays) and run.step() after each step"),
    (("xgboost", "lightgbm", "catboost"), "paceline has no adapter for it"),
)
ON_TORCH = ("transformers", "diffusers", "skorch", "torch_geometric", "torchvision", "timm")
"""Libraries by which a program uses torch; not all of them say that they require it."""
BESIDE_TORCH = ("sklearn", "xgboost", "lightgbm", "catboost")
"""Frameworks that train without torch, unless the program uses that as well."""
OWN_LOOPS = ("keras", "jax", "flax", "optax", "tensorflow", "chainer", "cupy")
"""Frameworks that train without torch, or with its arrays alone."""


def on_torch(names: set[str]) -> bool:
    """Whether a program that imports these names uses torch."""
    return not {name.split(".")[0] for name in names}.isdisjoint(("torch", *ON_TORCH))


def of_cluster(name: str) -> str:
    """What to do with a program that sets up a cluster by the library `name`."""
    return f"{_find(name) or MOVE}; {FORCE}"


def of_framework(names: set[str]) -> tuple[str, str]:
    """The framework that trains without an optimizer of torch, and its adapter; empty where none is known."""
    tops = {name.split(".")[0] for name in names}
    if any(name.startswith(("torch.optim", "torch.utils.data")) for name in names):
        return "", ""
    owners = OWN_LOOPS if on_torch(names) else (*OWN_LOOPS, *BESIDE_TORCH)
    first = next((name for name in owners if name in tops), "")
    return first, f"{_find(first)}; {IF_TORCH}" if first else ""


def _find(name: str) -> str:
    for beginnings, door in DOORS:
        if any(name == beginning or name.startswith(f"{beginning}.") for beginning in beginnings):
            return f"{door} (docs/guide/frameworks.md)" if "no adapter" not in door else door
    return ""
