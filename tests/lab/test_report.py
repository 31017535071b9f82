"""Figures and tables: colours, byte-stable files, writes that are all or nothing."""

import os
import re

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest

from sparseattn.lab import report
from sparseattn.lab.report import RIVAL_COLOURS, colour, panels, save_figure, save_table, use_style

matplotlib.use("Agg")
pd = pytest.importorskip("pandas")


@pytest.fixture(autouse=True)
def style():
    with matplotlib.rc_context():
        use_style()
        yield


def draw():
    figure, axes = panels(1, 2)
    axes[0].plot(np.arange(5), np.arange(5) ** 2, color=colour("hept"), label="$n^2$")
    axes[1].scatter(*np.random.default_rng(0).random((2, 50)), color=colour("exact"))
    axes[0].legend()
    return figure


def frame():
    return pd.DataFrame({"n": [1, 2], "error": [1 / 3, 1e-17], "name": ["a, b", "≤"]})


def test_two_saves_give_the_same_bytes(tmp_path):
    for name in ("one", "two"):
        save_figure(draw(), tmp_path / f"{name}.png")
    first, second = ((tmp_path / f"{n}.png").read_bytes() for n in ("one", "two"))
    assert first == second and first.startswith(b"\x89PNG")
    assert matplotlib.__version__.encode() not in first
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one.png", "two.png"]


def test_png_has_150_dpi_and_the_figure_is_closed(tmp_path):
    figure = draw()
    assert save_figure(figure, tmp_path / "deep/er/one.png") is figure
    assert not plt.fignum_exists(figure.number)
    height, width, _ = plt.imread(tmp_path / "deep/er/one.png").shape
    assert (width, height) == tuple((figure.get_size_inches() * 150).astype(int))


def test_panels():
    for rows, columns in ((1, 1), (1, 3), (2, 2)):
        figure, axes = panels(rows, columns, width=2, height=1)
        assert axes.shape == (rows * columns,)
        assert tuple(figure.get_size_inches()) == (2 * columns, rows)
        plt.close(figure)


@pytest.mark.parametrize("count,rows,columns", [(0, 1, 1), (1, 1, 1), (3, 1, 3), (5, 2, 3)])
def test_panels_in_rows(count, rows, columns):
    figure, axes = panels(columns=3, count=count, width=2, height=1)
    assert tuple(figure.get_size_inches()) == (2 * columns, rows)
    assert [axis.axison for axis in axes] == [i < count for i in range(rows * columns)]
    plt.close(figure)


def test_style_is_set():
    assert matplotlib.rcParams["savefig.dpi"] == 150 and not matplotlib.rcParams["axes.spines.top"]


def test_colours():
    for method in "exact dense hept hept-union rff or-only or-and grid zero random none".split():
        assert re.fullmatch("#[0-9a-fA-F]{6}", colour(method))
    compared = [colour(m) for m in ("exact", "hept", "hept-union", "rff", "or-only", "grid", "zero")]
    assert len(set(compared)) == len(compared)
    assert colour("smyrf") == colour("reformer") and len(set(RIVAL_COLOURS.values())) == len(RIVAL_COLOURS) == 14
    for unknown in ("HEPT", "", "flash"):
        with pytest.raises(ValueError, match=f"method is {unknown!r}; known: .*hept"):
            colour(unknown)


def test_table_keeps_every_digit(tmp_path):
    table = frame()
    assert save_table(table, tmp_path / "deep/table") is table
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "deep/table.csv"), table, check_exact=True)
    assert sorted(p.name for p in (tmp_path / "deep").iterdir()) == ["table.csv", "table.md"]
    first = (tmp_path / "deep/table.csv").read_bytes()
    save_table(frame(), tmp_path / "deep/table")
    assert (tmp_path / "deep/table.csv").read_bytes() == first


@pytest.mark.parametrize("name", ["table", "table.v2"])
def test_markdown_is_rounded_and_named_alike(tmp_path, name):
    save_table(frame(), tmp_path / name, digits=2)
    lines = (tmp_path / f"{name}.md").read_text(encoding="utf-8").splitlines()
    assert (tmp_path / f"{name}.csv").exists()
    assert "0.33 " in lines[2] and "0.333" not in lines[2] and "≤" in lines[3]


def test_bars_in_text_do_not_break_a_markdown_table(tmp_path):
    frame = pd.DataFrame({"claim": ["exp(|x|^2)", "b"], "n": [1, 2]})
    report.save_table(frame, tmp_path / "bars")
    rows = (tmp_path / "bars.md").read_text().splitlines()
    assert len({line.replace("\\|", "").count("|") for line in rows}) == 1
    assert (pd.read_csv(tmp_path / "bars.csv")["claim"] == frame["claim"]).all()


@pytest.mark.parametrize("index", [False, True])
def test_index(tmp_path, index):
    save_table(frame().set_index("name"), tmp_path / "table", index=index)
    assert ("name" in (tmp_path / "table.csv").read_text()) == index
    assert ("name" in (tmp_path / "table.md").read_text()) == index


def test_writes_that_fail_leave_the_old_files(tmp_path, monkeypatch):
    save_figure(draw(), tmp_path / "figure.png")
    save_table(frame(), tmp_path / "table")
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    for write in (
        lambda: save_figure(panels()[0], tmp_path / "figure.png"),
        lambda: save_table(frame()[:1], tmp_path / "table"),
    ):
        with pytest.raises(OSError, match="disk full"):
            write()
    after = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    assert {n: after[n] for n in before} == before
    plt.close("all")


def test_exports():
    assert set(report.__all__) == {"RIVAL_COLOURS", "use_style", "panels", "colour", "save_figure", "save_table"}
