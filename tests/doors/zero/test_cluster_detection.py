# SPDX-License-Identifier: Apache-2.0
"""Which programs know of a cluster, by their source."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline_plugins.zero.cluster_detection import imported, other_cluster, unaware


@pytest.mark.parametrize(
    ("source", "bare"),
    [
        ("import torch", True),
        ("from torch import nn", True),
        ("import torch.nn as nn, sys", True),
        ("def late():\n    import torch", True),
        ("print('no torch here')", False),
        ("import torch\nimport paceline", False),
        ("import torch\nfrom paceline import attach", False),
        ("import torch\nfrom paceline_mine import train", False),
        ("import torch\nimport pacelines", True),
        ("import torch\ntry:\n    import paceline\nexcept ImportError:\n    pass", False),
        ("import torch.distributed as dist", False),
        ("import torch\ntorch.distributed.init_process_group()", False),
        ("from torch import distributed", False),
        ("from torch.nn.parallel import DistributedDataParallel as DDP", False),
        ("import torch\nimport accelerate", False),
        ("import lightning as L\nimport torch", False),
        ("import torch\nfrom transformers import Trainer", False),
        ("import torch\nfrom transformers import AutoModel", True),
        ("import torch\n# paceline would be good here", True),
        ("import torch\nthis is no Python", False),
    ],
)
def test_by_what_it_imports(source: str, bare: bool, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(source)
    assert unaware(script) is bare


def test_relative_imports_and_the_root_of_a_module_count(tmp_path: Path) -> None:
    package = tmp_path / "mine" / "inner"
    package.mkdir(parents=True)
    train = package / "train.py"
    train.write_text("import torch\nfrom . import loop\nfrom .. import other")
    (package / "loop.py").write_text("import tools")
    assert unaware(train, tmp_path)
    (tmp_path / "mine" / "other.py").write_text("import paceline")
    assert not unaware(train, tmp_path)
    (tmp_path / "mine" / "other.py").unlink()
    (tmp_path / "tools.py").write_text("import deepspeed")  # beside the package, not beside the module
    assert other_cluster(imported(train, tmp_path)) == "deepspeed"


def test_the_cluster_is_named(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\nfrom torch.nn.parallel import DistributedDataParallel")
    assert other_cluster(imported(script)) == "torch.nn.parallel.DistributedDataParallel"
    script.write_text("import torch, deepspeed")
    assert other_cluster(imported(script)) == "deepspeed"
    assert not imported(tmp_path / "nowhere.py")


def test_the_owner_of_the_loop_is_named_before_what_it_rests_upon(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\nimport transformers\nfrom accelerate import Accelerator\ntransformers.Trainer()")
    assert other_cluster(imported(script)) == "transformers.Trainer"
    script.write_text("import lightning as L\nimport torch.distributed\nfrom accelerate import Accelerator")
    assert other_cluster(imported(script)) == "lightning"


def install(site: Path, name: str, source: str, requires: tuple[str, ...] = (), index: bool = True) -> None:
    """A distribution as pip installs it, from a package index or from a folder."""
    module, about = name.replace("-", "_"), site / f"{name.replace('-', '_')}-1.0.dist-info"
    (site / module).mkdir(parents=True)
    about.mkdir()
    (site / module / "__init__.py").write_text(source)
    lines = [f"Requires-Dist: {one}" for one in requires]
    (about / "METADATA").write_text("\n".join(["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0", *lines, ""]))
    (about / "RECORD").write_text(f"{module}/__init__.py,,\n")
    if not index:
        (about / "direct_url.json").write_text("{}")


PACKAGES: list[tuple[str, tuple[str, ...], bool, str]] = [
    ("", ("torch>=2.0",), True, "torch"),
    ("", ("numpy", "pl-inner (>=1)"), True, "torch"),
    ("", ('torch>=2; extra == "gpu"',), True, ""),
    ("", ("paceline[lightning]",), True, "paceline torch"),
    ("import torch.distributed", ("torch",), True, "torch"),  # it may start a cluster, if it is told to
    ("import torch.distributed", (), False, "torch.distributed"),
    ("import torch", (), False, "torch"),
    ("import paceline", (), False, "paceline"),
    ("import numpy", (), False, ""),
    ("import torch", (), True, ""),
]
"""Source and requirements of a package, whether it comes from an index, and what is known of a program that uses it."""


@pytest.mark.parametrize("number", range(len(PACKAGES)))
def test_what_an_installed_package_needs_counts(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, requires, index, known = PACKAGES[number]
    site, script, name = tmp_path / "site-packages", tmp_path / "train.py", f"pl_package_{number}"
    install(site, name.replace("_", "-"), source, requires, index)
    if "pl-inner (>=1)" in requires:
        install(site, "pl-inner", "", ("torch",))
    monkeypatch.syspath_prepend(site)
    script.write_text(f"from {name} import main")
    assert imported(script) - {name, f"{name}.main", "numpy"} == set(known.split())
    assert unaware(script) is (known == "torch")
