import hashlib
import math

import numpy as np
import pytest
from scipy import stats

from collapipe.stage_runtime.gaussian_noise import GaussianNoise

KEY = bytes(range(32))


def test_bits_are_those_of_every_other_processor() -> None:
    values = GaussianNoise(KEY).draw(100_000)
    digest = hashlib.sha256(values.astype("<f8").tobytes()).hexdigest()
    assert digest == "9d2d6b8a2d2007a5af69b6a13a4828cbfb4104ab85999352d4bb5c383abbefd6"


def test_values_follow_the_normal_distribution() -> None:
    values = GaussianNoise(KEY).draw(1_000_000)
    assert stats.kstest(values, "norm").pvalue > 0.01
    for threshold in (1, 2, 3, 4):
        expected = len(values) * math.erfc(threshold / math.sqrt(2))
        found = np.count_nonzero(abs(values) > threshold)
        assert found == pytest.approx(expected, abs=5 * math.sqrt(expected))


def test_values_are_independent() -> None:
    values = GaussianNoise(KEY).draw(1_000_000)
    limit = 5 / math.sqrt(len(values))
    for lag in (1, 2, 3):
        for these in (values, values**2):
            assert abs(np.corrcoef(these[:-lag], these[lag:])[0, 1]) < limit


def test_sequence_does_not_depend_on_the_sizes_of_its_parts() -> None:
    noise = GaussianNoise(KEY)
    parts = [noise.draw(count) for count in (1, 0, 70_000, 3, 200_000)]
    assert np.array_equal(np.concatenate(parts), GaussianNoise(KEY).draw(270_004))


def test_another_key_gives_other_values() -> None:
    one, other = (GaussianNoise(key).draw(1000) for key in (KEY, KEY[::-1]))
    assert not np.isin(one, other).any()
