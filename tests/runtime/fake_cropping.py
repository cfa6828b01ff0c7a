"""A division of images that is made for tests: 4 by 4 pixels, at most two rows and two columns of crops."""

import numpy as np
import torch
from PIL import Image

from kestrel_runtime.imaging.crops import Crops, DecodedImage

CROP_PX = 4


class FakeCropping:
    """One row or column of crops for up to 4 pixels, two for more. Crops do not overlap."""

    crop_bytes = 3 * CROP_PX**2
    max_crops = 5

    def select(self, height_px: int, width_px: int) -> tuple[int, int]:
        return 1 + (height_px > CROP_PX), 1 + (width_px > CROP_PX)

    def make_crops(self, image: Image.Image) -> Crops:
        rows, columns = self.select(image.height, image.width)
        canvas = np.asarray(image.resize((columns * CROP_PX, rows * CROP_PX)))
        grid = canvas.reshape(rows, CROP_PX, columns, CROP_PX, 3).swapaxes(1, 2).reshape(-1, CROP_PX, CROP_PX, 3)
        whole = np.asarray(image.resize((CROP_PX, CROP_PX)))
        return Crops(np.concatenate((whole[None], grid)), rows, columns)

    def make_tensor(self, image: DecodedImage) -> torch.Tensor:
        """The same crops as a tensor."""
        return torch.from_numpy(self.make_crops(Image.fromarray(image.pixels[:, :, :3])).pixels)
