#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# A Ray cluster of several machines that share this folder: the same command on each, with its number.
#
#   RANK=0 bash ray_utils/start_ray.sh      the first: starts the head and writes its address beside this script
#   RANK=1 bash ray_utils/start_ray.sh      the others: wait for that address, up to 360 seconds, and join
#
# RAY_PORT is the head's port (29500), RAY_HEAD_ADDRESS its address where the first of `hostname -I` is not the one that
# the others reach, RAY_HEAD_IP_FILE the shared file, RAY_WAIT_SECONDS how long to wait. Words go on to `ray start`, such
# as --num-gpus=4. Exit code: Ray's, or 2 when something is missing. `ray stop` on each machine ends the cluster.

set -u
here=$(cd "$(dirname "$0")" && pwd)
file=${RAY_HEAD_IP_FILE:-$here/ray_head_ip.txt}
port=${RAY_PORT:-29500}
most=${RAY_WAIT_SECONDS:-360}

fail() {
    echo "start_ray.sh: $1" >&2
    exit 2
}

[[ ${RANK:-} =~ ^[0-9]+$ ]] || fail "RANK is '${RANK:-}', but it is the number of this machine: 0 for the first, then 1, 2, ..."
command -v ray >/dev/null || fail "there is no ray here: pip install -e '.[rl]', or activate the environment that has it"

if [ "$RANK" -eq 0 ]; then
    address=${RAY_HEAD_ADDRESS:-$(hostname -I 2>/dev/null | awk '{print $1}')}
    [ -n "$address" ] || fail "this machine's address is not known: set RAY_HEAD_ADDRESS"
    mv -f "$file" "$file.before" 2>/dev/null # of an earlier cluster
    ray start --head --node-ip-address="$address" --port="$port" "$@" || {
        code=$?
        mv -f "$file.before" "$file" 2>/dev/null # which may be the one that runs here already
        exit "$code"
    }
    rm -f "$file.before"
    # Written whole at once: the others read it as soon as it is there.
    echo "$address" >"$file.part" && mv "$file.part" "$file" || fail "$file cannot be written"
    echo "the head is $address:$port, written to $file"
else
    echo "waiting for the head's address in $file, up to $most seconds"
    begin=$SECONDS
    until [ -s "$file" ] && ray start --address="$(cat "$file"):$port" "$@"; do # it may be an earlier cluster's, too
        [ $((SECONDS - begin)) -lt "$most" ] ||
            fail "no head answers by $file after $most seconds. Is RANK=0 started, on a folder that both machines see?"
        sleep 1
    done
fi
