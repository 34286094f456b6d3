# SPDX-License-Identifier: Apache-2.0
from cosmos_predict2.toy_world.episodes import Episodes as Episodes
from cosmos_predict2.toy_world.episodes import make_episodes as make_episodes
from cosmos_predict2.toy_world.rendering import render as render
from cosmos_predict2.toy_world.world import ToyWorld as ToyWorld
