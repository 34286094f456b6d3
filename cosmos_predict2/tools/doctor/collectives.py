# SPDX-License-Identifier: Apache-2.0
"""Whether processes can talk: who is there, whether collectives give the right numbers, and how fast.

Under torchrun every process calls `examine`; without it `start_here` starts two or more and does the same.
"""

import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

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
SKEW_S = 1.0  # clocks that differ by more make logs hard to compare
LOST_SKEW_S = 300.0  # and object stores refuse requests
_ROUNDS = 5
_KNOBS = "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the network that joins the machines (ip addr lists them)"


def examine(limit_s: float = LIMIT_S) -> list[Finding]:
    """What this rank found; rank 0's list is the whole one. Leaves no process group behind."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        store = _sign_in(rank, world_size, limit_s)
    except ConfigError as error:
        return [Finding("processes/meeting", str(error), "error")]
    hosts = [store.get(f"host{r}").decode() if store.check([f"host{r}"]) else None for r in range(world_size)]
    if missing := [r for r, host in enumerate(hosts) if host is None]:
        came = ", ".join(sorted({host for host in hosts if host is not None}))
        value = (
            f"{places.ranks(missing)} of {world_size} did not arrive within {limit_s:g} s; from {came} the others did"
        )
        cure = "look at the first error of the missing process, and whether its machine was started with this address"
        return [Finding("processes/meeting", value, "error", cure)]
    findings: list[Finding] = []
    try:
        distributed.init(limit_s, store=dist.distributed_c10d.PrefixStore("doctor", store))
        for look in (_rank_map, _barriers, _clocks, *_backends()):
            findings += look()
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


def _backends() -> list[Callable[[], list[Finding]]]:
    looks = [lambda: _collectives("gloo", torch.device("cpu"))]
    if torch.cuda.is_available():
        looks.append(lambda: _collectives("nccl", distributed.device()))
    return looks


def _rank_map() -> list[Finding]:
    """Which process is where, and whether all run the same code."""
    git = provenance.git_state(provenance.root())
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    mine = dict(
        host=socket.gethostname(),
        device=device,
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


def _barriers() -> list[Finding]:
    times = []
    for i in range(20):
        start = time.perf_counter()
        distributed.barrier(f"latency {i + 1} of 20")
        times.append(time.perf_counter() - start)
    return [Finding("processes/barrier", f"{statistics.median(times) * 1e3:.2f} ms (median of 20)")]


def _clocks() -> list[Finding]:
    """How far the clocks are from that of rank 0: half a round trip is taken off, as time servers do."""
    rank, world_size = distributed.rank(), distributed.world_size()
    if world_size == 1:
        return []
    offsets = [0.0]
    with places.at("comparing clocks"):
        for other in range(1, world_size):
            if rank == 0:
                offsets.append(min(_round_trip(other) for _ in range(_ROUNDS))[1])
            elif rank == other:
                for _ in range(_ROUNDS):
                    dist.recv(torch.zeros(1, dtype=torch.float64), src=0)
                    dist.send(torch.tensor([time.time()], dtype=torch.float64), dst=0)
    if rank != 0:
        return []
    worst = max(range(world_size), key=lambda r: abs(offsets[r]))
    return [clock_finding(worst, offsets[worst])]


def _round_trip(other: int) -> tuple[float, float]:
    """(duration, offset of the other clock)."""
    reply = torch.zeros(1, dtype=torch.float64)
    start = time.time()
    dist.send(torch.zeros(1, dtype=torch.float64), dst=other)
    dist.recv(reply, src=other)
    end = time.time()
    return end - start, float(reply) - (start + end) / 2


def clock_finding(rank: int, offset: float) -> Finding:
    value = f"the largest difference is {abs(offset) * 1e3:.1f} ms, of rank {rank}"
    level: Level = "error" if abs(offset) > LOST_SKEW_S else "warning" if abs(offset) > SKEW_S else "note"
    return Finding("processes/clocks", value, level, "" if level == "note" else "start a time service (chrony, ntpd)")


def _collectives(backend: str, device: torch.device) -> list[Finding]:
    """All operations at several sizes, as one finding per operation."""
    findings = []
    for operation, (run, share) in OPERATIONS.items():
        speeds, wrong = [], None
        for size in SIZES[backend]:
            place = f"{operation} of {_readable(size)} over {backend}"
            with places.at(place):
                seconds, is_right = _timed(run, size, device)
            if not is_right:
                wrong = _readable(size)
                break
            moved = size * share(distributed.world_size())
            speeds.append(
                f"{_readable(size)} {seconds * 1e3:.2f} ms" + (f" ({moved / seconds / 1e9:.2f} GB/s)" if moved else "")
            )
        area = f"collectives over {backend}"
        if wrong is None:
            findings.append(Finding(f"{area}/{operation}", ", ".join(speeds)))
            continue
        cure = "wrong sums come from faulty links or memory: try NCCL_P2P_DISABLE=1, other GPUs, another driver"
        findings.append(Finding(f"{area}/{operation}", f"wrong numbers at {wrong}", "error", cure))
    return findings


def _timed(run: Callable[[Tensor], Tensor], size: int, device: torch.device) -> tuple[float, bool]:
    """Seconds of the slowest rank, and whether every rank got the right numbers."""
    world_size, rank = distributed.world_size(), distributed.rank()
    count = size // 4 // world_size * world_size
    # exact in float32, and different in every rank and place
    values = torch.arange(count, device=device, dtype=torch.float32).remainder_(1000).add_(rank * 1000)
    out = run(values)
    is_right = torch.equal(out.cpu(), _expected(run, count))
    _synchronise(device)
    rounds = 3 if size > 2**22 else 10
    distributed.barrier("timing")
    start = time.perf_counter()
    for _ in range(rounds):
        run(values)
    _synchronise(device)
    facts = torch.tensor([(time.perf_counter() - start) / rounds, 0.0 if is_right else 1.0], dtype=torch.float64)
    distributed.all_reduce_(facts, "max")
    return float(facts[0]), float(facts[1]) == 0


def _expected(run: Callable[[Tensor], Tensor], count: int) -> Tensor:
    """What this rank should get, computed without any other."""
    world_size, rank = distributed.world_size(), distributed.rank()
    base = torch.arange(count, dtype=torch.float32).remainder_(1000)
    if run is _all_reduce:
        return base * world_size + 1000 * sum(range(world_size))
    if run is _broadcast:
        return base
    of_all = [base + 1000 * r for r in range(world_size)]
    if run is _all_gather:
        return torch.cat(of_all)
    return torch.cat([values.chunk(world_size)[rank] for values in of_all])


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


def _broadcast(values: Tensor) -> Tensor:
    out = values.clone()
    dist.broadcast(out, src=0)
    return out


# operation -> (call, bytes that pass one link per byte of one rank's tensor, for n ranks)
OPERATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[int], float]]] = {
    "all-reduce": (_all_reduce, lambda n: 2 * (n - 1) / n),
    "all-gather": (_all_gather, lambda n: n - 1.0),
    "all-to-all": (_all_to_all, lambda n: (n - 1) / n),
    "broadcast": (_broadcast, lambda n: float(n > 1)),
}


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _readable(size: int) -> str:
    return f"{size // 2**20} MiB" if size >= 2**20 else f"{size // 2**10} KiB"
