# SPDX-License-Identifier: Apache-2.0
"""Robots of public simulators, on which the way from recordings to a better policy is measured."""
