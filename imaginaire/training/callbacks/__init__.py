# SPDX-License-Identifier: Apache-2.0
"""What watches and adjusts a training run between the trainer's lines."""

from imaginaire.training.callbacks.base import Callback, CallbackGroup, EveryN

__all__ = ["Callback", "CallbackGroup", "EveryN"]
