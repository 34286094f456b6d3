# SPDX-License-Identifier: Apache-2.0
from cosmos_predict2.data.toy.videos import ToyWorldStates, ToyWorldVideos

__all__ = ["ToyWorldStates", "ToyWorldVideos"]
