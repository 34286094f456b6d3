# SPDX-License-Identifier: Apache-2.0
"""Counters, gauges and histograms in the text format of Prometheus."""

import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping

Labels = tuple[tuple[str, str], ...]
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
BATCH_BUCKETS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)

HELP = {
    "reward_requests_total": "requests accepted, by whether they were new",
    "reward_rejects_total": "requests rejected, by reason",
    "reward_clips_total": "clips scored",
    "reward_jobs_total": "jobs settled by the workers of this service, by outcome",
    "reward_worker_starts_total": "starts of worker processes",
    "reward_score_seconds": "a portion of jobs in its worker, by part",
    "reward_batch_jobs": "jobs in a portion",
    "reward_jobs": "jobs in the queue, by state",
    "reward_oldest_job_seconds": "how long the oldest waiting or running job has been there",
    "reward_workers": "worker processes, by state",
    "reward_http_seconds": "requests by path and status; of pulls with wait, the wait is part of it",
}


class Metrics:
    """The numbers of one service; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: dict[str, dict[Labels, float]] = defaultdict(lambda: defaultdict(float))
        self._histograms: dict[str, dict[Labels, list[float]]] = defaultdict(dict)

    def count(self, name: str, by: float = 1.0, **labels: str) -> None:
        with self._lock:
            self._counters[name][tuple(sorted(labels.items()))] += by

    def observe(self, name: str, value: float, **labels: str) -> None:
        buckets = _buckets(name)
        with self._lock:
            row = self._histograms[name].setdefault(tuple(sorted(labels.items())), [0.0] * (len(buckets) + 2))
            for i, bound in enumerate(buckets):
                row[i] += value <= bound
            row[-2] += value
            row[-1] += 1

    def text(self, gauges: Mapping[str, Iterable[tuple[Mapping[str, str], float]]]) -> str:
        """Everything, with gauges that are measured now."""
        lines: list[str] = []
        with self._lock:
            for name, rows in self._counters.items():
                lines += _head(name, "counter")
                lines += [f"{name}{_labels(labels)} {value:g}" for labels, value in sorted(rows.items())]
            for name, histogram in self._histograms.items():
                lines += _head(name, "histogram")
                for labels, row in sorted(histogram.items()):
                    bounds = [*(f"{bound:g}" for bound in _buckets(name)), "+Inf"]
                    for bound, number in zip(bounds, [*row[:-2], row[-1]], strict=True):
                        lines.append(f"{name}_bucket{_labels((*labels, ('le', bound)))} {number:g}")
                    lines += [f"{name}_sum{_labels(labels)} {row[-2]:g}", f"{name}_count{_labels(labels)} {row[-1]:g}"]
        for name, found in gauges.items():
            lines += _head(name, "gauge")
            lines += [f"{name}{_labels(tuple(sorted(labels.items())))} {value:g}" for labels, value in found]
        return "\n".join(lines) + "\n"


def _buckets(name: str) -> tuple[float, ...]:
    return BATCH_BUCKETS if name.endswith("_jobs") else BUCKETS


def _head(name: str, kind: str) -> list[str]:
    return [f"# HELP {name} {HELP.get(name, name)}", f"# TYPE {name} {kind}"]


def _labels(labels: Labels) -> str:
    escaped = [(k, v.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")) for k, v in labels]
    return "{" + ",".join(f'{key}="{value}"' for key, value in escaped) + "}" if labels else ""
