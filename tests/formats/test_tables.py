"""Wide .csv tables: the same text but for the gaps."""

import warnings

import numpy as np
import pandas as pd
import pytest

from gpytorch_gaps.formats import open_file, tables

NAN = float("nan")


def table(tmp_path, text, **options):
    path = tmp_path / "in.csv"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return open_file(path, **options)


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


def written(tmp_path, opened, value=0.5, **options):
    filled = opened.data.where(opened.data.isna(), opened.data + 1e-9).fillna(value)
    opened.write(filled, tmp_path / "out.csv", **options)
    return (tmp_path / "out.csv").read_bytes().decode()


# -- the text stays --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("time,a,b\n1,1.50,\n2,NA,-0\n", "time,a,b\n1,1.50,0.5\n2,0.5,-0\n"),
        ("time,a\n1,nan\n2,1e3", "time,a\n1,0.5\n2,1e3"),  # no line end at the end
        ("time;a\r\n1; 2.0 \r\n2;\r\n", "time;a\r\n1; 2.0 \r\n2;0.5\r\n"),
        ("time\ta\r1\t\r2\t1\r", "time\ta\r1\t0.5\r2\t1\r"),
        ('"","a"\n"x",NA\n"y","1.0"\n', '"","a"\n"x",0.5\n"y","1.0"\n'),  # as R writes them
        ('name,"a, b",c\n"x ""1""",1,\n"y\nz",,2\n', 'name,"a, b",c\n"x ""1""",1,0.5\n"y\nz",0.5,2\n'),
        ("\n\ntime,a\n\n1,\n\n\n2,3\n\n", "\n\ntime,a\n\n1,0.5\n\n\n2,3\n\n"),
        ('a\n1\n""\n3\n', "a\n1\n0.5\n3\n"),
        ("time,a,note\n1,,hot\n2,3,\n", "time,a,note\n1,0.5,hot\n2,3,\n"),
        ("\ufefftime,a\n1,\n", "\ufefftime,a\n1,0.5\n"),
        ("time,Größe °C\n1,\n", "time,Größe °C\n1,0.5\n"),
        ("001,2\n007,\n", "001,2\n007,0.5\n"),
    ],
)
def test_everything_but_the_gaps_is_written_as_it_was(tmp_path, before, after):
    opened = table(tmp_path, before)
    assert written(tmp_path, opened) == after
    assert names(tmp_path) == ["in.csv", "out.csv"]


def test_fills_are_written_to_the_last_digit(tmp_path):
    opened = table(tmp_path, "time,a\n1,0.1\n2,\n")
    text = written(tmp_path, opened, value=1 / 3)
    assert float(text.splitlines()[2].split(",")[1]) == 1 / 3


def test_gaps_that_were_not_filled_stay(tmp_path):
    opened = table(tmp_path, "time,a,b\n1,NA,\n2,1,2\n")
    opened.write(opened.data.fillna({"b": 4.0}), tmp_path / "out.csv")
    assert (tmp_path / "out.csv").read_text() == "time,a,b\n1,NA,4.0\n2,1,2\n"


def test_lossless_is_every_number_as_it_is(tmp_path):
    opened = table(tmp_path, "time,a,note,b\n1,1.50,x,\n2,,y,2\n")
    filled = pd.DataFrame([[0.25, NAN], [7.0, 2.0]])
    opened.write(filled, tmp_path / "out.csv", lossless=True)
    assert (tmp_path / "out.csv").read_text() == "time,a,note,b\n1,0.25,x,nan\n2,7.0,y,2\n"


def test_a_gap_value(tmp_path):
    opened = table(tmp_path, "time,a,b\n1,-99,1\n2,-99.0,\n", gap_value=-99)
    np.testing.assert_array_equal(opened.data, [[NAN, 1], [NAN, NAN]])
    opened.write(pd.DataFrame([[-99.0, 0.0], [NAN, 8.0]]), tmp_path / "out.csv")
    again = open_file(tmp_path / "out.csv", gap_value=-99)
    np.testing.assert_allclose(again.data, [[-99, 1], [NAN, 8]], rtol=1e-15)
    assert (tmp_path / "out.csv").read_text().splitlines()[2] == "2,-99.0,8.0"


