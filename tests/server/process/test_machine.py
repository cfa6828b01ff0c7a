"""The names of processors in reports."""

from pathlib import Path

from kestrel_grpc.process.machine import machine_facts, processors


def test_processors_have_the_name_that_the_system_reports(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor : 0\nmodel name : A Processor 7\nmodel name : A Processor 7\n")
    name, number, word = processors(tmp_path).replace(",", "").rsplit(" ", 2)
    assert name == "A Processor 7"
    assert int(number) >= 1
    assert word == ("processor" if number == "1" else "processors")


def test_a_system_that_reports_no_name_has_its_architecture(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("BogoMIPS : 50.00\n")
    assert not processors(tmp_path).startswith(",")
    assert not processors(tmp_path / "none").startswith(",")
    assert machine_facts()["processors"] == processors()
