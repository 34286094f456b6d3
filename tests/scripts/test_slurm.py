# SPDX-License-Identifier: Apache-2.0
"""The Slurm scripts, under a stand-in for Slurm that runs two machines on this one."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from imaginaire import distributed
from tests.programs import HANG_S
from tests.training import run_dir, saved

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [ROOT / "scripts" / "slurm" / name for name in ("train.sbatch", "node.sh")]

# Runs a command as one task on each of two machines, each in a process group of its own, and passes SIGUSR1 and SIGTERM
# on to the groups, as Slurm does.
SRUN = """\
#!/bin/bash
while [[ $1 == --* ]]; do shift; done
tasks=()
for node in 0 1; do
    SLURM_NODEID=$node setsid "$@" &
    tasks+=($!)
done
for name in USR1 TERM; do trap "for task in ${tasks[*]}; do kill -$name -- -\\$task; done" $name; done
echo $$ >"$SLURM_STAND_IN/srun.pid"
worst=0
for task in "${tasks[@]}"; do
    while true; do
        wait "$task"
        code=$?
        kill -0 "$task" 2>/dev/null || break
    done
    ((code > worst)) && worst=$code
done
exit $worst
"""
SCONTROL = """\
#!/bin/bash
echo "$*" >>"$SLURM_STAND_IN/scontrol.log"
if [ "$1" = show ]; then printf 'localhost\\nlocalhost\\n'; fi
"""
# In place of Python: a launcher with one process that leaves with 75 when it gets SIGUSR1, and makes a 1 of that.
LAUNCHER = """\
#!/bin/bash
echo "$*" >"$SLURM_STAND_IN/launched.$SLURM_NODEID"
bash -c 'trap "exit 75" USR1; touch "$SLURM_STAND_IN/ready.$SLURM_NODEID"; for i in {1..200}; do sleep 0.05; done' &
wait $! || exit 1
"""


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment of a job on the stand-in."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("launcher", LAUNCHER)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    own = dict(SLURM_STAND_IN=str(tmp_path), SLURM_SUBMIT_DIR=str(ROOT), SLURM_JOB_ID="4711", SLURM_NNODES="2")
    own |= dict(SLURM_JOB_NODELIST="localhost,localhost", MASTER_PORT=str(distributed.free_port()), NPROC="1")
    return {**os.environ, **own, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": str(tmp_path / "launcher")}


def submit(environment: dict[str, str], *overrides: str) -> "subprocess.Popen[str]":
    command = ["bash", str(SCRIPTS[0]), *overrides]
    options = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return subprocess.Popen(command, env=environment, **options)  # type: ignore[call-overload, no-any-return]


def signal_steps(environment: dict[str, str], number: int) -> None:
    os.kill(int((Path(environment["SLURM_STAND_IN"]) / "srun.pid").read_text()), number)


def wait_for(condition: Callable[[], bool], job: "subprocess.Popen[str]") -> None:
    end = time.monotonic() + HANG_S
    while not condition():
        if job.poll() is not None or time.monotonic() > end:
            pytest.fail(f"the job ended or took too long: {output(job, limit_s=0)}")
        time.sleep(0.02)


def output(job: "subprocess.Popen[str]", limit_s: float = HANG_S) -> str:
    """The text that the job wrote until its end; nothing of it is left running."""
    try:
        out: str = job.communicate(timeout=limit_s)[0]
    except subprocess.TimeoutExpired:
        for process in [*psutil.Process(job.pid).children(recursive=True), job]:
            process.kill()
        pytest.fail(f"the job did not end: {job.communicate()[0]}")
    return out


def are_ready(environment: dict[str, str]) -> bool:
    folder = Path(environment["SLURM_STAND_IN"])
    return all((folder / name).exists() for name in ("ready.0", "ready.1", "srun.pid"))


def signalled(environment: dict[str, str], number: int) -> tuple[int, str]:
    """Exit code and output of a job whose machines get this signal once they work."""
    job = submit(environment, "experiment=x", "job.name=a b")
    wait_for(lambda: are_ready(environment), job)
    if number == signal.SIGTERM:
        job.send_signal(number)  # the batch shell gets it too
    signal_steps(environment, number)
    out = output(job)
    return job.returncode, out


def requeues(environment: dict[str, str]) -> list[str]:
    return [call for call in scontrol_calls(environment) if call.startswith("requeue")]


def scontrol_calls(environment: dict[str, str]) -> list[str]:
    return (Path(environment["SLURM_STAND_IN"]) / "scontrol.log").read_text().splitlines()


def test_the_time_limit_saves_and_queues_the_job_again(slurm: dict[str, str]) -> None:
    code, out = signalled(slurm, signal.SIGUSR1)
    assert code == 75, out
    assert scontrol_calls(slurm) == ["show hostnames localhost,localhost", "requeue 4711"]
    arguments = (Path(slurm["SLURM_STAND_IN"]) / "launched.1").read_text()
    assert "-m torch.distributed.run --nnodes=2 --nproc_per_node=1" in arguments
    assert f"--rdzv_backend=c10d --rdzv_endpoint=localhost:{slurm['MASTER_PORT']}" in arguments
    assert "--rdzv_id=4711.0" in arguments
    assert arguments.endswith("--config=cosmos_predict2/configs/base/config.py -- experiment=x job.name=a b\n")


def test_a_job_that_is_cancelled_stays_away(slurm: dict[str, str]) -> None:
    code, out = signalled(slurm, signal.SIGTERM)
    assert code == 143 and not requeues(slurm), out


def test_a_job_comes_back_a_limited_number_of_times(slurm: dict[str, str]) -> None:
    code, out = signalled({**slurm, "SLURM_RESTART_COUNT": "3", "MAX_REQUEUES": "3"}, signal.SIGUSR1)
    assert code == 75 and "MAX_REQUEUES=3 is reached" in out and not requeues(slurm)


def test_a_failure_is_not_queued_again(slurm: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "launcher").write_text("#!/bin/bash\nexit 1\n")
    job = submit(slurm, "experiment=x")
    out = output(job)
    assert job.returncode == 1 and not requeues(slurm), out


def test_a_wrong_folder_and_missing_overrides_are_told(slurm: dict[str, str], tmp_path: Path) -> None:
    job = submit({**slurm, "SLURM_SUBMIT_DIR": str(tmp_path)}, "experiment=x")
    assert "is not the checkout" in output(job) and job.returncode == 2
    job = submit(slurm)
    assert "usage: sbatch" in output(job) and job.returncode == 2


@pytest.mark.long
def test_two_machines_train_are_stopped_and_go_on(slurm: dict[str, str], tmp_path: Path) -> None:
    slurm |= {"PYTHON": sys.executable, "CONFIG": "tests/project/config.py", "OMP_NUM_THREADS": "1"}
    slurm |= {"IMAGINAIRE_OUTPUT_ROOT": str(tmp_path), "WANDB_MODE": "disabled"}
    quick = ["experiment=restless", "trainer.run_validation=False", "dataloader_train.num_workers=0"]
    log = run_dir(tmp_path) / "stdout.log"
    job = submit(slurm, *quick, "trainer.max_iter=100000")
    wait_for(lambda: log.exists() and "iter 4/" in log.read_text(), job)
    signal_steps(slurm, signal.SIGUSR1)
    out = output(job)
    assert job.returncode == 75, out
    assert scontrol_calls(slurm)[-1] == "requeue 4711"
    stopped = saved(tmp_path)["trainer"]
    assert stopped["world_size"] == 2 and stopped["iteration"] >= 4
    slurm |= {"SLURM_RESTART_COUNT": "1", "MASTER_PORT": str(distributed.free_port())}
    job = submit(slurm, *quick, f"trainer.max_iter={stopped['iteration'] + 3}")
    out = output(job)
    assert job.returncode == 0, out
    assert f"resumed from iter {stopped['iteration']}" in log.read_text()
    assert saved(tmp_path)["trainer"]["iteration"] == stopped["iteration"] + 3
