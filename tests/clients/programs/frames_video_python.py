"""The example that draws boxes into a video, on one of the picture: PyAV writes it, and reads what was drawn."""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import av  # installed in an environment of its own
from PIL import Image

NUM_FRAMES = 5


def main() -> None:
    facts = json.loads(sys.argv[1])
    example = Path(__file__).parents[3] / "clients/python/examples/frames/video.py"
    spec = importlib.util.spec_from_file_location("video", example)
    assert spec is not None
    assert spec.loader is not None
    video: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(video)
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "in.mp4", Path(folder) / "out.mp4"
        picture = Image.open(facts["picture"]).convert("RGB")
        picture = picture.resize((picture.width // 2 * 2, picture.height // 2 * 2))
        with av.open(str(source), "w") as written:
            stream = written.add_stream("mpeg4", rate=10)
            stream.width, stream.height = picture.size
            for _ in range(NUM_FRAMES):
                written.mux(stream.encode(av.VideoFrame.from_image(picture)))
            written.mux(stream.encode(None))
        assert video.draw(str(source), str(target), "star", facts["open"]) == NUM_FRAMES
        with av.open(str(target)) as drawn:
            frames = [frame.to_image() for frame in drawn.decode(video=0)]
    assert len(frames) == NUM_FRAMES
    assert all(frame.size == picture.size for frame in frames)
    colours: Any = frames[-1].getcolors(2**24)
    reddest = max(red - max(green, blue) for _, (red, green, blue) in colours)
    assert reddest > 100, "a box is drawn"
    print("boxes drawn into each frame of a video", flush=True)


if __name__ == "__main__":
    main()
