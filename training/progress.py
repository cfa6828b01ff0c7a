"""A progress bar on one line of the terminal."""

import time

_WIDTH = 24


class Progress:
    """Shows how far a run is and how long it has to go."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._start: tuple[int, float] | None = None

    def show(self, done: int, note: str) -> None:
        """Draw the bar anew."""
        now = time.monotonic()
        first, started = self._start = self._start or (done, now)
        per_step = (now - started) / (done - first) if done > first else 0.0
        filled = "█" * round(_WIDTH * done / self._total)
        rest = f"{per_step * 1000:.0f} ms/step, {per_step * (self._total - done) / 60:.1f} min left"
        print(f"\r{filled:░<{_WIDTH}} {done}/{self._total}  {note}, {rest}   ", end="", flush=True)
