#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Measures paceline beside its peers (as root, for the network namespaces), and draws the picture; 25 minutes on quiet cores. PYTHON is an
# interpreter that has them: pip install torchft-nightly hivemind accelerate, beside what paceline and its benchmarks need.
. "$(dirname "$0")/../common.sh"
bench seeds/peers all --workers 2 8 --rates 100 1000 --rounds 3
bench seeds/peers chunks --workers 8 --rates 1000 --rounds 2 --rows ddp paceline_sync paceline_sync_chunks_{1,2,4} torchft_streaming paceline_streaming paceline_streaming_chunks_{1,4}
[ -n "$quick" ] || bench seeds/peers now --workers 8 2 --rates 1000 --rounds 3 --rows ddp torchft_ddp paceline_sync paceline_sync_chunks_{2,8} torchft_streaming paceline_streaming{,_chunks_8} torchft_overlap paceline_bmuf_overlap
for parameters in 1280000 640000; do
    [ -z "$quick" ] || break
    bench seeds/peers sizes_$parameters --workers 8 --rates 1000 --rounds 3 --parameters $parameters --rows ddp paceline_sync_chunks_{1,2,4,8}
done
"$python" "$here/plot.py" "$results"
