"""Programs for four ranks."""

import gc
import os

# A rank of torchrun: collecting garbage is a quarter of the time of its imports, of which `program` is the last.
if "TORCHELASTIC_RUN_ID" in os.environ:
    gc.disable()
