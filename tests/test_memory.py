# SPDX-License-Identifier: Apache-2.0
"""What a process that computes on the CPU keeps of the memory that it freed."""

import subprocess

from tests.programs import python

PROGRAM = """
import resource, torch
from imaginaire import memory
memory.keep_freed_memory()
faults = []
for _ in range(6):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(16 << 20)  # 64 MB are 16,384 pages
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(max(faults[2:]))
"""


def test_freed_memory_is_used_again_without_the_kernel() -> None:
    found = subprocess.run([python(), "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert int(found.stdout) < 1000
