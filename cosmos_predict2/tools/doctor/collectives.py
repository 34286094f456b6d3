# SPDX-License-Identifier: Apache-2.0
"""Communication of processes: who is there, whether collectives give the right numbers, and how fast.

Under torchrun every process calls `examine`; without it `start_here` starts two or more and does the same.
"""

import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from imaginaire import distributed
from imaginaire.distributed import places
from imaginaire.errors import ConfigError
from imaginaire.findings import Finding, Level
from imaginaire.training import provenance

LIMIT_S = 60.0  # for one collective, and for all processes to arrive
SIZES = {"gloo": (2**16, 2**20, 2**24), "nccl": (2**20, 2**24, 2**28)}  # bytes of one rank's tensor
_KNOBS = "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the network that joins the machines (ip addr lists them)"


def examine(limit_s: float = LIMIT_S) -> list[Finding]:
    """Findings of this rank; rank 0's list is the whole one. Leaves no process group behind."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        store = _sign_in(rank, world_size, limit_s)
    except ConfigError as error:
        return [Finding("processes/meeting", str(error), "error")]
    hosts = [store.get(f"host{r}").decode() if store.check([f"host{r}"]) else None for r in range(world_size)]
    if missing := [r for r, host in enumerate(hosts) if host is None]:
        came = ", ".join(sorted({host for host in hosts if host is not None}))
        value = f"{places.ranks(missing)} of {world_size} did not arrive in {limit_s:g} s; from {came} the others did"
        return [Finding("processes/meeting", value, "error", "look at the first error of the missing process")]
    findings: list[Finding] = []
    try:
        distributed.init(limit_s, store=dist.distributed_c10d.PrefixStore("doctor", store))
        findings += [*_rank_map(), _barrier(), *_collectives("gloo", torch.device("cpu"))]
        if torch.cuda.is_available():
            findings += _collectives("nccl", distributed.device())
        distributed.barrier("end of the examination", limit_s)
    except (RuntimeError, ConfigError) as error:
        value = f"rank {rank} at {places.here().text}: {str(error).splitlines()[0]}"
        where = places.report()
        findings.append(Finding("processes/communication", value + (where and f"\n{where}"), "error", _KNOBS))
    finally:
        distributed.shutdown()
    return findings


def start_here(arguments: list[str]) -> int:
    """Start the examination on this machine, one process per GPU or two on the CPU; the exit code."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    code = 0
    for size, with_gpus in [(2, False)] if num_gpus == 0 else [(num_gpus, True)] + [(2, False)] * (num_gpus == 1):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={size}"]
        command += ["-m", "scripts.doctor", "--dist", *arguments]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}  # torchrun would set it, with a warning
        if not with_gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        code = max(code, subprocess.run(command, env=environment, cwd=provenance.root(), check=False).returncode)
    return int(code != 0)


def _sign_in(rank: int, world_size: int, limit_s: float) -> Any:
    """The store that all processes meet at, once all have come or the time is over."""
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not port.isdecimal() or not address:
        raise ConfigError(f"MASTER_ADDR={address!r} and MASTER_PORT={port!r} do not say where to meet: use torchrun.")
    is_host = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store: Any = dist.TCPStore(  # type: ignore[attr-defined]
            address, int(port), world_size, is_host, timedelta(seconds=limit_s), wait_for_workers=False
        )
    except dist.DistError as error:
        raise ConfigError(distributed.why_not_joined(error)) from error
    store = dist.distributed_c10d.PrefixStore(f"sign-in{os.environ.get('TORCHELASTIC_RESTART_COUNT', '')}", store)
    store.set(f"host{rank}", socket.gethostname())
    end = time.monotonic() + limit_s
    while not store.check([f"host{r}" for r in range(world_size)]) and time.monotonic() < end:
        time.sleep(0.05)
    return store


def _rank_map() -> list[Finding]:
    """The place of each process, and a comparison of the code that they run."""
    git = provenance.git_state(provenance.root())
    mine = dict(
        host=socket.gethostname(),
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        python=sys.version.split()[0],
        torch=torch.__version__,
        commit=None if git is None else git["commit"],
    )
    all_of_them = distributed.all_gather_object(mine)
    findings = []
    for host in dict.fromkeys(entry["host"] for entry in all_of_them):
        members = [rank for rank, entry in enumerate(all_of_them) if entry["host"] == host]
        devices = ", ".join(sorted({all_of_them[rank]["device"] for rank in members}))
        findings.append(Finding(f"processes/machine {host}", f"{places.ranks(members)} on {devices}"))
    for key in ("python", "torch", "commit", "device"):
        by_value: dict[Any, list[int]] = {}
        for rank, entry in enumerate(all_of_them):
            by_value.setdefault(entry[key], []).append(rank)
        if len(by_value) > 1:
            value = "; ".join(f"{name}: {places.ranks(ranks)}" for name, ranks in by_value.items())
            level: Level = "warning" if key in ("device", "python") else "error"
            findings.append(Finding(f"processes/different {key}", value, level, "install the same on every machine"))
    return findings


