from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.image import imread

from deploy.curve import draw_in_terminal, in_bins, moving_mean, sparkline, write_png


def test_sparkline_has_a_block_a_value_on_a_scale_from_0_to_1() -> None:
    assert sparkline([0.0, 0.25, 0.5, 0.75, 1.0], width=40) == "▁▂▄▆█"


def test_sparkline_leaves_gaps_where_nothing_is_known() -> None:
    assert sparkline([1.0, None, 1.0], width=40) == "█ █"
    assert sparkline([], width=40) == ""


def test_sparkline_of_larger_rewards_is_scaled_to_the_largest() -> None:
    assert sparkline([2.0, 4.0], width=40) == "▄█"
    assert sparkline([-1.0, 1.0], width=40) == "▁█"


def test_bins_average_neighbours_and_skip_what_is_unknown() -> None:
    assert in_bins([0.0, 1.0, 0.5, None, None, None], num_bins=3) == [0.5, 0.5, None]
    assert in_bins([0.0, 1.0], num_bins=3) == [0.0, 1.0]


def test_moving_mean_is_over_five_known_values_around_each() -> None:
    means = moving_mean([1.0, 0.0, None, 0.5, 0.5, 0.5, 1.0])
    assert means[2] is None
    assert [mean for mean in means if mean is not None] == pytest.approx([0.5, 0.5, 0.5, 0.5, 0.625, 2 / 3])


def test_terminal_curve_has_axes_and_a_column_a_version() -> None:
    curve = [None, 0.0, 0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert draw_in_terminal(curve, width=27, height=4).splitlines() == [
        " 1.00 ┤          ██████████",
        "      │        ████████████",
        " 0.50 ┤      ██████████████",
        " 0.00 ┤  ▁▁████████████████",
        "      └────────────────────",
        "       0  policy version  9",
    ]


def test_terminal_curve_of_many_versions_fits_the_width() -> None:
    lines = draw_in_terminal([n / 499 for n in range(500)], width=60, height=5).splitlines()
    assert max(len(line) for line in lines) == 60
    assert lines[-1].endswith("499")


def test_terminal_curve_of_nothing_is_empty() -> None:
    assert draw_in_terminal([], width=80) == draw_in_terminal([None, None], width=80) == ""


def test_picture_shows_the_curve(tmp_path: Path) -> None:
    def num_blue(name: str, curve: list[float | None]) -> int:
        write_png(curve, tmp_path / "reports" / name, title=name)
        red, blue = (imread(tmp_path / "reports" / name)[:, :, channel] for channel in (0, 2))
        assert red.shape == (540, 960)
        return int((blue - red > 0.3).sum())

    legend_only = num_blue("empty.png", [None, None])
    assert num_blue("short.png", [0.2, None, 0.4]) > legend_only + 100
    assert num_blue("long.png", [n / 40 for n in range(40)]) > legend_only + 2000
