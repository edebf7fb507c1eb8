# SPDX-License-Identifier: Apache-2.0
"""`paceline run --hosts a,b,c`: one command starts the launchers of all hosts over ssh."""
