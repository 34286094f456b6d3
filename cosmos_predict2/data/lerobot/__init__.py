# SPDX-License-Identifier: Apache-2.0
"""Data sets in the LeRobot format, versions 2.0, 2.1 and 3.0, read and written without the lerobot package."""
