# SPDX-License-Identifier: Apache-2.0
import cosmos_predict2  # noqa: F401  (knows the names that published code imports from modules of this package)
