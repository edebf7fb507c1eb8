# SPDX-License-Identifier: Apache-2.0
"""Resumes a run from a checkpoint."""

from __future__ import annotations

from pathlib import Path

from paceline.checkpoint import CheckpointFinder, FoundCheckpoint, reshard
from paceline.checkpoint.reshard import OldCheckpoint
from paceline.errors import CheckpointError
from paceline.run import other_workers
from paceline.run.assembly import RunParts


def resume_run(parts: RunParts, path: str | Path | None) -> bool:
    """Load the checkpoint at `path`, or the newest step in the run's store; returns whether there was one."""

    def once() -> bool:
        settings = parts.context.settings
        named = None if settings.round is not None and settings.start is not None else path
        with CheckpointFinder(named, settings.checkpoint, parts.context.transport, settings.start) as finder:
            found = finder.found()
            for why in found.damaged.values():
                parts.context.monitor.damaged(why)
            if found.manifest:
                _load(parts, found)
            if parts.checkpointer is not None:
                parts.checkpointer.resumed(*finder.own_steps(found))
        for observer in parts.context.observers:
            observer.resumed()
        return bool(found.manifest)

    return parts.elastic.joining.resume(once) if parts.elastic is not None else once()


def _load(parts: RunParts, found: FoundCheckpoint) -> None:
    """Load a checkpoint: bit for bit if the same number of workers saved it, else resharded."""
    context, manifest, path = parts.context, found.manifest, found.name
    if manifest["rule"] != parts.state.rule_text:
        raise CheckpointError(
            f"{path} was made under the rule {manifest['rule']}, and this run has {parts.state.rule_text}; "
            "use the same rule, or begin a new run from its global model"
        )
    reshard.check_kinds(path, [optimizer for optimizer, _ in context.owned], manifest.get("optimizers"))
    if found.state is not None and parts.membership is None:
        parts.state.complete(path, found.state, found.read_frozen)
        parts.state.load(path, found.state)
    else:
        old = OldCheckpoint(manifest, found.read_frozen)
        other_workers.load_resharded(path, old, parts.state, context)
    context.monitor.note("resume", path=path)
