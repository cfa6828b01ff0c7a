"""A division of images that is made for tests: 4 by 4 pixels, at most two rows and two columns of tiles."""

import numpy as np
import torch
from PIL import Image

from kestrel_runtime.imaging.tiles import DecodedImage, Tiles

TILE_PX = 4


class FakeTiling:
    """One row or column of tiles for up to 4 pixels, two for more. Tiles do not overlap."""

    tile_bytes = 3 * TILE_PX**2
    max_tiles = 5

    def select(self, height_px: int, width_px: int) -> tuple[int, int]:
        return 1 + (height_px > TILE_PX), 1 + (width_px > TILE_PX)

    def make_tiles(self, image: Image.Image) -> Tiles:
        rows, columns = self.select(image.height, image.width)
        canvas = np.asarray(image.resize((columns * TILE_PX, rows * TILE_PX)))
        grid = canvas.reshape(rows, TILE_PX, columns, TILE_PX, 3).swapaxes(1, 2).reshape(-1, TILE_PX, TILE_PX, 3)
        whole = np.asarray(image.resize((TILE_PX, TILE_PX)))
        return Tiles(np.concatenate((whole[None], grid)), rows, columns)

    def make_tensor(self, image: DecodedImage) -> torch.Tensor:
        """The same tiles as a tensor."""
        return torch.from_numpy(self.make_tiles(Image.fromarray(image.pixels[:, :, :3])).pixels)
