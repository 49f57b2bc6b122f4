import numpy as np
import pytest

from collapipe.simulation.radio_propagation import (
    interference_density,
    noise_density,
    path_gain,
    positions_in_disc,
    rayleigh_fading,
)


def test_path_gain_falls_by_ten_times_the_exponent_in_db_a_decade() -> None:
    positions = np.array([[0.0, 0.0], [10.0, 0.0], [0.0, 100.0], [0.01, 0.0]])
    gains = path_gain(positions, reference_loss_db=40.0, exponent=3.0)
    # Below one metre, it is the gain at one metre.
    assert 10 * np.log10(gains[0, 1:]) == pytest.approx([-70, -100, -40])
    assert np.array_equal(gains, gains.T)


def test_positions_are_uniform_over_the_disc() -> None:
    positions = positions_in_disc(np.random.default_rng(0), 20_000, 10.0, np.array([5.0, -3.0]))
    radii = np.hypot(*(positions - [5.0, -3.0]).T)
    assert radii.max() <= 10.0
    assert np.mean(radii < 5.0) == pytest.approx(0.25, abs=0.01)


def test_rayleigh_gain_is_exponential_and_the_same_both_ways() -> None:
    rng, pairs = np.random.default_rng(0), np.triu_indices(300, 1)
    fading = rayleigh_fading(rng, 300, branches=1)
    assert np.array_equal(fading, fading.T)
    one = fading[pairs]
    assert one.mean() == pytest.approx(1.0, abs=0.02)
    assert np.mean(one < 0.1) == pytest.approx(1 - np.exp(-0.1), abs=0.01)
    eight = rayleigh_fading(rng, 300, branches=8)[pairs]
    assert eight.mean() == pytest.approx(1.0, abs=0.02)
    assert eight.var() == pytest.approx(one.var() / 8, rel=0.1)


def test_noise_density_is_the_textbook_value() -> None:
    # The textbook gives -174 dBm/Hz at 290 K.
    assert 10 * np.log10(noise_density(0.0, 290.0) * 1e3) == pytest.approx(-173.98, abs=0.01)
    assert noise_density(10.0, 290.0) == pytest.approx(10 * noise_density(0.0, 290.0))


def test_interference_comes_from_other_clusters_only() -> None:
    gains = np.array([[0.0, 0.5, 0.1], [0.5, 0.0, 0.2], [0.1, 0.2, 0.0]])
    radiated = np.array(
        [[2.0, 0.0, 0.0], [0.0, 0.0, 4.0]]
    )  # host 0 transmits for cluster 0, host 2 for cluster 1
    heard = interference_density(gains, radiated, bandwidth_hz=10.0)
    assert heard[0] == pytest.approx([4 * 0.1 / 10, 4 * 0.2 / 10, 0.0])
    assert heard[1] == pytest.approx([0.0, 2 * 0.5 / 10, 2 * 0.1 / 10])
