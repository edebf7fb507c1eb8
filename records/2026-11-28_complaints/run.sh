#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the programs of benchmarks/quality/_complaints under each of their rules (half an hour on two cores).
. "$(dirname "$0")/../common.sh"
bench quality/complaints results
