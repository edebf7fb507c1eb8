#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs a program 40 times and times auto on emulated links (as root, for network namespaces; half an hour on two cores).
. "$(dirname "$0")/../common.sh"
bench speed/steady results --links 100,1000,10000,loopback "$@"
