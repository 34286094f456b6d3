# SPDX-License-Identifier: Apache-2.0
"""Callbacks: they watch and adjust a training run between the trainer's lines."""

from imaginaire.training.callbacks.base import Callback, CallbackGroup, EveryN, SideChannel

__all__ = ["Callback", "CallbackGroup", "EveryN", "SideChannel"]
