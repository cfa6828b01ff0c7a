"""The table of 4-bit formats: it has every format, and ours has the least error of those with as many bits."""

import sys

from bench import int4_error


def test_the_format_of_experts_has_the_least_error_of_its_size_for_weights_with_large_ones(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["int4_error", "--rows", "16"])
    assert int4_error.main() == 0
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()[2:]]
    errors = {name: (float(bits), float(normal), float(students)) for name, bits, normal, students in cells}
    assert list(errors) == [name for name, *_ in int4_error.FORMATS]
    bits, normal, students = errors.pop("ours: its levels, groups of 64")
    assert 0.09 < normal < 0.094
    assert all(students < other for size, _, other in errors.values() if size == bits)
