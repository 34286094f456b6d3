# SPDX-License-Identifier: Apache-2.0
from imaginaire.config.schema import Config, Section

__all__ = ["Config", "Section"]
