#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Train a policy in a world model by a configuration of examples/embodiment/config:
#
#   bash examples/embodiment/run_embodiment.sh CONFIG [PLATFORM] [KEY=VALUE ...] [-- OVERRIDES OF scripts.train]
#   bash examples/embodiment/run_embodiment.sh CONFIG --dryrun      print what it becomes, and what is missing for it
#   bash examples/embodiment/run_embodiment.sh cosmos_libero_spatial_grpo_openvlaoft LIBERO runner.max_epochs=10
#
# The run lies in logs/<date>-CONFIG, with the output in run_embodiment.log; both below IMAGINAIRE_OUTPUT_ROOT if it is
# set. PLATFORM is LIBERO or TOY, and may be left out. Relative paths are below the folder that the command is started
# in. PYTHON is the interpreter, else that of the active environment, of .venv_cosmos, .venv_openvla_oft, .venv_openvla,
# .venv_openpi or .venv.
# Exit code: that of scripts.train; 2 something that you can mend.

set -u
EMBODIED_PATH=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
REPO_PATH=$(dirname "$(dirname "$EMBODIED_PATH")")
export EMBODIED_PATH REPO_PATH
export MUJOCO_GL=${MUJOCO_GL:-egl} PYOPENGL_PLATFORM=${PYOPENGL_PLATFORM:-egl}
export PYTHONPATH=$REPO_PATH${PYTHONPATH:+:$PYTHONPATH}

config=${1:-}
if [ -z "$config" ] || [[ $config == *=* || $config == [-~]* ]]; then
    names=$(cd "$EMBODIED_PATH/config" && printf '%s ' *.yaml)
    echo "run_embodiment.sh: which configuration? ${names//.yaml/}" >&2
    exit 2
fi
shift
if [ $# -gt 0 ] && [[ $1 != *=* && $1 != [-~]* ]]; then
    case ${1^^} in
    LIBERO | TOY) ROBOT_PLATFORM=${1^^} ;;
    *)
        echo "run_embodiment.sh: '$1' is no platform and no override: LIBERO or TOY, KEY=VALUE, ~KEY, --dryrun" >&2
        exit 2
        ;;
    esac
    shift
fi
export ROBOT_PLATFORM=${ROBOT_PLATFORM:-LIBERO}

python=${PYTHON:-}
if [ -z "$python" ]; then
    python=python
    if [ -z "${VIRTUAL_ENV:-}" ]; then
        for venv in .venv_cosmos .venv_openvla_oft .venv_openvla .venv_openpi .venv; do
            [ -x "$REPO_PATH/$venv/bin/python" ] && python=$REPO_PATH/$venv/bin/python && break
        done
    fi
fi

name=logs/$(date +%Y%m%d-%H:%M:%S)-$config
root=${IMAGINAIRE_OUTPUT_ROOT:-$PWD}
logs=$root/$name
[[ $root == *://* ]] && logs=$PWD/$name # of the output; the run itself goes there
mkdir -p "$logs" || exit 2
unset IMAGINAIRE_OUTPUT_ROOT # else it, and not the folder of this run, says where the run lies
command=("$python" -m scripts.embodied --config-path "$EMBODIED_PATH/config" --config-name "$config"
    "runner.logger.log_path='$root/$name'" "$@")
echo "${command[*]}" >"$logs/run_embodiment.log"
"${command[@]}" 2>&1 | tee -a "$logs/run_embodiment.log"
code=${PIPESTATUS[0]}
if [ "$code" = 2 ] && [ "$(ls -A "$logs")" = run_embodiment.log ]; then
    rm -r "$logs" # a refused start; the terminal has the message
    rmdir "${logs%/*}" 2>/dev/null
fi
exit "$code"
