# SPDX-License-Identifier: Apache-2.0
from cosmos_predict2.checkpoints.card import read_card as read_card
