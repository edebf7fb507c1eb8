#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the programs of programs.toml alone and on three workers (an hour on two loaded cores). PROGRAMS is the folder that
# they lie in, PACKAGES one of `pip install --target` with what they need beside the project's own (see README.md).
. "$(dirname "$0")/../common.sh"
bench quality/foreign results --table "$here/programs.toml" --programs "${PROGRAMS:-out/foreign/programs}" \
    --packages "${PACKAGES:-out/foreign/packages}" --out out/foreign/runs ${quick:+--only vae}