# -- what is the index, what are the series --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "index"),
    [
        ("depth,a\n1.5,1\n2.5,2\n10.12,3\n", [1.5, 2.5, 10.12]),  # no dates
        ("Year ,a\n2001,1\n2002,2\n", [2001, 2002]),
        (",a\n5,1\n3,2\n", [5, 3]),
        ("station,a\nx,1\ny,2\n", ["x", "y"]),
        ("a,b\n1,2\n1,2\n", [0, 1]),
    ],
)
def test_an_index(tmp_path, text, index):
    assert table(tmp_path, text).data.index.tolist() == index


@pytest.mark.parametrize(
    "texts",
    [
        ["2001-01-30", "2001-02-01", "2001-02-02"],
        ["20010130", "20010201", "20010202"],
        ["2001/01/30", "2001/02/01", "2001/02/02"],
        ["30.01.2001", "01.02.2001", "02.02.2001"],
        ["30/01/2001", "01/02/2001", "02/02/2001"],
        ["01/30/2001", "02/01/2001", "02/02/2001"],
        ["2001-01-30T00:00:00Z", "2001-02-01T02:00:00+02:00", "2001-02-01T22:00-02:00"],
    ],
)
def test_dates(tmp_path, texts):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opened = table(tmp_path, "date,a\n" + "".join(f"{text},\n" for text in texts))
    assert opened.data.index.tolist() == pd.to_datetime(["2001-01-30", "2001-02-01", "2001-02-02"]).tolist()
    assert opened.data.index.name == "date"
    assert written(tmp_path, opened) == "date,a\n" + "".join(f"{text},0.5\n" for text in texts)


def test_columns(tmp_path):
    opened = table(tmp_path, "time,0,5,2.5,note\n1,1,,3,x\n2,,,4,y\n")
    assert opened.data.columns.tolist() == [0, 5, 2.5]
    np.testing.assert_array_equal(opened.data, [[1, NAN, 3], [NAN, NAN, 4]])
    assert opened.data.dtypes.eq("float64").all()


def test_one_column(tmp_path):
    opened = table(tmp_path, "time,a,b\n1,,\n2,,4\n", variable="b")
    assert opened.data.columns.tolist() == ["b"]
    assert written(tmp_path, opened) == "time,a,b\n1,,0.5\n2,,4\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no rows below a header, expected a header line and numbers"),
        ("\n\n", "holds no rows below a header"),
        ("time,a\n", "holds no rows below a header"),
        ("time,a\n1,2\n3\n", "row 3 has 1 cells, expected 2, as in the header"),
        ("time,a\n1,2,3\n", "row 2 has 3 cells, expected 2"),
        ("time,a\n1,2\n2,hot\n", "column 'a' has 'hot' in row 3, expected a number or a gap"),
        ("time,a\n1,2\n1,3\n", "the index, column 'time', has '1' again in row 3; expected a wide table"),
        ("time,a\n1,2\n,3\n", "the index, column 'time', has a gap in row 3, expected none"),
        ("time,note\n1,x\n", "holds no column of numbers, only time, note"),
        ("time,a,a\n1,2,3\n", "the header has 'a' twice, expected each column once"),
        ('time,a\n1,"2\n', r"not readable as a table of text in UTF-8 \(unexpected end of data"),
        ('time,a\n1,"2"3\n', r"not readable as a table of text in UTF-8"),
        (b"time,a\n1,\xff\n", r"not readable as a table of text in UTF-8"),
        ("time,a\n1,\0\n", r"not readable as a table of text in UTF-8 \(it is binary\)"),
        (b"PK\x03\x04\x00\x00", r"not readable as a table of text in UTF-8 \(it is binary\)"),
    ],
)
def test_what_is_no_wide_table_is_refused(tmp_path, text, message):
    with pytest.raises(ValueError, match=rf"in\.csv: {message}"):
        table(tmp_path, text)


def test_a_column_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"in\.csv: got the variable 'c', expected one of a, b"):
        table(tmp_path, "time,a,b,note\n1,2,3,x\n", variable="c")


@pytest.mark.parametrize("error", [OSError("no space left on device"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch, error):
    opened = table(tmp_path, "time,a\n1,\n")
    (tmp_path / "out.csv").write_text("old")

    def half(path, write):
        def and_fail(stream):
            stream.write(b"half")
            raise error

        atomic_write(path, and_fail)

    atomic_write = tables.atomic_write
    monkeypatch.setattr(tables, "atomic_write", half)
    with pytest.raises(type(error)):
        opened.write(opened.data.fillna(1.0), tmp_path / "out.csv")
    assert (tmp_path / "out.csv").read_text() == "old"
    assert names(tmp_path) == ["in.csv", "out.csv"]
