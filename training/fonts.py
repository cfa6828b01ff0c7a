"""The fonts that text is printed in. Files come from installed font packages and are never kept here."""

import functools
import importlib.util
from pathlib import Path

from PIL import ImageFont

# Package and file. Pillow's own face stands first, under no package.
FACES: tuple[tuple[str, str], ...] = (
    ("", ""),
    ("font_roboto", "Roboto-Regular.ttf"),
    ("font_roboto", "Roboto-Bold.ttf"),
    ("font_roboto", "Roboto-Medium.ttf"),
    ("font_roboto", "Roboto-Italic.ttf"),
    ("font_roboto", "Roboto-Black.ttf"),
    ("font_source_sans_pro", "SourceSansPro-Regular.ttf"),
    ("font_source_sans_pro", "SourceSansPro-Bold.ttf"),
    ("font_caladea", "Caladea-Regular.ttf"),
    ("font_caladea", "Caladea-Bold.ttf"),
    ("font_manrope", "Manrope-Regular.ttf"),
    ("font_manrope", "Manrope-Bold.ttf"),
    ("font_hanken_grotesk", "HankenGrotesk-Regular.otf"),
    ("font_hanken_grotesk", "HankenGrotesk-Bold.otf"),
    ("font_fredoka_one", "FredokaOne-Regular.ttf"),
    ("font_fjallaone", "FjallaOne-Regular.ttf"),
    ("font_rhd", "RedHatDisplay-Regular.ttf"),
    ("font_rhd", "RedHatDisplay-Bold.ttf"),
    ("font_source_serif_pro", "SourceSerifPro-Regular.ttf"),
    ("font_source_serif_pro", "SourceSerifPro-Bold.ttf"),
)
# Never trained on: italics and weights of the same packages, for scores.
HELD_OUT_FACES: tuple[tuple[str, str], ...] = (
    ("font_caladea", "Caladea-Italic.ttf"),
    ("font_caladea", "Caladea-BoldItalic.ttf"),
    ("font_source_serif_pro", "SourceSerifPro-It.ttf"),
    ("font_source_serif_pro", "SourceSerifPro-Black.ttf"),
    ("font_source_sans_pro", "SourceSansPro-SemiboldIt.ttf"),
    ("font_source_sans_pro", "SourceSansPro-Black.ttf"),
    ("font_rhd", "RedHatDisplay-MediumItalic.ttf"),
    ("font_rhd", "RedHatDisplay-Black.ttf"),
    ("font_hanken_grotesk", "HankenGrotesk-BoldItalic.otf"),
    ("font_manrope", "Manrope-ExtraBold.ttf"),
    ("font_roboto", "Roboto-LightItalic.ttf"),
)


@functools.lru_cache(maxsize=512)
def load_font(face: int, size_px: int) -> ImageFont.FreeTypeFont:
    """Returns face number `face` of both lists at a size.

    Raises `ModuleNotFoundError` where its package is not installed.
    """
    package, file = (FACES + HELD_OUT_FACES)[face]
    if not package:
        font = ImageFont.load_default(size_px)
        assert isinstance(font, ImageFont.FreeTypeFont), "Pillow was built without FreeType"
        return font
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"{package} is missing; install the training extra: pip install '.[training]'")
    return ImageFont.truetype(Path(spec.origin).with_name("files") / file, size_px)
