#!/bin/sh
# Run an engine as a Ray job, its stages on the nodes of the cluster:
#
#   export RAY_API_SERVER_ADDRESS=http://127.0.0.1:8265   the dashboard of Ray's head, here through a tunnel
#   export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=...     as the cluster has them
#   deploy/ray-job.sh PROFILE ADDRESS [NAME] [OPTION...]
#
# PROFILE  a .yaml file on Ray's head, or a bundled name
# ADDRESS  the IP address of Ray's head that the other nodes and the consoles reach
# NAME     name of the job and of the engine; else ppconsole
# OPTION   more of `ppconsole serve`, such as --set parallel.pipeline=4
#
# `ppconsole` must be on the PATH of Ray's processes. Consoles on other hosts need a key, before this command is run:
# `ppconsole key allow` on Ray's head. Without one, and for this host alone, set CONSOLES=none.
# End it by `ppconsole stop` on Ray's head, or by `ray job stop NAME`. The latter sends SIGTERM to each process of the
# engine, and SIGKILL to those that are left after RAY_JOB_STOP_WAIT_TIME_S of the head, 3 s.
set -eu

usage='deploy/ray-job.sh PROFILE ADDRESS [NAME] [OPTION...]'
profile=${1:?$usage} address=${2:?$usage} name=${3:-ppconsole}
: "${RAY_API_SERVER_ADDRESS:?set it to http://HEAD:8265, the dashboard of the head of the cluster}"
if [ $# -gt 3 ]; then shift 3; else shift $#; fi

# Ports: 7400 to 7402 for consoles, 7500 to 7504 for the other nodes.
[ "${CONSOLES:-}" = none ] || set -- --listen "tcp://$address:7400" "$@"

# Without resources of its own, Ray runs the entry point on its head. The stages ask for theirs themselves.
exec ray job submit --no-wait --submission-id "$name" -- \
    ppconsole serve "$profile" --name "$name" \
    --set parallel.executor=ray --set "parallel.listen=tcp://$address:7500" "$@"
