# SPDX-License-Identifier: Apache-2.0
from imaginaire.data.stream import ResumableLoader

__all__ = ["ResumableLoader"]
