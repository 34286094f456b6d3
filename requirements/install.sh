#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# The virtual environments of the world-model guide, for the policy that learns in a world model:
#
#   bash requirements/install.sh cosmos_world_model     .venv_cosmos: this project, Ray, LIBERO without CUDA packages
#   bash requirements/install.sh openvla_oft            .venv_openvla_oft: the same; openvla: .venv_openvla
#   bash requirements/install.sh openpi                 .venv_openpi: the same, for PI0.5
#
# Each has all: a policy and the world model that it learns in share their processes here.
# Options: --dry-run prints the commands, --venv DIR is another folder, --no-libero leaves the simulator out.
# PYTHON is the interpreter (3.10 or newer), TORCH_INDEX an index of torch builds (none is asked where it is empty).
# Exit code: 0 done, 1 a command failed, 2 wrong arguments or something is missing.

set -u
here=$PWD
cd "$(dirname "$0")/.." || exit 2
target="" dry="" venv="" libero=yes

fail() {
    echo "install.sh: $1" >&2
    exit 2
}

while [ $# -gt 0 ]; do
    case $1 in
    --dry-run | --dry_run) dry=yes ;;
    --no-libero | --no_libero) libero="" ;;
    --venv)
        [ $# -gt 1 ] || fail "--venv needs a folder"
        venv=$2
        [[ $venv == /* || $here == "$PWD" ]] || venv=$here/$venv # below the folder that the command is started in
        shift
        ;;
    -*) fail "there is no option $1; there are --dry-run, --no-libero, --venv DIR" ;;
    *)
        [ -z "$target" ] || fail "one target at a time: $target or $1"
        target=$1
        ;;
    esac
    shift
done

extras=data,rl,track,weights
case $target in
cosmos_world_model | cosmos) venv=${venv:-.venv_cosmos} ;;
openvla_oft | openvla | openpi) venv=${venv:-.venv_$target} ;;
"") fail "which target? cosmos_world_model, openvla_oft, openvla or openpi" ;;
*) fail "no target is called $target. Targets: cosmos_world_model, openvla_oft, openvla, openpi" ;;
esac

base=${PYTHON:-python3}
command -v "$base" >/dev/null || fail "there is no $base here. Install Python 3.10 or newer, and say which: PYTHON=python3.11"
"$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "$base is $("$base" --version 2>&1), but 3.10 or newer is needed: PYTHON=python3.11"
"$base" -c 'import venv, ensurepip' 2>/dev/null ||
    fail "$base has no venv module. On Debian and Ubuntu: apt-get install python3-venv"

if nvidia-smi --list-gpus >/dev/null 2>&1; then
    extras=$extras,gpu
    index=${TORCH_INDEX:-} # the package index has builds with CUDA
else
    index=${TORCH_INDEX-https://download.pytorch.org/whl/cpu}
fi

run() {
    echo "+ $*"
    [ -n "$dry" ] && return
    "$@" || {
        echo "install.sh: this command failed: $*" >&2
        exit 1
    }
}

pip=("$venv/bin/python" -m pip install --disable-pip-version-check -c constraints.txt)
[ -n "$libero" ] && extras=$extras,vla
[ -x "$venv/bin/python" ] || run "$base" -m venv "$venv"
run "${pip[@]}" setuptools wheel
run "${pip[@]}" ${index:+--extra-index-url "$index"} torch
run "${pip[@]}" --no-build-isolation -e ".[$extras]"
if [ -n "$libero" ]; then
    # What hf-libero asks for brings robomimic, and with it CUDA and 7 GB; environments use neither.
    run "${pip[@]}" --no-deps hf-libero==0.1.4
    ldconfig -p 2>/dev/null | grep -q libEGL.so ||
        echo "note: no libEGL here, which LIBERO renders with: apt-get install libegl1 libegl-mesa0 libgl1 libgl1-mesa-dri"
fi
run "$venv/bin/python" -m scripts.doctor --brief
echo "next:  source $venv/bin/activate    then  bash examples/embodiment/run_embodiment.sh tiny_toy_grpo"
