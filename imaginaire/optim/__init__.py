# SPDX-License-Identifier: Apache-2.0
from imaginaire.optim.adamw import fused_adamw

__all__ = ["fused_adamw"]