def _barrier() -> Finding:
    times = []
    for i in range(20):
        start = time.perf_counter()
        distributed.barrier(f"latency {i + 1} of 20")
        times.append(time.perf_counter() - start)
    return Finding("processes/barrier", f"{statistics.median(times) * 1e3:.2f} ms (median of 20)")


def _collectives(backend: str, device: torch.device) -> list[Finding]:
    """One finding per operation, with its time at every size."""
    cure = "wrong sums come from faulty links or memory: try NCCL_P2P_DISABLE=1, other GPUs, another driver"
    findings = []
    for name, operation in OPERATIONS.items():
        key, speeds = f"collectives over {backend}/{name}", []
        for size in SIZES[backend]:
            with places.at(f"{name} of {_readable(size)} over {backend}"):
                seconds, is_right = _timed(operation, size, device)
            if not is_right:
                findings.append(Finding(key, f"wrong numbers at {_readable(size)}", "error", cure))
                break
            rate = size * operation.share(distributed.world_size()) / seconds / 1e9
            speeds.append(f"{_readable(size)} {seconds * 1e3:.2f} ms ({rate:.2f} GB/s)")
        else:
            findings.append(Finding(key, ", ".join(speeds)))
    return findings


def _timed(operation: "Operation", size: int, device: torch.device) -> tuple[float, bool]:
    """Seconds of the slowest rank, and whether every rank got the right numbers."""
    world_size, rank = distributed.world_size(), distributed.rank()
    run, expected, _ = operation
    # exact in float32, and different in every rank and place
    base = torch.arange(size // 4 // world_size * world_size, dtype=torch.float32).remainder_(1000)
    values = (base + 1000 * rank).to(device)
    is_right = torch.equal(run(values).cpu(), expected(base))
    rounds = 3 if size > 2**22 else 10
    distributed.barrier("timing")
    start = time.perf_counter()
    for _ in range(rounds):
        run(values)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    facts = torch.tensor([(time.perf_counter() - start) / rounds, 0.0 if is_right else 1.0], dtype=torch.float64)
    distributed.all_reduce_(facts, "max")
    return float(facts[0]), float(facts[1]) == 0


def _of_all(base: Tensor) -> Iterator[Tensor]:
    """The values of each rank."""
    return (base + 1000 * rank for rank in range(distributed.world_size()))


def _all_reduce(values: Tensor) -> Tensor:
    out = values.clone()
    dist.all_reduce(out)
    return out


def _all_gather(values: Tensor) -> Tensor:
    out = values.new_empty(values.numel() * distributed.world_size())
    dist.all_gather(list(out.chunk(distributed.world_size())), values)
    return out


def _all_to_all(values: Tensor) -> Tensor:
    out = torch.empty_like(values)
    dist.all_to_all_single(out, values)
    return out


def _all_to_all_expected(base: Tensor) -> Tensor:
    return torch.cat([values.chunk(distributed.world_size())[distributed.rank()] for values in _of_all(base)])


def _broadcast(values: Tensor) -> Tensor:
    out = values.clone()
    dist.broadcast(out, src=0)
    return out


class Operation(NamedTuple):
    run: Callable[[Tensor], Tensor]
    expected: Callable[[Tensor], Tensor]  # of this rank, from the numbers of rank 0
    share: Callable[[int], float]  # bytes that pass one link per byte of one rank's tensor, for n ranks


OPERATIONS = {
    "all-reduce": Operation(_all_reduce, lambda base: sum(_of_all(base), 0 * base), lambda n: 2 * (n - 1) / n),
    "all-gather": Operation(_all_gather, lambda base: torch.cat([*_of_all(base)]), lambda n: n - 1.0),
    "all-to-all": Operation(_all_to_all, _all_to_all_expected, lambda n: (n - 1) / n),
    "broadcast": Operation(_broadcast, lambda base: base, lambda n: float(n > 1)),
}


def _readable(size: int) -> str:
    return f"{size // 2**20} MiB" if size >= 2**20 else f"{size // 2**10} KiB"
