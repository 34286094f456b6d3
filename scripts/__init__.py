# SPDX-License-Identifier: Apache-2.0
import imaginaire  # noqa: F401  (first: outside the environment it explains how to enter it)
