#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the programs of programs.toml alone, and on three workers under the table's rules and under sync (an hour on two loaded
# cores). PROGRAMS is the folder that they lie in, PACKAGES one of `pip install --target` with what they need (see README.md).
. "$(dirname "$0")/../common.sh"
for of in blocks $([ -n "$quick" ] || echo sync); do
    bench quality/foreign "$of" --table "$here/programs.toml" --programs "${PROGRAMS:-out/foreign/programs}" \
        --packages "${PACKAGES:-out/foreign/packages}" --out "${RUNS:-out/foreign/runs}" --rule "${of/blocks/}" ${quick:+--only gcn}
done
