# SPDX-License-Identifier: Apache-2.0
"""`paceline run --receipts`: the launcher names the directory to the workers, and seals what they wrote."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.console import err, near, refuse
from paceline.cli.launch.cluster import LaunchCluster
from paceline.cli.run.certificates import HostCertificates
from paceline.errors import PacelineError
from paceline_plugins.receipts import seal

if TYPE_CHECKING:
    from paceline.communication.sockets.certificates import Authority

FOLDER, AUTHORITY = "receipts", "authority.pem"


@dataclass(frozen=True)
class Sealing:
    """The receipts of one host's workers."""

    authority: Authority  # signs them
    cluster: LaunchCluster  # the shape of the run
    directory: Path  # of the logs

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the workers."""
        key = seal.fingerprint(self.authority.certificate)
        return {
            "PACELINE_RECEIPTS": str(self.directory / FOLDER),
            "PACELINE_RECEIPTS_AUTHORITY": f"{self.authority.job} {key}",
        }

    def begin(self, quiet: bool) -> None:
        """Write the authority's certificate, which whoever checks the receipts needs, and remove older receipts."""
        folder = self.directory / FOLDER
        try:
            for old in [*folder.glob("rank-*.jsonl"), *folder.glob("seal-*.json")]:
                old.unlink(missing_ok=True)  # hosts may share the folder, and no worker has started yet
            folder.mkdir(exist_ok=True)
            path = self.directory / AUTHORITY
            path.write_text(seal.pem(self.authority.certificate), encoding="utf-8")
        except OSError as error:
            refuse(f"--receipts: {error}")
        if not quiet:
            err().print(
                f"receipts: keep a copy of {near(path)} elsewhere; then paceline verify {near(self.directory)} "
                "--authority COPY shows that they are this run's",
                markup=False,
                soft_wrap=True,
            )

    def seal(self, code: int, ranks: Sequence[int]) -> int:
        """Seal the receipts after all workers of this host have ended; the exit code, after that of the run.

        Args:
            code: of the run.
            ranks: of this host's workers.
        """
        try:
            missing = seal.write(self.directory / FOLDER, self.authority, self.cluster.host_index, ranks)
        except OSError as error:
            err().print(f"the receipts were not sealed: {error}", markup=False, soft_wrap=True)
            return code or 1
        if missing and not code:
            names = ", ".join(map(str, missing))
            err().print(f"no receipts were written by worker {names}: did it attach paceline?", markup=False)
            return 1
        return code


def make_seal(
    cluster: LaunchCluster, directory: Path, sign: Callable[[int], Mapping[str, str]], job: Path | None
) -> Sealing:
    """Seals the receipts, with the key of the job's authority."""
    if cluster.size == 1:
        refuse("--receipts: one worker merges nothing; give --workers 2 or more, or leave --receipts out")
    if isinstance(sign, HostCertificates):
        return Sealing(sign.authority, cluster, directory)
    from paceline.communication.sockets.certificates import Authority

    try:
        return Sealing(Authority.new() if job is None else Authority.load(job), cluster, directory)
    except PacelineError as error:
        refuse(f"--receipts: {error}")
