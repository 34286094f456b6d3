# SPDX-License-Identifier: Apache-2.0
import io
import random as python_random

import numpy
import torch

from imaginaire import random


def _draws() -> tuple[float, float, float]:
    return python_random.random(), float(numpy.random.random()), float(torch.rand(()))


def test_a_generator_depends_on_seed_position_and_purpose_only() -> None:
    first = torch.rand(4, generator=random.generator(1, 2, "noise"))
    torch.manual_seed(9)
    assert torch.equal(first, torch.rand(4, generator=random.generator(1, 2, "noise")))
    others = [(2, 2, "noise"), (1, 3, "noise"), (1, 2, "crop")]
    assert all(not torch.equal(first, torch.rand(4, generator=random.generator(*key))) for key in others)


def test_seeds_are_the_same_on_every_machine() -> None:
    assert random.derive_seed(0, 0, "sigma") == 3807261664338610278
    generators = random.Draws(2, [5, 6], seed=1, pass_name="validation").each("sigma")
    expected = [random.derive_seed(1, position, "validation/sigma") for position in (5, 6)]
    assert [each.initial_seed() for each in generators] == expected


def test_state_of_all_generators_goes_through_a_weights_only_file() -> None:
    random.seed_all(3, 0, "test")
    numpy.random.standard_normal()  # leaves a cached second value, which is part of the state
    buffer = io.BytesIO()
    torch.save(random.get_rng_state(), buffer)
    expected = (*_draws(), float(numpy.random.standard_normal()))
    random.set_rng_state(torch.load(io.BytesIO(buffer.getvalue()), weights_only=True))
    assert (*_draws(), float(numpy.random.standard_normal())) == expected


def test_preserved_hides_draws_also_when_an_error_leaves_it() -> None:
    random.seed_all(4, 0, "test")
    expected = _draws()
    random.seed_all(4, 0, "test")
    try:
        with random.preserved():
            _draws()
            raise KeyError
    except KeyError:
        pass
    assert _draws() == expected
