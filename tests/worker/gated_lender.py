"""`python -m tests.worker.gated_lender --config FILE`: a worker that stops in the middle of the first loan of its weights.

It prints {"lending": true} then, and its KV thread stands still until the process is killed.
"""

from __future__ import annotations

import json
import sys
import time

from engine.loading.weight_image import WeightImage
from worker.main import main

OPEN_PAGES = 2  # that are read before the gate


class GatedImage(WeightImage):
    num_read = 0

    def read(self, offset: int, out: memoryview) -> None:
        GatedImage.num_read += 1
        if GatedImage.num_read > OPEN_PAGES:
            print(json.dumps({"lending": True}), flush=True)
            time.sleep(3_600.0)
        super().read(offset, out)


if __name__ == "__main__":
    import engine.loading.weight_image as module

    module.WeightImage = GatedImage  # type: ignore[misc]
    sys.exit(main())
