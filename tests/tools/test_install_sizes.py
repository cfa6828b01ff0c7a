"""`tools.install_sizes`: what it counts of an environment."""

import pytest

from tools.install_sizes import DEFAULT_KINDS, KINDS, main, weight


def test_files_without_bytecode_and_distributions_are_counted(tmp_path):
    (tmp_path / "one" / "__pycache__").mkdir(parents=True)
    (tmp_path / "one" / "__init__.py").write_bytes(bytes(101))
    (tmp_path / "one" / "__pycache__" / "__init__.cpython-311.pyc").write_bytes(bytes(1000))
    (tmp_path / "one-1.0.dist-info").mkdir()
    (tmp_path / "one-1.0.dist-info" / "METADATA").write_bytes(b"Name: one\n")
    assert weight(tmp_path) == (1, 111)


def test_nothing_is_installed_for_an_unknown_kind(monkeypatch, capsys):
    assert set(DEFAULT_KINDS) < set(KINDS)
    monkeypatch.setattr("sys.argv", ["install_sizes", "client", "servers"])
    with pytest.raises(SystemExit):
        main()
    assert "servers: is no kind of installation" in capsys.readouterr().err
