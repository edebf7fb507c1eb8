#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the programs of programs.toml on two workers, and the refusals (three minutes on two cores). PROGRAMS is the folder that they lie in (see README.md).
. "$(dirname "$0")/../common.sh"
bench quality/first_words results --table "$here/programs.toml" --programs "${PROGRAMS:-out/first_words/programs}"
