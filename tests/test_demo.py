import pytest

from gpytorch_gaps.__main__ import main


def test_demo_solves_by_every_method_and_writes_a_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "pictures" / "demo.png"
    assert main(["demo", "--output", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    for method in ("auto", "fill", "ignore", "penalize", "spectral", "cholesky"):
        assert method in printed
    assert "95 % intervals cover" in printed
    assert str(picture) in printed


def test_a_missing_command_is_an_error(capsys):
    with pytest.raises(SystemExit):
        main([])
    assert "demo" in capsys.readouterr().err
