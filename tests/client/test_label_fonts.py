"""Fonts for labels in any script."""

import io
from pathlib import Path
from typing import cast

import pytest
from PIL import ImageFont

from kestrel_client.label_fonts import LabelFonts


@pytest.fixture
def font_file(tmp_path: Path) -> Path:
    """An installed font: that of Pillow, as a file."""
    path = tmp_path / "installed.ttf"
    own = cast("ImageFont.FreeTypeFont", ImageFont.load_default(10))
    path.write_bytes(cast("io.BytesIO", own.path).getvalue())
    return path


def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *lines: str, status: int = 0) -> Path:
    """Put a program `fc-match` first, which notes its arguments and prints these lines. Returns the notes."""
    program, notes = tmp_path / "fc-match", tmp_path / "arguments"
    printed = "".join(f"{line}\n" for line in lines)
    program.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$*\" >> {notes}\ncat <<'END'\n{printed}END\nexit {status}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return notes


def parts(fonts: LabelFonts, text: str) -> list[tuple[str, bool]]:
    """The parts of a text, and whether an installed font draws them."""
    return [(run.text, isinstance(run.font.path, str)) for run in fonts.runs(text)]


def test_latin_letters_are_drawn_in_the_font_of_pillow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    notes = install(tmp_path, monkeypatch)
    assert parts(LabelFonts(20), "two kites 12") == [("two kites 12", False)]
    assert not notes.exists()


def test_one_installed_font_draws_a_text_that_it_covers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, font_file: Path
):
    notes = install(
        tmp_path, monkeypatch, "/none.ttf\t0\tFalse\t20-ffff", f"{font_file}\t0\tFalse\t20-7e 4e00-9fff"
    )
    fonts = LabelFonts(20)
    for _ in range(2):
        assert parts(fonts, "\u661f a") == [("\u661f a", True)]
    (arguments,) = notes.read_text().splitlines()
    assert "sans-serif:charset=61 661f:" in arguments


def test_a_text_in_several_scripts_has_a_font_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, font_file: Path
):
    install(tmp_path, monkeypatch, f"{font_file}\t0\tFalse\t4e00-9fff", f"{font_file}\t0\tFalse\t430-44f")
    assert parts(LabelFonts(20), "a \u661f\u72d7 \u043a") == [
        ("a ", False),
        ("\u661f\u72d7", True),
        (" ", False),
        ("\u043a", True),
    ]


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        ((), 0),
        (("no table", "x\ty\tz\tw", "/none.ttf\t0\tFalse\t0-10ffff"), 0),
        (("{font}\t0\tTrue\t0-10ffff",), 0),  # a font in several colours
        (("{font}\t0\tFalse\t0-10ffff",), 1),
    ],
)
def test_without_a_font_a_character_is_its_code_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, font_file: Path, lines: tuple[str, ...], status: int
):
    install(tmp_path, monkeypatch, *(line.format(font=font_file) for line in lines), status=status)
    fonts = LabelFonts(20)
    assert parts(fonts, "cat \u72d7\u661f 2") == [("cat ", False), ("U+72D7 U+661F", False), (" 2", False)]
    assert [part for part, _ in parts(fonts, "\u72d7" * 9 + "1")] == [" ".join(["U+72D7"] * 6) + " …", "1"]
    assert parts(fonts, "h\u00f6her") == [("hoher", False)]


def test_without_fontconfig_a_character_is_its_code_point(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert parts(LabelFonts(20), "\u72d7") == [("U+72D7", False)]
